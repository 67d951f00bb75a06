"""`Progressing`: whether pods are being created or replaced, and for how long nothing has changed. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_openai.errors import counted
from ballast_operator.children.ray import is_ready
from ballast_operator.conditions.given import (
    HELD,
    ConditionValue,
    Given,
    deployment_condition,
    is_unknown,
    knows_versions,
)
from ballast_operator.conditions.ray import RAY_START_SECONDS, storage_of
from ballast_operator.conditions.ready import held_back
from ballast_operator.ray_status import pending, serving_cluster, starting_cluster, upgrade


def _has_no_known_rollout(given: Given) -> ConditionValue | None:
    """Return Unknown if the resource is not reconciled, and no Deployment shows how many workers are of one version."""
    if given.is_held and (given.ray_service is not None or given.deployment is None):
        return HELD
    return None


def _is_complete(given: Given) -> ConditionValue | None:
    """Return Complete, but never of a spec that is not applied: the Deployment has the replicas of an earlier one."""
    wanted, deployment, refused = given.resource.spec.replicas, given.deployment, given.refused
    if refused is not None and deployment is None:
        return ConditionValue("False", refused.reason, refused.message)
    if deployment is not None and given.ray_service is None and (given.is_held or refused is not None):
        wanted = deployment["spec"].get("replicas", 1)
    figures = [given.count(name) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    if (given.is_current or _has_left_ray(given)) and figures == [wanted] * 3:
        if given.is_held:
            return HELD
        if refused is not None:
            return ConditionValue("False", refused.reason, refused.message)
        message = counted(wanted, "worker of the newest version is ready", "workers of the newest version are ready")
        return ConditionValue("False", ConditionReason.COMPLETE, message)
    return None


def _has_left_ray(given: Given) -> bool:
    """Return whether a resource on Ray has no replicas, and so no RayService, and all of its pods are gone."""
    spec = given.resource.spec
    return spec.runtime.ray is not None and not spec.replicas and given.deployment is None and not given.live


def _versions_are_unknown(given: Given) -> ConditionValue | None:
    """Return Unknown if all workers on Ray are ready, and no report shows whether they have the newest version."""
    unknown, wanted = is_unknown(given), given.resource.spec.replicas
    if unknown is None or given.ray_service is None or not given.is_current or upgrade(given.ray_service):
        return None
    if [given.count(name) for name in ("replicas", "availableReplicas")] != [wanted] * 2:
        return None
    ready = counted(wanted, "worker is ready", "workers are ready")
    message = f"{ready}; no report shows which of them have the newest version: {unknown.message}"
    return ConditionValue("Unknown", unknown.reason, message)


def ray_progress(given: Given) -> tuple[object, ...] | None:
    """Return the figures that change while a rollout on Ray makes progress; None if no progress is expected.

    Pods are no progress: KubeRay replaces those that fail. A worker of another version is not ready in between, so
    versions, which an outage of Redis hides, are not needed. Kubernetes itself watches the progress of a Deployment.
    """
    ray = given.ray_service
    if ray is None or _is_complete(given) is not None or _versions_are_unknown(given) is not None:
        return None
    return (
        ray["metadata"].get("generation"),
        serving_cluster(ray),
        starting_cluster(ray),
        given.count("readyReplicas"),
        sum(is_ready(pod) for pod in given.snapshot.heads),
        ((storage_of(given) or {}).get("status") or {}).get("readyReplicas"),
    )


def reported_lack(given: Given) -> float:
    """Return the seconds without progress on Ray that the reported status shows. A restart takes nothing back."""
    metadata, status = given.resource.metadata, given.resource.status
    if given.count("readyReplicas") != status.ready_replicas:
        return 0.0
    known = {(each.type, each.reason) for each in status.conditions if each.observed_generation == metadata.generation}
    if (ConditionType.PROGRESSING, ConditionReason.ROLLOUT_STUCK) in known:
        return float(given.resource.spec.startup_seconds)
    lacks = (ConditionReason.RAY_FAILED, ConditionReason.QUOTA, ConditionReason.INVALID_POD)
    return RAY_START_SECONDS if any((ConditionType.DEGRADED, reason) in known for reason in lacks) else 0.0


def _is_stuck(given: Given) -> ConditionValue | None:
    if deadline_passed(given):
        return ConditionValue("False", ConditionReason.ROLLOUT_STUCK, _rollout(given))
    return None


def _is_gated(given: Given) -> ConditionValue | None:
    """Return what a rollout waits for. It is not stuck: a gate has no limit of time."""
    held = held_back(given)
    return ConditionValue("True", ConditionReason.SCHEDULING_GATED, f"{_rollout(given)}; {held}") if held else None


def _ray_finds_no_place(given: Given) -> ConditionValue | None:
    why = pending(given.ray_service) if given.ray_service is not None else None
    if why is None:
        return None
    return ConditionValue("True", ConditionReason.RAY_REPLICAS_PENDING, f"{_rollout(given)}; Ray Serve reports: {why}")


def _is_rolling(given: Given) -> ConditionValue | None:
    if given.count("availableReplicas"):
        return ConditionValue("True", ConditionReason.ROLLING_OUT, _rollout(given))
    return ConditionValue("True", ConditionReason.STARTING, _rollout(given))


def _rollout(given: Given) -> str:
    updated, ready = given.count("updatedReplicas"), given.count("availableReplicas")
    wanted = given.resource.spec.replicas
    found = f"{updated} of {wanted} workers have the newest version; {counted(ready, 'is', 'are')} ready in all"
    if not knows_versions(given):
        found = f"{ready} of {wanted} workers are ready"
    more = upgrade(given.ray_service) if given.ray_service is not None else ""
    return f"{found}; {more}" if more else found


def deadline_passed(given: Given) -> bool:
    """Return whether a rollout has made no progress for longer than a worker has to start."""
    if given.ray_service is not None:
        return given.unchanged >= given.resource.spec.startup_seconds and pending(given.ray_service) is None
    found = deployment_condition(given, "Progressing")
    return given.is_current and found is not None and found.get("reason") == "ProgressDeadlineExceeded"


PROGRESSING = (
    _has_no_known_rollout,
    _is_complete,
    _versions_are_unknown,
    _is_gated,
    _is_stuck,
    _ray_finds_no_place,
    _is_rolling,
)
