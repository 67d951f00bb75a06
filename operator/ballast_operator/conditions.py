"""The conditions of an InferenceDeployment. Each is the first result of a chain of checks. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_api.conditions import ConditionReason, ConditionType
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import KUEUE, gcs_redis
from ballast_api.sections import SloName
from ballast_openai.errors import counted
from ballast_operator.children.config import VERSION, seconds_of
from ballast_operator.children.ray import cluster_of, is_ray_pod, is_ready
from ballast_operator.kinds import STATEFUL_SET, Body
from ballast_operator.plan import is_live
from ballast_operator.pod_problem import pod_problem, repeated_failure, scheduling_gates
from ballast_operator.poll_result import FRESH_SECONDS, PollResult
from ballast_operator.ray_status import (
    failure,
    is_fault_tolerant,
    pending,
    refusal,
    serving_cluster,
    starting_cluster,
    upgrade,
)
from ballast_operator.resource_type import Check, ConditionInput, ConditionValue, first
from ballast_queue.status import SloStatus, WorkerStatus

Given = ConditionInput[InferenceDeployment]
HELD = ConditionValue(
    "Unknown", ConditionReason.STALE, "not evaluated while the operator cannot reconcile the resource: see Degraded"
)
RAY_START_SECONDS = 120.0
"""Time in which a Ray cluster gets a head, which loads no model, if it ever does."""


def conditions(given: Given) -> dict[ConditionType, ConditionValue]:
    """Return every condition of the resource."""
    return {kind: first(checks, given) for kind, checks in CHAINS.items()}


# Ready


def _is_scaled_to_zero(given: Given) -> ConditionValue | None:
    is_made = given.deployment is not None or given.resource.spec.runtime.ray is not None
    if given.resource.spec.replicas == 0 and is_made:
        return ConditionValue("True", ConditionReason.SCALED_TO_ZERO, "spec.replicas is 0")
    return None


def _is_ready_enough(given: Given) -> ConditionValue | None:
    wanted, ready = given.resource.spec.replicas, given.count("availableReplicas")
    if ready < max(1, wanted - given.resource.spec.rollout.max_unavailable):
        return None
    figures = f"{ready} of {wanted} workers are ready"
    if _found_no_gpu(given):
        return ConditionValue(
            "True",
            ConditionReason.SERVING_ON_CPU,
            f"{figures} and run on the CPU although spec.gpu requests a GPU: the image of a worker has vLLM for CPUs. "
            "Name one with vLLM for GPUs, or set spec.gpu.count to 0",
        )
    held = _held_back(given)
    return ConditionValue("True", ConditionReason.SERVING, f"{figures}; {held}" if held else figures)


def _found_no_gpu(given: Given) -> bool:
    if given.poll is None or given.resource.spec.gpu.count == 0:
        return False
    return any(status.device == "cpu" for status in given.poll.by_pod(given.live).values())


def _is_held_back(given: Given) -> ConditionValue | None:
    held, wanted, ready = _held_back(given), given.resource.spec.replicas, given.count("availableReplicas")
    if not held:
        return None
    return ConditionValue("False", ConditionReason.SCHEDULING_GATED, f"{ready} of {wanted} workers are ready; {held}")


def _held_back(given: Given) -> str:
    """Return which pods the scheduler may not place yet, and what they wait for; empty without such a pod."""
    gates = {pod["metadata"]["name"]: found for pod in given.live if (found := scheduling_gates(pod))}
    if not gates:
        return ""
    name, found = min(gates.items())
    pods, it = (f"pod {name} waits", "it") if len(gates) == 1 else (f"{len(gates)} pods wait, such as {name},", "them")
    if any(gate.startswith(KUEUE) for gate in found):
        namespace = given.resource.metadata.namespace
        return f"{pods} until Kueue admits {it} within its quota: see kubectl get workloads -n {namespace}"
    return f"{pods} until the scheduling gate {', '.join(found)} is removed"


def _is_not_ready(given: Given) -> ConditionValue | None:
    wanted, ready = given.resource.spec.replicas, given.count("availableReplicas")
    is_starting = not ready and given.count("updatedReplicas") <= given.count("unavailableReplicas")
    reason = ConditionReason.STARTING if is_starting else ConditionReason.NOT_ENOUGH_READY
    return ConditionValue("False", reason, f"{ready} of {wanted} workers are ready")


# Progressing


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
    unknown, wanted = _is_unknown(given), given.resource.spec.replicas
    if unknown is None or given.ray_service is None or not given.is_current or upgrade(given.ray_service):
        return None
    if [given.count(name) for name in ("replicas", "availableReplicas")] != [wanted] * 2:
        return None
    ready = counted(wanted, "worker is ready", "workers are ready")
    message = f"{ready}; no report shows which of them have the newest version: {unknown.message}"
    return ConditionValue("Unknown", unknown.reason, message)


def knows_versions(given: Given) -> bool:
    """Return whether it is known which workers have the newest version. Workers on Ray report it themselves."""
    return given.ray_service is None or _is_unknown(given) is None


def ray_progress(given: Given) -> tuple[object, ...] | None:
    """Return the figures that change while a rollout on Ray makes progress; None if no progress is expected.

    Pods are no progress: KubeRay replaces those that fail. A worker of another version is not ready in between, so
    versions, which an outage of Redis hides, are not needed. Kubernetes itself watches the progress of a Deployment.
    """
    ray = given.ray_service
    if ray is None or _is_complete(given) is not None or _versions_are_unknown(given) is not None:
        return None
    storage = given.snapshot.child(STATEFUL_SET, given.resource.metadata, gcs_redis(given.resource.metadata.name))
    return (
        ray["metadata"].get("generation"),
        serving_cluster(ray),
        starting_cluster(ray),
        given.count("readyReplicas"),
        sum(is_ready(pod) for pod in given.snapshot.heads),
        ((storage or {}).get("status") or {}).get("readyReplicas"),
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
    if _deadline_passed(given):
        return ConditionValue("False", ConditionReason.ROLLOUT_STUCK, _rollout(given))
    return None


def _is_gated(given: Given) -> ConditionValue | None:
    """Return what a rollout waits for. It is not stuck: a gate has no limit of time."""
    held = _held_back(given)
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


# Degraded


def _is_refused(given: Given) -> ConditionValue | None:
    return ConditionValue("True", given.refused.reason, given.refused.message) if given.refused else None


def _pod_has_problem(given: Given) -> ConditionValue | None:
    for pod in (*given.live, *filter(is_live, given.snapshot.heads)):
        found = pod_problem(pod)
        if found is not None:
            return ConditionValue(
                "True", found.reason, f"pod {pod['metadata']['name']}: {found.message}{_old_version(given)}"
            )
    return None


def _pods_fail(given: Given) -> ConditionValue | None:
    if given.count("availableReplicas") >= given.resource.spec.replicas:
        return None
    found = repeated_failure(given.snapshot.pods)
    return ConditionValue("True", found.reason, f"{found.message}{_old_version(given)}") if found else None


def _pods_cannot_be_created(given: Given) -> ConditionValue | None:
    found = _deployment_condition(given, "ReplicaFailure")
    if not given.is_current or found is None or found.get("status") != "True":
        return None
    return _refused_pod(str(found.get("message", "")))


def _refused_pod(message: str) -> ConditionValue:
    return ConditionValue("True", ConditionReason.QUOTA if "quota" in message else ConditionReason.INVALID_POD, message)


def _ray_pods_cannot_be_created(given: Given) -> ConditionValue | None:
    """Return what KubeRay reports, unless it may be from before the last progress."""
    if given.ray_service is None or given.unchanged < RAY_START_SECONDS:
        return None
    why = refusal(given.ray_service)
    return _refused_pod(why) if why is not None else None


def _ray_does_not_start(given: Given) -> ConditionValue | None:
    """Return what a Ray cluster lacks that has not served yet. Only the RayCluster states why its head is refused."""
    if given.ray_service is None or given.unchanged < RAY_START_SECONDS:
        return None
    metadata, new = given.resource.metadata, starting_cluster(given.ray_service)
    storage = given.snapshot.child(STATEFUL_SET, metadata, gcs_redis(metadata.name))
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
    message = f"{what}. See kubectl describe {where} -n {metadata.namespace}{_old_version(given)}"
    return ConditionValue("True", ConditionReason.RAY_FAILED, message)


def _secret_is_missing(given: Given) -> ConditionValue | None:
    problem = given.poll.problem if given.poll else None
    if problem is not None and problem.reason is ConditionReason.NO_SECRET:
        return ConditionValue("True", problem.reason, problem.message)
    return None


def _has_left_a_queue(given: Given) -> ConditionValue | None:
    for queue in given.poll.former if given.poll else ():
        if queue.num_unfinished and not queue.is_served:
            return ConditionValue(
                "True",
                ConditionReason.QUEUE_LEFT,
                f"the queue {queue.name}, which the workers served before, has {queue.num_unfinished} unfinished "
                "items, and no worker serves it. Set spec.offline.queue back until they are done, or cancel their jobs",
            )
    return None


def _functions_are_older(given: Given) -> ConditionValue | None:
    if given.poll is None or not given.poll.has_older_functions:
        return None
    return ConditionValue(
        "True",
        ConditionReason.OLDER_FUNCTIONS,
        "Redis has the functions of an older version of Ballast, and no memory for those of this one, so workers of "
        "this version take no offline work: raise maxmemory (valkey.maxMemory of the chart)",
    )


def _exceeds_deadline(given: Given) -> ConditionValue | None:
    if not _deadline_passed(given) or _held_back(given):
        return None
    seconds = given.resource.spec.startup_seconds
    return ConditionValue(
        "True",
        ConditionReason.ROLLOUT_STUCK,
        f"no progress within {seconds} s (rollout.startupSeconds){_old_version(given)}",
    )


def _ray_has_failed(given: Given) -> ConditionValue | None:
    why = failure(given.ray_service) if given.ray_service is not None else None
    return ConditionValue("True", ConditionReason.RAY_FAILED, why) if why is not None else None


def ray_parts(given: Given) -> Mapping[str, bool]:
    """Return whether the head of a Ray cluster that has served is ready, and the Redis with its state, if any."""
    cluster = _serving_cluster(given)
    if cluster is None:
        return {}
    head = any(is_ready(pod) for pod in given.snapshot.heads if cluster_of(pod) == cluster)
    storage = given.snapshot.child(STATEFUL_SET, given.resource.metadata, gcs_redis(given.resource.metadata.name))
    if storage is None:
        return {"head": head}
    return {"head": head, "storage": bool((storage.get("status") or {}).get("readyReplicas"))}


def _ray_storage_is_down(given: Given) -> ConditionValue | None:
    if ray_parts(given).get("storage", True):
        return None
    name = gcs_redis(given.resource.metadata.name)
    message = (
        f"the Redis {name} with the state of Ray's head is not ready, so the head cannot run; {_without_head(given)}"
    )
    return ConditionValue("True", ConditionReason.RAY_STORAGE_DOWN, message)


def _ray_head_is_down(given: Given) -> ConditionValue | None:
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


def _is_healthy(given: Given) -> ConditionValue:
    if given.ray_service is not None and not is_fault_tolerant(given.ray_service):
        message = "no problem found; no Redis keeps the state of Ray's head, so the workers end a minute after it"
        return ConditionValue("False", ConditionReason.HEALTHY, message)
    return ConditionValue("False", ConditionReason.HEALTHY, "no problem found")


def _old_version(given: Given) -> str:
    ready, updated = given.count("availableReplicas"), given.count("updatedReplicas")
    is_known = ready > updated and knows_versions(given)
    left = counted(ready, "worker of the old version remains ready", "workers of the old version remain ready")
    return f"; {left}" if is_known else ""


def _deadline_passed(given: Given) -> bool:
    if given.ray_service is not None:
        return given.unchanged >= given.resource.spec.startup_seconds and pending(given.ray_service) is None
    found = _deployment_condition(given, "Progressing")
    return given.is_current and found is not None and found.get("reason") == "ProgressDeadlineExceeded"


def _deployment_condition(given: Given, kind: str) -> Body | None:
    entries = ((given.deployment or {}).get("status") or {}).get("conditions") or ()
    return next((entry for entry in entries if entry.get("type") == kind), None)


# ConfigApplied, and the conditions from reports of workers and queue


def _is_unknown(given: Given) -> ConditionValue | None:
    poll = given.poll
    if given.is_held:
        return HELD
    if poll is None:
        return ConditionValue("Unknown", ConditionReason.PENDING, "workers and queue have not been polled yet")
    if poll.problem is not None:
        return ConditionValue("Unknown", poll.problem.reason, poll.problem.message)
    if given.now - poll.at > FRESH_SECONDS:
        return ConditionValue(
            "Unknown", ConditionReason.STALE, f"the last poll of workers and queue is older than {FRESH_SECONDS:g} s"
        )
    return None


def _poll(given: Given) -> PollResult:
    assert given.poll is not None, "_is_unknown precedes this check"
    return given.poll


def _no_worker(given: Given) -> ConditionValue | None:
    if not _poll(given).workers:
        return ConditionValue("Unknown", ConditionReason.NO_WORKERS, "no worker has reported")
    return None


def _queue_follows_another(given: Given) -> ConditionValue | None:
    settings, metadata = _poll(given).settings, given.resource.metadata
    if settings is None or not settings.owner:
        return None
    if settings.owner != f"{metadata.namespace}/{metadata.name}":
        others = "another resource: that of its name, or an older one"
    elif settings[1:] > (seconds_of(metadata.creation_timestamp), metadata.generation):
        others = (
            f"generation {settings.generation:.0f} of this resource, which this cluster does not have: the resource "
            "was restored from a backup, or another cluster has a resource of this name. They end five minutes after "
            "the last worker of that generation"
        )
    else:
        return None
    message = (
        f"the queue {given.resource.queue_name} follows the settings of {others}. Tenants, models, attempts and times "
        "of this resource do not apply to its jobs"
    )
    return ConditionValue("False", ConditionReason.OTHER_SETTINGS, message)


def _has_config(given: Given) -> ConditionValue:
    statuses = _poll(given).by_pod(given.live)
    workers = [pod for pod in given.live if _is_worker(pod, statuses)]
    if not workers:
        return ConditionValue("Unknown", ConditionReason.NO_WORKERS, "only workers that are ending have reported")
    behind = []
    for pod in workers:
        name = pod["metadata"]["name"]
        wanted = given.plan.files.get((pod["metadata"].get("annotations") or {}).get(VERSION, ""))
        if name not in statuses or statuses[name].config_hash != wanted:
            behind.append(name)
    total = len(workers)
    if behind:
        message = f"{total - len(behind)} of {total} workers use the newest settings; {behind[0]} does not yet"
        return ConditionValue("False", ConditionReason.PENDING, message)
    users = "the worker uses" if total == 1 else f"all {total} workers use"
    message = f"{users} the settings of generation {given.resource.metadata.generation}"
    if _poll(given).has_newer_functions:
        message += "; the functions in Redis are those of a newer version of Ballast: upgrade the release"
        return ConditionValue("True", ConditionReason.NEWER_FUNCTIONS, message)
    return ConditionValue("True", ConditionReason.APPLIED, message)


def _is_worker(pod: Body, statuses: Mapping[str, WorkerStatus]) -> bool:
    """Return whether a pod is a worker that has started. A pod that starts later reads the newest settings.

    Of a worker over several Ray pods, only one is ever ready and reports. Nothing else distinguishes these pods before
    that: Serve decides which of them gets the HTTP server.
    """
    has_started = is_ready(pod) if is_ray_pod(pod) else (pod.get("status") or {}).get("phase") != "Pending"
    return has_started or pod["metadata"]["name"] in statuses


def _reservation_is_not_met(given: Given) -> ConditionValue | None:
    short = [worker for worker in _serving_workers(given) if _is_short(worker)]
    if not short:
        return None
    first = short[0]
    others = f"; {len(short)} workers are in this state" if len(short) > 1 else ""
    return ConditionValue(
        "False",
        ConditionReason.RESERVATION_NOT_MET,
        f"{_pod_of(given, first)} runs offline requests in {first.reservation.in_use} of {first.reservation.slots} "
        f"reserved slots, while {first.offline.waiting + first.offline.parked} wait there and {_depth(given)} wait "
        f"in the queue{others}",
    )


def _is_short(worker: WorkerStatus) -> bool:
    """Return whether offline work waits that the reservation covers, in the engine or in the queue."""
    found = worker.reservation
    waits_here = worker.offline.waiting + worker.offline.parked > 0
    has_free_slot = found.in_use < found.slots and not found.is_met_by_tokens
    return (waits_here and not found.is_met) or (worker.can_claim and has_free_slot)


def _reservation_is_not_reported(given: Given) -> ConditionValue | None:
    workers = _serving_workers(given)
    known = given.poll.by_pod(given.live) if given.poll else {}
    silent = [name for pod in given.live if is_ready(pod) and (name := pod["metadata"]["name"]) not in known]
    if silent:
        total = len(workers) + len(silent)
        message = f"{len(silent)} of {total} workers did not report their reservation, such as {silent[0]}"
    elif not workers:
        message = "no reporting worker takes offline work: each one is draining or not ready"
    else:
        return None
    waiting = counted(_depth(given), "item waits", "items wait")
    return ConditionValue("Unknown", ConditionReason.NOT_REPORTED, f"{message}; {waiting} in the queue")


def _reservation_is_met(given: Given) -> ConditionValue:
    found = [worker.reservation for worker in _serving_workers(given)]
    reserved, in_use = sum(each.slots for each in found), sum(each.in_use for each in found)
    waiting = _depth(given) + sum(worker.offline.waiting + worker.offline.parked for worker in _serving_workers(given))
    if not waiting:
        message = f"no offline work waits; {counted(reserved, 'slot is', 'slots are')} reserved"
    elif any(each.is_met_by_tokens for each in found):
        message = f"offline requests take their reserved tokens; {waiting} more wait"
    elif in_use < reserved:
        message = (
            f"offline requests run in {in_use} of {reserved} reserved slots; the {waiting} that wait are paused, "
            "delayed after a failure, of another model, or above the maxSlots of their tenant, or Redis is full"
        )
    else:
        message = f"offline requests run in all {reserved} reserved slots; {waiting} more wait"
    return ConditionValue("True", ConditionReason.SATISFIED, message)


def _serving_workers(given: Given) -> list[WorkerStatus]:
    """Return the workers that take offline work."""
    return [worker for worker in _poll(given).workers if worker.is_ready and not worker.is_draining]


def _pod_of(given: Given, worker: WorkerStatus) -> str:
    """Return the name of a worker's pod. Names from Redis are not shown: a URL may lead to the queue of others."""
    pods = _poll(given).by_pod(given.live).items()
    return next((name for name, status in pods if status is worker), "a worker")


