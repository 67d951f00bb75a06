"""The section `runtime.ray`: workers as replicas of Ray Serve, on a Ray cluster that KubeRay runs."""

from __future__ import annotations

from pydantic import Field

from ballast_api.base import ApiModel
from ballast_api.pods import Resources, SecretKey, SecretName


class GcsRedis(ApiModel):
    """The Redis in which Ray's head keeps its state. It must not be the Redis of the queue."""

    address: str = Field(max_length=253, pattern=r"^[A-Za-z0-9.-]+:[0-9]{1,5}$", examples=["ray-redis:6379"])
    """Host and port."""
    password_secret: SecretName | None = None
    """Secret with the password, in the resource's namespace; by default Redis needs none."""
    password_key: SecretKey = "password"  # noqa: S105 - the name of a key
    """Key of that Secret."""


class RayRuntime(ApiModel):
    """A Ray cluster of this resource. It needs KubeRay in the cluster, and an image with Ray in `template.image`."""

    nodes: int = Field(default=1, ge=1, le=16)
    """Pods over which each worker spreads its model. `gpu.count` counts the GPUs of one pod. Above 1 it needs vLLM."""
    gcs_redis: GcsRedis | None = None
    """The Redis with the state of Ray's head. Without it, Ray's workers end a minute after the head."""
    head: Resources = Resources()
    """Requests and limits of the head, which has no GPU. By default it requests 500m CPU and 2Gi memory."""


class ServingRuntime(ApiModel):
    """What starts the workers. By default, a Deployment of plain pods."""

    ray: RayRuntime | None = None
    """Run the workers as replicas of Ray Serve."""
