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


class RayHead(Resources):
    """The head of the Ray cluster, which has no GPU and runs no worker. It has the `imagePullSecrets`,
    `priorityClassName` and `tolerations` of `template`, without tolerations of GPU taints. If `gpu.count` is 0, it also
    has the `nodeSelector` and `affinity` of `template`.
    """

    requests: dict[str, str | int] = Field(default={})
    """Resources that the scheduler sets aside. Without requests and limits, they are 500m CPU and 2Gi memory."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that the node of the head must have."""


class RayRuntime(ApiModel):
    """A Ray cluster of this resource. It needs KubeRay in the cluster, and an image with Ray for head and workers."""

    nodes: int = Field(default=1, ge=1, le=16)
    """Pods over which each worker spreads its model. `gpu.count` counts the GPUs of one pod. Above 1 it needs vLLM."""
    gcs_redis: GcsRedis | None = None
    """The Redis with the state of Ray's head. By default, the operator runs a Valkey for it. Without any, Ray's workers
    end a minute after the head."""
    head: RayHead = RayHead()


class ServingRuntime(ApiModel):
    """What starts the workers. By default, a Deployment of plain pods."""

    ray: RayRuntime | None = None
    """Run the workers as replicas of Ray Serve."""