def _depth(given: Given) -> int:
    return given.poll.queue.depth if given.poll and given.poll.queue else 0


_SHOWN: Mapping[SloName, str] = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
"""Names of the SLOs in messages."""


def _slo_is_missed(given: Given) -> ConditionValue | None:
    objective = given.resource.spec.slo.objective_percent
    missed = [name for name, met, judged in _slo_counts(given) if 100 * met < objective * judged]
    if not missed:
        return None
    return ConditionValue(
        "False",
        ConditionReason.MISSED,
        f"too few requests meet {' and '.join(_SHOWN[name] for name in missed)}: {_slo_figures(given)}",
    )


def _slo_is_met(given: Given) -> ConditionValue:
    if not _slo_counts(given):
        return ConditionValue("True", ConditionReason.NO_TRAFFIC, "no online request ended in the last minute")
    return ConditionValue("True", ConditionReason.MET, _slo_figures(given))


def _slo_counts(given: Given) -> list[tuple[SloName, int, int]]:
    """Return (name of the SLO, requests that met it, judged requests) over all workers; nothing without requests."""
    found = [worker.slo for worker in _poll(given).workers]
    total = SloStatus(**{name: sum(getattr(each, name) for each in found) for name in SloStatus.model_fields})
    counts = [
        (name, getattr(total, f"{name}_met"), getattr(total, f"{name}_judged"))
        for name in given.resource.spec.slo.milliseconds
    ]
    return [count for count in counts if count[2]]


