"""`OfflineReservationSatisfied`: whether offline work that waits runs in its reserved slots. PURE."""

from __future__ import annotations

from ballast_api.conditions import ConditionReason
from ballast_openai.errors import counted
from ballast_operator.children.ray import is_ready
from ballast_operator.conditions.given import ConditionValue, Given, is_unknown, no_worker
from ballast_queue.status import WorkerStatus


def _is_not_met(given: Given) -> ConditionValue | None:
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


def _is_not_reported(given: Given) -> ConditionValue | None:
    workers = _serving_workers(given)
    known = given.poll.by_pod(given.live)
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


def _is_met(given: Given) -> ConditionValue:
    found = [worker.reservation for worker in _serving_workers(given)]
    reserved, in_use = sum(each.slots for each in found), sum(each.in_use for each in found)
    waiting = _depth(given) + sum(worker.offline.waiting + worker.offline.parked for worker in _serving_workers(given))
    if not waiting:
        message = f"no offline work waits; {counted(reserved, 'slot is', 'slots are')} reserved"
        return ConditionValue("True", ConditionReason.NO_WORK, message)
    if given.poll.queue is not None and given.poll.queue.is_exhausted:
        message = (
            f"Redis uses more than 1.2 times its maxmemory, and gives out none of the {waiting} that wait; offline "
            f"requests run in {in_use} of {reserved} reserved slots"
        )
        return ConditionValue("True", ConditionReason.REDIS_FULL, message)
    if any(each.is_met_by_tokens for each in found):
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
    return [worker for worker in given.poll.workers if worker.is_ready and not worker.is_draining]


def _pod_of(given: Given, worker: WorkerStatus) -> str:
    """Return the name of a worker's pod. Names from Redis are not shown: a URL may lead to the queue of others."""
    pods = given.poll.by_pod(given.live).items()
    return next((name for name, status in pods if status is worker), "a worker")


def _depth(given: Given) -> int:
    return given.poll.queue.depth if given.poll.queue else 0


RESERVATION_SATISFIED = (is_unknown, no_worker, _is_not_met, _is_not_reported, _is_met)
