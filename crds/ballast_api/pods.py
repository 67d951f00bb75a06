"""The part of a resource that Ballast copies to its pods.

The API server checks the types of Kubernetes when the operator applies the Deployment. If it refuses one of them, the
condition `Degraded` shows its message.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from ballast_api.base import ApiModel, keyed_by
from ballast_api.names import CLAIM_VOLUME, OWN_VOLUMES
from ballast_api.rules import Rule

SecretName = Annotated[
    str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", examples=["redis"])
]
"""Name of a Secret in the resource's namespace."""
SecretKey = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
KEEP_FREE = "BALLAST_KEEP_FREE_PERCENT"
"""A variable of `ballast fetch`, which no field sets."""
MEDIA_MEMORY = "BALLAST_MEDIA_MEBIBYTES"
"""A variable of Ballast inside vLLM, which no field sets."""
OWN_VOLUME = f"^({'|'.join(OWN_VOLUMES)}|{CLAIM_VOLUME}[0-9]+)$"
"""The name of a volume of Ballast, for both Python and CEL (RE2)."""
GPUS = ("nvidia.com/gpu", "nvidia.com/gpu.shared", "amd.com/gpu", "gpu.intel.com/i915", "gpu.intel.com/xe")
"""Resources of whole or shared GPUs. Others with such a prefix are parts of a request, such as HAMi's memory of a GPU,
or network cards."""
MIG = "nvidia.com/mig-"
"""How the resources of NVIDIA's MIG slices begin."""

Json = dict[str, Any]
"""An object of a Kubernetes type."""


def is_gpu(name: str) -> bool:
    """Return whether a resource of a container is a GPU."""
    return name in GPUS or name.startswith(MIG)


class Toleration(ApiModel):
    """A toleration, as in a pod."""

    key: str | None = Field(default=None, max_length=317)
    """Key of the taint. Without a key, the operator must be `Exists`, and all taints match."""
    operator: Literal["Exists", "Equal"] = "Equal"
    """`Equal` compares the value of the taint, `Exists` does not."""
    value: str | None = Field(default=None, max_length=63)
    """Value of the taint."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Effect of the taint; by default all effects match."""
    toleration_seconds: int | None = None
    """With `NoExecute`: seconds until the pod is evicted; by default it stays."""


class EnvVar(ApiModel):
    """An environment variable, as in a container."""

    rules = (
        Rule(
            f"!self.name.startsWith('BALLAST_') || self.name in ['{KEEP_FREE}', '{MEDIA_MEMORY}']",
            lambda variable: not variable.name.startswith("BALLAST_") or variable.name in {KEEP_FREE, MEDIA_MEMORY},
            f"env has a name that begins with BALLAST_ and is not {KEEP_FREE} or {MEDIA_MEMORY}. Such a variable would "
            "override fields of this resource in a worker, and no condition would show it. Set the field instead",
        ),
    )

    name: str = Field(min_length=1, max_length=253)
    """Name of the variable."""
    value: str | None = Field(default=None, max_length=32768)
    """Value of the variable."""
    value_from: Json | None = None
    """Source of the value: `secretKeyRef`, `configMapKeyRef`, `fieldRef` or `resourceFieldRef`."""


class VolumeClaim(ApiModel):
    """A claim as a volume. Its other fields are passed on."""

    model_config = ConfigDict(extra="allow")

    claim_name: str = Field(max_length=253)
    """Name of the PersistentVolumeClaim. It must not be one that Ballast mounts itself, such as that of `model.uri`."""


class Volume(ApiModel):
    """A volume, as in a pod. Its other fields, such as `configMap` or `emptyDir`, are passed on."""

    model_config = ConfigDict(extra="allow")

    name: str = Field(max_length=63)
    """Name of the volume, which must not be one of Ballast's own volumes."""
    persistent_volume_claim: VolumeClaim | None = None

    def manifest(self) -> Json:
        """Return the volume as it was written."""
        return self.model_dump(by_alias=True, exclude_unset=True)


