"""What `status.conditions` says, each the first check that finds something. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ballast_api.conditions import ConditionType, Reason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator.children.config import VERSION
from ballast_operator.kinds import Body
from ballast_operator.load import FRESH_SECONDS, Load, Trouble
from ballast_operator.plan import is_live
from ballast_operator.trouble import pod_trouble
from ballast_queue.status import WorkerStatus

MOST_CHARACTERS = 1000


@dataclass(frozen=True, slots=True)
class Input:
    """The world as the checks see it."""

    resource: InferenceDeployment
    deployment: Body | None
    pods: tuple[Body, ...]
    load: Load | None
    now: float
    files: Mapping[str, str] = field(default_factory=dict)
    """Hash of the configuration file of each version."""
    refused: Trouble | None = None
    """What the API server would not take, in its words."""

    @property
    def live(self) -> tuple[Body, ...]:
        """Pods that run or will."""
        return tuple(pod for pod in self.pods if is_live(pod))

    def count(self, name: str) -> int:
        """A figure of the Deployment's status; zero while it has none."""
        status = (self.deployment or {}).get("status") or {}
        return int(status.get(name) or 0)

    @property
    def is_current(self) -> bool:
        """The Deployment's status speaks of its present spec."""
        found = self.deployment
        return found is not None and self.count("observedGeneration") >= found["metadata"].get("generation", 0)


class Verdict(NamedTuple):
    """What a condition says."""

    status: Literal["True", "False", "Unknown"]
    reason: Reason
    message: str


Check = Callable[[Input], Verdict | None]


def conditions(world: Input) -> dict[ConditionType, Verdict]:
    """Every condition of the resource."""
    return {kind: _first(checks, world) for kind, checks in CHAINS.items()}


def _first(checks: Iterable[Check], world: Input) -> Verdict:
    for check in checks:
        found = check(world)
        if found is not None:
            return found._replace(message=found.message[:MOST_CHARACTERS])
    raise AssertionError("the last check of a chain always has an answer")


# Ready


def _asked_for_none(world: Input) -> Verdict | None:
    if world.resource.spec.replicas == 0 and world.deployment is not None:
        return Verdict("True", Reason.SCALED_TO_ZERO, "0 replicas are asked for")
    return None


def _enough_serve(world: Input) -> Verdict | None:
    wanted, serving = world.resource.spec.replicas, world.count("availableReplicas")
    floor = max(1, wanted - world.resource.spec.rollout.max_unavailable)
    if serving < floor:
        return None
    figures = f"{serving} of {wanted} workers serve"
    if _finds_no_device(world):
        return Verdict(
            "True",
            Reason.SERVING_ON_CPU,
            f"{figures}, on the CPU: no device was found where spec.gpu asked for one. Check the driver, and that the "
            "image's torch has CUDA, or set gpu.count to 0",
        )
    return Verdict("True", Reason.SERVING, figures)


def _finds_no_device(world: Input) -> bool:
    if world.load is None or world.resource.spec.gpu.count == 0:
        return False
    return any(status.device == "cpu" for status in world.load.of_pods(world.live).values())


def _too_few_serve(world: Input) -> Verdict | None:
    wanted, serving = world.resource.spec.replicas, world.count("availableReplicas")
    if serving or world.count("updatedReplicas") > world.count("unavailableReplicas"):
        return Verdict("False", Reason.NOT_ENOUGH_READY, f"{serving} of {wanted} workers serve")
    return Verdict("False", Reason.STARTING, f"no worker serves yet, {wanted} are asked for")


# Progressing


def _is_complete(world: Input) -> Verdict | None:
    wanted = world.resource.spec.replicas
    figures = [world.count(name) for name in ("replicas", "updatedReplicas", "availableReplicas")]
    if world.is_current and figures == [wanted] * 3:
        return Verdict("False", Reason.COMPLETE, f"{wanted} workers of the newest version serve")
    return None


def _is_stuck(world: Input) -> Verdict | None:
    if _deadline_passed(world) is not None:
        return Verdict("False", Reason.ROLLOUT_STUCK, _rollout(world))
    return None


def _is_rolling(world: Input) -> Verdict | None:
    if world.count("availableReplicas"):
        return Verdict("True", Reason.ROLLING_OUT, _rollout(world))
    return Verdict("True", Reason.STARTING, _rollout(world))


def _rollout(world: Input) -> str:
    updated, serving = world.count("updatedReplicas"), world.count("availableReplicas")
    return f"{updated} of {world.resource.spec.replicas} workers have the newest version, {serving} of all serve"


