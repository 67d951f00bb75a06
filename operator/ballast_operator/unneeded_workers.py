"""How many workers the jobs with deadlines do not need. PURE."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from ballast_queue.job import Job, JobState, Outlook
from ballast_queue.status import WorkerStatus
from ballast_worker.forecast import Forecast, rates_of

_RUNNING = {JobState.VALIDATING, JobState.IN_PROGRESS}


def unneeded_workers(active: Sequence[Job], workers: Sequence[WorkerStatus], now: float) -> int:
    """Return how many workers could leave so that every job still meets its deadline, at the present rate of a worker.

    A job at risk needs more than all, or they do not help it. While no rate is known, a job may need all of them if its
    items wait, and has as many as it needs if all of them run.
    """
    ready = [worker for worker in workers if worker.is_ready and not worker.is_draining]
    due = [job for job in active if job.deadline is not None and job.state in _RUNNING and not job.is_at_risk]
    if not due or not ready:
        return len(ready)
    rates = rates_of(ready)
    if not rates.items and not rates.output_tokens:
        return 0 if any(job.counts.waiting for job in due) else len(ready)
    each = ready[0].model_copy(
        update={
            "offline_items_per_second": rates.items / len(ready),
            "offline_tokens_per_second": rates.output_tokens / len(ready),
        }
    )

    def num_late(count: int) -> int:
        forecast = Forecast(active, [each] * count, now, {})
        return sum(forecast.of(job)[0] is not Outlook.YES for job in due)

    try:
        return len(ready) - bisect_left(range(len(ready)), 0, key=lambda count: -num_late(count))
    except (ArithmeticError, ValueError):  # whoever may write to the queue may publish any rate
        return 0
