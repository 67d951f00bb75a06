"""The workers of a resource: what each one needs, how many there are, and how Kubernetes replaces them."""

from __future__ import annotations

from pydantic import Field

from ballast_api.base import ApiModel
from ballast_api.pods import MIG
from ballast_api.rules import Rule

STARTUP_SECONDS = {"native": 600, "vllm": 1800}
"""Default of `rollout.startupSeconds` by backend."""
UNREADY_SECONDS = 5
"""Default of `rollout.unreadySeconds`: the time until Services of Kubernetes and most routers send no more requests."""
RAY_UNREADY_SECONDS = 10
"""The same on Ray. Serve ends a replica in a pod that stays, and Services learn of it only from the next probe."""


class GpuRequest(ApiModel):
    """The GPUs of each worker. A change of this section rolls the pods."""

    rules = (
        Rule(
            "!(has(self.resourceName) && has(self.resourceClaimTemplate))",
            lambda gpu: gpu.resource_name is None or gpu.resource_claim_template is None,
            "gpu.resourceName and gpu.resourceClaimTemplate both request the device. Remove one of them",
        ),
        Rule(
            "self.count > 0 || !(has(self.resourceName) || has(self.resourceClaimTemplate))",
            lambda gpu: gpu.count > 0 or (gpu.resource_name is None and gpu.resource_claim_template is None),
            "gpu.count is 0, which means a worker on the CPU. Remove gpu.resourceName and gpu.resourceClaimTemplate, "
            "or set the count to 1",
        ),
        Rule(
            f"self.count <= 1 || !has(self.resourceName) || !self.resourceName.startsWith('{MIG}')",
            lambda gpu: gpu.count <= 1 or not (gpu.resource_name or "").startswith(MIG),
            "gpu.count ({count}) is above 1, but MIG slices cannot share a model: a process uses only one of them. Set "
            "the count to 1 and name a larger slice, or request whole GPUs",
        ),
    )

    count: int = Field(default=1, ge=0, le=16)
    """GPUs of each worker, which runs vLLM. 0 runs the worker on CPUs. Above 1, the GPUs share the model by tensor
    parallelism, which no other field sets."""
    resource_name: str | None = Field(
        default=None, max_length=253, examples=["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]
    )
    """Extended resource to request; by default `nvidia.com/gpu`."""
    resource_claim_template: str | None = Field(default=None, min_length=1, max_length=253)
    """ResourceClaimTemplate (dynamic resource allocation) to use instead of an extended resource."""


class Scaling(ApiModel):
    """Replicas by measured load. Without this section, people, an HPA or KEDA set `spec.replicas`."""

    rules = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
            "scaling.minReplicas ({minReplicas}) is above scaling.maxReplicas ({maxReplicas}). Lower the minimum, or "
            "raise the maximum",
        ),
        Rule(
            "!has(self.offlineMaxReplicas) || self.offlineMaxReplicas <= self.maxReplicas",
            lambda scaling: (
                scaling.offline_max_replicas is None or scaling.offline_max_replicas <= scaling.max_replicas
            ),
            "scaling.offlineMaxReplicas is above scaling.maxReplicas ({maxReplicas}), which limits all replicas. Lower "
            "offlineMaxReplicas, or raise maxReplicas",
        ),
    )

    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """Minimum of replicas. 0 scales to zero after `idleSeconds` without work. Offline work then starts a replica again.
    Online requests do not: the Service refuses them while no worker runs."""
    max_replicas: int = Field(ge=1, le=10_000)
    """Maximum of replicas."""
    headroom_percent: float = Field(default=20, ge=0, le=500)
    """Growth of the online load that the replicas can serve without a new one."""
    offline_max_replicas: int | None = Field(default=None, ge=0, le=10_000)
    """Maximum of replicas that waiting offline work alone may cause. By default offline work adds replicas only for
    deadlines at risk."""
    scale_up_seconds: int = Field(default=30, ge=0, le=3600)
    """Time that the need must last before replicas are added."""
    scale_down_seconds: int = Field(default=300, ge=0, le=86_400)
    """Time that replicas must be unneeded before they are removed."""
    idle_seconds: int = Field(default=600, ge=0, le=86_400)
    """With `minReplicas: 0`: time without work before the last replica is removed."""


class Rollout(ApiModel):
    """How pods are replaced. A change of `unreadySeconds`, `drainSeconds` or `startupSeconds` rolls the pods."""

    rules = (
        Rule(
            "self.maxSurge + self.maxUnavailable > 0",
            lambda rollout: rollout.max_surge + rollout.max_unavailable > 0,
            "rollout.maxSurge and rollout.maxUnavailable are both 0, so no pod can be replaced. Raise one of them: "
            "maxUnavailable if the cluster has no free GPU",
        ),
    )

    max_surge: int = Field(default=1, ge=0, le=100)
    """Maximum pods above `replicas` during a rollout. Each of them needs a GPU."""
    max_unavailable: int = Field(default=0, ge=0, le=100)
    """Maximum pods below `replicas` during a rollout."""
    unready_seconds: int | None = Field(default=None, ge=0, le=600)
    """Time that a terminating worker still accepts online requests, while load balancers learn that it leaves. Raise it
    for load balancers outside of the cluster that send requests to the pods themselves. By default 5, and 10 on Ray."""
    drain_seconds: int = Field(default=30, ge=0, le=3600)
    """Time that the online requests of a terminating worker have to finish. Offline items return to the queue at
    once."""
    startup_seconds: int | None = Field(default=None, ge=10, le=86_400)
    """Time that a worker has to load the model after it was fetched. After it, Kubernetes restarts the worker. A
    rollout without progress for this time counts as stuck, and fetching is no progress. By default 600, and 1800 with
    vLLM, which compiles the model."""


class Disruption(ApiModel):
    """Limits for node drains and evictions."""

    max_unavailable: int = Field(default=1, ge=0, le=10_000)
    """Maximum workers that may be evicted at a time (PodDisruptionBudget). 0 forbids voluntary evictions."""