# Degraded


def _is_refused(world: Input) -> Verdict | None:
    return Verdict("True", world.refused.reason, world.refused.message) if world.refused else None


def _pod_is_unwell(world: Input) -> Verdict | None:
    for pod in world.live:
        found = pod_trouble(pod)
        if found is not None:
            return Verdict("True", found.reason, f"pod {pod['metadata']['name']}: {found.message}{_old_serves(world)}")
    return None


def _pods_are_not_made(world: Input) -> Verdict | None:
    found = _deployment_condition(world, "ReplicaFailure")
    if found is None or found.get("status") != "True":
        return None
    message = found.get("message", "")
    return Verdict("True", Reason.QUOTA if "quota" in message else Reason.INVALID_POD, message)


def _secret_is_missing(world: Input) -> Verdict | None:
    trouble = world.load.trouble if world.load else None
    if trouble is not None and trouble.reason is Reason.NO_SECRET:
        return Verdict("True", trouble.reason, trouble.message)
    return None


def _takes_too_long(world: Input) -> Verdict | None:
    found = _deadline_passed(world)
    if found is None:
        return None
    seconds = world.resource.spec.rollout.startup_seconds
    return Verdict(
        "True", Reason.ROLLOUT_STUCK, f"no progress within {seconds} s (rollout.startupSeconds){_old_serves(world)}"
    )


def _is_well(_: Input) -> Verdict:
    return Verdict("False", Reason.HEALTHY, "nothing is wrong")


def _old_serves(world: Input) -> str:
    old = world.count("availableReplicas") - world.count("updatedReplicas")
    return f"; {world.count('availableReplicas')} workers of the old version serve on" if old > 0 else ""


def _deadline_passed(world: Input) -> Body | None:
    found = _deployment_condition(world, "Progressing")
    return found if found is not None and found.get("reason") == "ProgressDeadlineExceeded" else None


def _deployment_condition(world: Input, kind: str) -> Body | None:
    entries = ((world.deployment or {}).get("status") or {}).get("conditions") or ()
    return next((entry for entry in entries if entry.get("type") == kind), None)


# ConfigApplied, and what workers and queue say


def _nothing_known(world: Input) -> Verdict | None:
    load = world.load
    if load is None:
        return Verdict("Unknown", Reason.PENDING, "workers and queue have not been looked at yet")
    if load.trouble is not None:
        return Verdict("Unknown", load.trouble.reason, load.trouble.message)
    if world.now - load.at > FRESH_SECONDS:
        return Verdict("Unknown", Reason.STALE, f"the last look is older than {FRESH_SECONDS:g} s")
    return None


def _no_worker(world: Input) -> Verdict | None:
    assert world.load is not None, "asked after _nothing_known"
    if not world.load.workers:
        return Verdict("Unknown", Reason.NO_WORKERS, "no worker has reported")
    return None


def _has_config(world: Input) -> Verdict:
    assert world.load is not None, "asked after _nothing_known"
    statuses = world.load.of_pods(world.live)
    behind = []
    for pod in world.live:
        name = pod["metadata"]["name"]
        wanted = world.files.get((pod["metadata"].get("annotations") or {}).get(VERSION, ""))
        if name not in statuses or statuses[name].config_hash != wanted:
            behind.append(name)
    total = len(world.live)
    if behind:
        return Verdict(
            "False", Reason.PENDING, f"{total - len(behind)} of {total} workers have it; not yet: {behind[0]}"
        )
    return Verdict("True", Reason.APPLIED, f"all {total} workers have generation {world.resource.metadata.generation}")


def _reservation_is_not_met(world: Input) -> Verdict | None:
    short = [worker for worker in _serving_workers(world) if _is_short(worker)]
    if not short:
        return None
    first = short[0]
    assert first.reservation is not None, "a worker that does not report is not short"
    others = f"; so it is on {len(short)} workers" if len(short) > 1 else ""
    return Verdict(
        "False",
        Reason.RESERVATION_NOT_MET,
        f"{first.worker_id} runs offline requests in {first.reservation.in_use} of {first.reservation.slots} reserved "
        f"slots, while {first.offline.waiting + first.offline.parked} wait there and {_depth(world)} wait in the "
        f"queue{others}",
    )


def _is_short(worker: WorkerStatus) -> bool:
    """Return whether offline work waits that the reservation covers, in the engine or in the queue."""
    found = worker.reservation
    if found is None:
        return False
    waits_here = worker.offline.waiting + worker.offline.parked > 0
    return (waits_here and not found.is_met) or (worker.can_claim and found.in_use < found.slots)