class Resources(ApiModel):
    """Requests and limits of the worker container, without the GPUs, which `spec.gpu` requests. The container that
    fetches the model has the same. If neither requests nor limits name `cpu`, the request is 250m, so that other pods
    of the node cannot take all CPU time. With vLLM, the default request of `memory` is 4Gi, and 2Gi more for each GPU
    after the first: what the processes need beside model and KV.
    """

    requests: dict[str, str | int] = Field(default={}, max_length=64)
    """Resources that the scheduler sets aside."""
    limits: dict[str, str | int] = Field(default={}, max_length=64)
    """Resources that the container cannot exceed."""


class PodTemplate(ApiModel):
    """Changes to the worker pods. A change of this section rolls the pods."""

    rules = (
        Rule(
            f"!has(self.volumes) || self.volumes.all(volume, !volume.name.matches('{OWN_VOLUME}'))",
            lambda template: not any(re.fullmatch(OWN_VOLUME, volume.name) for volume in template.volumes),
            f"template.volumes has the name of a volume that Ballast adds: {', '.join(OWN_VOLUMES)}, or {CLAIM_VOLUME} "
            "with a number. Use another name",
            stored=("volumes",),
        ),
    )

    image: str | None = Field(default=None, min_length=1, max_length=1024)
    """Image of the worker; by default the image that the operator was installed with for the engine, with Ray for
    `runtime.ray`."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """When the node pulls the image; by default as Kubernetes derives it from the tag."""
    image_pull_secrets: tuple[SecretName, ...] = Field(default=(), max_length=16)
    """Names of the Secrets to pull the image with."""
    labels: dict[str, str] = Field(default={})
    """Labels to add to the pods, e.g. `kueue.x-k8s.io/queue-name`. The operator's labels `app.kubernetes.io/*` win. Its
    labels `llm-d.ai/*`, by which an InferencePool may select the pods, can be replaced here. On Ray, the head and its
    Valkey have the labels too, except those of Kueue and of llm-d. To select workers by them, also name
    `app.kubernetes.io/name: ballast-worker`."""
    annotations: dict[str, str] = Field(default={})
    """Annotations to add to the pods. On Ray, the head and its Valkey have them too, except those of Kueue."""
    node_selector: dict[str, str] = Field(default={})
    """Labels that a node must have."""
    tolerations: tuple[Toleration, ...] = Field(default=(), max_length=64)
    """Tolerations of the pods. The operator adds one for the GPU taint `nvidia.com/gpu` (or that of
    `gpu.resourceName`) if `gpu.count` is above 0. It also adds tolerations that replace a worker after 30 s on an
    unresponsive node. It adds none for a taint that this list names."""
    affinity: Json | None = None
    """Affinity of the pods."""
    topology_spread_constraints: tuple[Json, ...] | None = Field(default=None, max_length=16)
    """Constraints that spread the pods. By default the scheduler prefers to spread them evenly over nodes. An empty
    list sets no constraint."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """PriorityClass of the pods."""
    service_account_name: str | None = Field(default=None, max_length=253)
    """ServiceAccount of the pods. By default the pods have no token of the API server."""
    runtime_class_name: str | None = Field(default=None, max_length=253)
    """RuntimeClass of the pods, e.g. `nvidia`."""
    resources: Resources = Resources()
    env: tuple[EnvVar, ...] = Field(default=(), max_length=128, json_schema_extra=keyed_by("name"))
    """Environment variables to add to the worker container and to the container that fetches the model."""
    volumes: tuple[Volume, ...] = Field(default=(), max_length=64, json_schema_extra=keyed_by("name"))
    """Volumes to add to the pod."""
    volume_mounts: tuple[Json, ...] = Field(default=(), max_length=64)
    """Volume mounts to add to the worker container and to the container that fetches the model."""
    shared_memory_mebibytes: int | None = Field(default=None, ge=1, le=1_048_576)
    """Size limit of `/dev/shm`, an emptyDir in memory; by default 1024 for each GPU. The memory limit of the container
    includes its content. A volume mount of the template at `/dev/shm` replaces it."""
    fs_group: int | None = Field(default=None, ge=0, le=2**31 - 1)
    """Group that may write to the pod's volumes. By default 65532, the group of Ballast's image, if `model.cache` is
    set, and otherwise none. OpenShift needs a group from the range of the namespace."""