def _slo_figures(given: Given) -> str:
    slo = given.resource.spec.slo
    limits = slo.milliseconds
    shares = [
        f"{met} of {judged} requests met {_SHOWN[name]} {limits[name]:g} ms" for name, met, judged in _slo_counts(given)
    ]
    return f"{', '.join(shares)} in the last minute; the objective is {slo.objective_percent:g} %"


def _is_late(given: Given) -> ConditionValue | None:
    queue = given.poll.queue if given.poll else None
    if queue is None or not queue.jobs_at_risk:
        return None
    found = counted(queue.jobs_at_risk, "job will miss its deadline", "jobs will miss their deadline")
    held = queue.unclaimable_at_risk
    including = f", including {counted(held, 'job')} whose items no worker can claim" if held else ""
    return ConditionValue("True", ConditionReason.LATE, f"{found} at the present rate{including}")


def _no_worker_for_items(given: Given) -> ConditionValue | None:
    """Return Unknown if jobs have deadlines that only a worker can forecast. Without any, no job is at risk."""
    poll = _poll(given)
    queue = poll.queue
    has_items = queue is not None and queue.items.leased + max(0, queue.depth - queue.unclaimable) > 0
    return _no_worker(given) if has_items and poll.has_deadlines else None


def _is_on_time(_given: Given) -> ConditionValue:
    return ConditionValue("False", ConditionReason.ON_TIME, "no job is at risk")