def _reservation_is_not_reported(world: Input) -> Verdict | None:
    workers = _serving_workers(world)
    known = world.load.of_pods(world.live) if world.load else {}
    silent = [name for pod in world.live if _is_ready(pod) and (name := pod["metadata"]["name"]) not in known]
    total = len(workers) + len(silent)
    silent += [worker.worker_id for worker in workers if worker.reservation is None]
    if silent:
        message = f"{len(silent)} of {total} workers did not report their reservation, such as {silent[0]}"
    elif not workers:
        message = "no worker that reports takes offline work: each is on its way out or not ready"
    else:
        return None
    return Verdict("Unknown", Reason.NOT_REPORTED, f"{message}; {_depth(world)} items wait in the queue")


def _reservation_is_met(world: Input) -> Verdict:
    found = [worker.reservation for worker in _serving_workers(world) if worker.reservation]
    reserved, in_use = sum(each.slots for each in found), sum(each.in_use for each in found)
    waiting = _depth(world) + sum(worker.offline.waiting + worker.offline.parked for worker in _serving_workers(world))
    if not waiting:
        message = f"no offline work waits; {reserved} slots are reserved"
    elif in_use < reserved:
        message = (
            f"offline requests run in {in_use} of {reserved} reserved slots; the {waiting} that wait are paused, "
            "delayed after a failure, or above the maxSlots of their tenant"
        )
    else:
        message = f"offline requests run in all {reserved} reserved slots; {waiting} more wait"
    return Verdict("True", Reason.SATISFIED, message)


def _serving_workers(world: Input) -> list[WorkerStatus]:
    """Return the workers that take offline work."""
    assert world.load is not None, "asked after _nothing_known"
    return [worker for worker in world.load.workers if worker.is_ready and not worker.is_draining]


def _depth(world: Input) -> int:
    return world.load.queue.depth if world.load and world.load.queue else 0


def _is_ready(pod: Body) -> bool:
    conditions = pod.get("status", {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _slo(world: Input) -> Verdict:
    load, slo = world.load, world.resource.spec.slo
    assert load is not None, "asked after _nothing_known"
    ttft = [w.ttft_p99_seconds for w in load.workers if w.ttft_p99_seconds is not None]
    tpot = [w.tpot_p99_seconds for w in load.workers if w.tpot_p99_seconds is not None]
    if not ttft and not tpot:
        return Verdict("True", Reason.NO_TRAFFIC, "no online request was finished lately")
    found = {
        "TTFT": (1000 * max(ttft, default=0.0), slo.ttft_milliseconds),
        "TPOT": (1000 * max(tpot, default=0.0), slo.tpot_milliseconds),
    }
    figures = ", ".join(f"{name} p99 {got:.0f} ms of {limit:g}" for name, (got, limit) in found.items())
    missed = [name for name, (got, limit) in found.items() if got > limit]
    if missed:
        return Verdict(
            "False", Reason.MISSED, f"{' and '.join(missed)} above the promise in the slowest worker: {figures}"
        )
    return Verdict("True", Reason.MET, figures)


def _deadlines(world: Input) -> Verdict:
    queue = world.load.queue if world.load else None
    late = queue.jobs_at_risk if queue else 0
    if late:
        return Verdict("True", Reason.LATE, f"{late} jobs will miss their deadline at the present rate")
    return Verdict("False", Reason.ON_TIME, "no job is at risk")


_UNWELL = (_is_refused, _pods_are_not_made, _pod_is_unwell, _secret_is_missing, _takes_too_long, _is_well)
CHAINS: Mapping[ConditionType, tuple[Check, ...]] = {
    ConditionType.READY: (_asked_for_none, _enough_serve, _too_few_serve),
    ConditionType.PROGRESSING: (_is_complete, _is_stuck, _is_rolling),
    ConditionType.DEGRADED: _UNWELL,
    ConditionType.CONFIG_APPLIED: (_nothing_known, _no_worker, _has_config),
    ConditionType.OFFLINE_RESERVATION_SATISFIED: (
        _nothing_known,
        _no_worker,
        _reservation_is_not_met,
        _reservation_is_not_reported,
        _reservation_is_met,
    ),
    ConditionType.SLO_MET: (_nothing_known, _no_worker, _slo),
    ConditionType.DEADLINE_AT_RISK: (_nothing_known, _deadlines),
}
