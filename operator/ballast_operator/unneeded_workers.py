"""How many workers the jobs with deadlines do not need. PURE."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from ballast_queue.job import Job
from ballast_queue.status import WorkerStatus
from ballast_worker.forecast import Forecast, rates_of

MOST_FORECASTS = 64
"""Jobs that are compared with fewer workers: those that need the largest part of the rate until they are due."""
MARGIN = 0.9
"""The part of the rate that fewer workers must get along with. Otherwise a worker that leaves is missed soon, because
rates vary."""


def unneeded_workers(
    active: Sequence[Job], workers: Sequence[WorkerStatus], now: float, weights: Mapping[str, float]
) -> int:
    """Return how many workers could leave so that every job still meets its deadline, with a margin.

    The present rate is divided by the slots that online requests leave to offline work, now and with fewer workers.
    A job at risk needs more than all, or they do not help it. While no rate is known, a job may need all of them if its
    items wait, and has as many as it needs if all of them run. Jobs that no worker serves need none.
    """
    ready = [worker for worker in workers if worker.is_ready and not worker.is_draining]
    served = [job for job in active if job.state.is_claimable and not job.reason]
    due = [job for job in served if job.deadline is not None and not job.is_at_risk]
    if not due or not ready:
        return len(ready)
    rates = rates_of(ready)
    if not rates.items and not rates.output_tokens:
        return 0 if any(job.counts.waiting > job.delayed for job in due) else len(ready)

    forecast = Forecast(served, ready, now, weights)

    def is_in_time(job: Job, count: int) -> bool:
        share = MARGIN * _offline_slots(ready, count) / _offline_slots(ready, len(ready))
        fewer = replace(rates, items=rates.items * share, output_tokens=rates.output_tokens * share)
        return forecast.is_in_time(job, fewer)

    needed = 1
    try:
        for job in forecast.by_pressure(due)[:MOST_FORECASTS]:
            if not is_in_time(job, needed):
                needed += bisect_left(range(needed, len(ready)), x=True, key=partial(is_in_time, job))
    except (ArithmeticError, ValueError):  # whoever may write to the queue may publish any rate
        return 0
    return len(ready) - needed


def _offline_slots(workers: Sequence[WorkerStatus], count: int) -> float:
    """Return the slots that offline work has in `count` such workers, if the online requests stay."""
    online = sum(worker.online.running + worker.online.parked + worker.online.waiting for worker in workers)
    slots = sum(max(1, min(worker.slots, worker.batch_ceiling)) for worker in workers)
    reserved = sum(worker.offline_reserved for worker in workers)
    most = sum(worker.offline_most for worker in workers)
    share = count / len(workers)
    return min(most * share, max(reserved * share, slots * share - online))