_DEGRADED = (
    _is_refused,
    _pods_cannot_be_created,
    _ray_storage_is_down,
    _ray_head_is_down,
    _ray_pods_cannot_be_created,
    _ray_does_not_start,
    _pod_has_problem,  # without their head, workers fail one after the other
    _pods_fail,
    _ray_has_failed,
    _secret_is_missing,
    _functions_are_older,
    _exceeds_deadline,
    _has_left_a_queue,
    _is_healthy,
)
CHAINS: Mapping[ConditionType, tuple[Check[InferenceDeployment], ...]] = {
    ConditionType.READY: (_is_scaled_to_zero, _is_ready_enough, _is_held_back, _is_not_ready),
    ConditionType.PROGRESSING: (
        _has_no_known_rollout,
        _is_complete,
        _versions_are_unknown,
        _is_gated,
        _is_stuck,
        _ray_finds_no_place,
        _is_rolling,
    ),
    ConditionType.DEGRADED: _DEGRADED,
    ConditionType.CONFIG_APPLIED: (_is_unknown, _queue_follows_another, _no_worker, _has_config),
    ConditionType.OFFLINE_RESERVATION_SATISFIED: (
        _is_unknown,
        _no_worker,
        _reservation_is_not_met,
        _reservation_is_not_reported,
        _reservation_is_met,
    ),
    ConditionType.SLO_MET: (_is_unknown, _no_worker, _slo_is_missed, _slo_is_met),
    ConditionType.DEADLINE_AT_RISK: (_is_unknown, _is_late, _no_worker_for_items, _is_on_time),
}
