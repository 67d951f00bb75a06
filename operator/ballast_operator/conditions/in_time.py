"""`SLOMet` and `DeadlineAtRisk`: whether online requests and jobs end in time. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_api.conditions import ConditionReason
from ballast_api.sections import SloName
from ballast_openai.errors import counted
from ballast_operator.conditions.given import ConditionValue, Given, is_unknown, no_worker
from ballast_queue.status import SloStatus

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
    found = [worker.slo for worker in given.poll.workers]
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
    queue = given.poll.queue
    if queue is None or not queue.jobs_at_risk:
        return None
    found = counted(queue.jobs_at_risk, "job will miss its deadline", "jobs will miss their deadline")
    held = queue.unclaimable_at_risk
    including = f", including {counted(held, 'job')} whose items no worker can claim" if held else ""
    return ConditionValue("True", ConditionReason.LATE, f"{found} at the present rate{including}")


def _no_worker_for_items(given: Given) -> ConditionValue | None:
    """Return Unknown if jobs have deadlines that only a worker can forecast. Without any, no job is at risk."""
    poll = given.poll
    queue = poll.queue
    has_items = queue is not None and queue.items.leased + max(0, queue.depth - queue.unclaimable) > 0
    return no_worker(given) if has_items and poll.has_deadlines else None


def _is_on_time(_given: Given) -> ConditionValue:
    return ConditionValue("False", ConditionReason.ON_TIME, "no job is at risk")


SLO_MET = (is_unknown, no_worker, _slo_is_missed, _slo_is_met)
DEADLINE_AT_RISK = (is_unknown, _is_late, _no_worker_for_items, _is_on_time)
