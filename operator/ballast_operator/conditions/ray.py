"""The checks of `Degraded` for workers on Ray, by what KubeRay, the head and its Redis show. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_api.conditions import ConditionReason
from ballast_api.names import gcs_redis
from ballast_openai.errors import counted
from ballast_operator.children.ray import cluster_of, is_ready
from ballast_operator.conditions.given import ConditionValue, Given, old_version
from ballast_operator.kinds import STATEFUL_SET, Body
from ballast_operator.plan import is_live
from ballast_operator.pod_problem import creation_reason, pod_problem
from ballast_operator.ray_status import failure, is_fault_tolerant, refusal, serving_cluster, starting_cluster

RAY_START_SECONDS = 120.0
"""Time in which a Ray cluster gets a head, which loads no model, if it ever does."""


def pods_cannot_be_created(given: Given) -> ConditionValue | None:
    """Return what KubeRay reports, unless it may be from before the last progress."""
    if given.ray_service is None or given.unchanged < RAY_START_SECONDS:
        return None
    why = refusal(given.ray_service)
    return ConditionValue("True", creation_reason(why), why) if why is not None else None


def does_not_start(given: Given) -> ConditionValue | None:
    """Return what a Ray cluster lacks that has not served yet. Only the RayCluster states why its head is refused."""
    if given.ray_service is None or given.unchanged < RAY_START_SECONDS:
        return None
    metadata, new = given.resource.metadata, starting_cluster(given.ray_service)
    storage = storage_of(given)
    if storage is not None and not (storage.get("status") or {}).get("readyReplicas"):
        name = storage["metadata"]["name"]
        what, where = f"the Redis {name} for the state of Ray's head is not ready", f"statefulset {name}"
    elif new is None and serving_cluster(given.ray_service) is None:
        what, where = "KubeRay makes no Ray cluster: it may not run, or be refused", f"rayservice {metadata.name}"
    elif new is not None and not any(is_live(pod) for pod in given.snapshot.heads if cluster_of(pod) == new):
        what = f"KubeRay makes no head for the Ray cluster {new}: a quota or a policy may refuse its pod"
        where = f"raycluster {new}"
    else:
        return None
    message = f"{what}. See kubectl describe {where} -n {metadata.namespace}{old_version(given)}"
    return ConditionValue("True", ConditionReason.RAY_FAILED, message)


def has_failed(given: Given) -> ConditionValue | None:
    """Return what Ray Serve reports of the application."""
    why = failure(given.ray_service) if given.ray_service is not None else None
    return ConditionValue("True", ConditionReason.RAY_FAILED, why) if why is not None else None


def ray_parts(given: Given) -> Mapping[str, bool]:
    """Return whether the head of a Ray cluster that has served is ready, and the Redis with its state, if any."""
    cluster = _serving_cluster(given)
    if cluster is None:
        return {}
    head = any(is_ready(pod) for pod in given.snapshot.heads if cluster_of(pod) == cluster)
    storage = storage_of(given)
    if storage is None:
        return {"head": head}
    return {"head": head, "storage": bool((storage.get("status") or {}).get("readyReplicas"))}


def storage_of(given: Given) -> Body | None:
    """Return the Redis with the state of Ray's head that the operator runs; None if there is none."""
    return given.snapshot.child(STATEFUL_SET, given.resource.metadata, gcs_redis(given.resource.metadata.name))


def storage_is_down(given: Given) -> ConditionValue | None:
    """Return that workers serve without a head, because the Redis with its state is not ready."""
    if ray_parts(given).get("storage", True):
        return None
    name = gcs_redis(given.resource.metadata.name)
    message = (
        f"the Redis {name} with the state of Ray's head is not ready, so the head cannot run; {_without_head(given)}"
    )
    return ConditionValue("True", ConditionReason.RAY_STORAGE_DOWN, message)


def head_is_down(given: Given) -> ConditionValue | None:
    """Return that workers serve without a head."""
    if ray_parts(given).get("head", True):
        return None
    cluster = _serving_cluster(given)
    heads = [pod for pod in given.snapshot.heads if cluster_of(pod) == cluster]
    problem = next((found for pod in heads if is_live(pod) and (found := pod_problem(pod))), None)
    why = f" ({problem.message})" if problem is not None else ""
    message = f"the head of the Ray cluster {cluster} is not ready{why}; {_without_head(given)}"
    return ConditionValue("True", ConditionReason.RAY_HEAD_DOWN, message)


def _serving_cluster(given: Given) -> str | None:
    """Return the Ray cluster that has served, which must have a head. That of one that starts may not be ready yet."""
    if given.ray_service is None or given.resource.spec.runtime.ray is None:
        return None
    return serving_cluster(given.ray_service)


def _without_head(given: Given) -> str:
    assert given.ray_service is not None, "the caller checked it"
    ready = given.count("readyReplicas")
    if not ready:
        return "no worker serves. Until the head is back, Ray starts no worker"
    lasting = "ten minutes" if is_fault_tolerant(given.ray_service) else "a minute"
    serving = counted(ready, "worker serves", "workers serve")
    return f"{serving} on for {lasting}. Until the head is back, Ray replaces no worker, and no change reaches them"
