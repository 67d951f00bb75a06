"""What a resource passes through to its pods.

Kubernetes' own types are checked by the API server when the operator applies the Deployment; what it refuses there
stands in the condition `Degraded` with its words.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ballast_api.base import ApiModel, keyed_by

SecretName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", examples=["redis"])
]
"""Name of a Secret in the resource's namespace."""
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
Json = dict[str, Any]
"""An object whose shape is Kubernetes' own."""


class Toleration(ApiModel):
    """As in a pod."""

    key: str | None = Field(default=None, max_length=317)
    operator: Literal["Exists", "Equal"] = "Equal"
    value: str | None = Field(default=None, max_length=63)
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    toleration_seconds: int | None = None


class EnvVar(ApiModel):
    """As in a container."""

    name: str = Field(min_length=1, max_length=253)
    value: str | None = Field(default=None, max_length=32768)
    value_from: Json | None = None
    """`secretKeyRef`, `configMapKeyRef`, `fieldRef` or `resourceFieldRef`."""


class Resources(ApiModel):
    """Of the worker's container, beside the GPU that `spec.gpu` asks for. Where neither part names `cpu`, 250m are
    requested, so that no other pod of the node crowds the worker out.
    """

    requests: dict[str, str | int] = Field(default={})
    limits: dict[str, str | int] = Field(default={})


class PodTemplate(ApiModel):
    """How the worker's pods differ from the operator's own. A change rolls the pods."""

    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """The worker's image; by default the one that the operator was installed with."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    image_pull_secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)
    """Names of Secrets."""
    labels: dict[str, str] = Field(default={})
    """Added to the pods, e.g. `kueue.x-k8s.io/queue-name`; those the operator sets win."""
    annotations: dict[str, str] = Field(default={})
    """Added to the pods."""
    node_selector: dict[str, str] = Field(default={})
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64)
    """Where none speaks of `node.kubernetes.io/not-ready` or `unreachable`, a worker on a node that fell silent is
    replaced after 30 s."""
    affinity: Json | None = None
    topology_spread_constraints: tuple[Json, ...] = Field(default=(), max_length=16)
    priority_class_name: str | None = Field(default=None, max_length=253)
    service_account_name: str | None = Field(default=None, max_length=253)
    runtime_class_name: str | None = Field(default=None, max_length=253)
    resources: Resources = Resources()
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128, json_schema_extra=keyed_by("name"))
    """Added to the worker's container."""
    volumes: tuple[Json, ...] = Field(default=(), max_length=64)
    """Added to the pod."""
    volume_mounts: tuple[Json, ...] = Field(default=(), max_length=64)
    """Added to the worker's container."""
