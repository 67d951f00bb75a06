"""Tells jobs whether they will meet their deadlines, one worker for all of a queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ballast_queue.job import JobState, Outlook
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus
from ballast_worker.forecast import Forecast

APPRAISE_SECONDS = 2.0
"""How soon a job that came in through the inbox is told."""
REPEAT_SECONDS = 10.0
"""The figures of an outlook that stays the same are renewed this often."""
MOST_JOBS = 64
"""Jobs that are judged at a time, those first that nobody looked at for longest; about 30 ms with 1,000 jobs."""
_ENDS = {JobState.FINALIZING, JobState.CANCELLING}


def appraise(queue: Queue, workers: Sequence[WorkerStatus], now: float, weights: Mapping[str, float]) -> None:
    """Judge the jobs with a deadline, where no other worker did so a moment ago; `now` is the server's.

    Raises:
        QueueError: the next turn does it.
    """
    if not queue.jobs.begin_forecast(APPRAISE_SECONDS):
        return
    active = queue.jobs.active()
    due = [job for job in active if job.deadline is not None and job.state not in _ENDS]
    if not due:
        return
    forecast = Forecast(active, workers, now, weights)
    told: list[tuple[str, Outlook, str]] = []
    for job in sorted(due, key=lambda job: job.appraised or 0.0)[:MOST_JOBS]:
        outlook, because = forecast.of(job)
        if outlook is not job.outlook or now - (job.appraised or 0.0) >= REPEAT_SECONDS:
            told.append((job.id, outlook, because))
    queue.jobs.record_outlooks(told)
