"""Store in jobs whether they will meet their deadlines. One worker does it for the whole queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ballast_queue.job import JobState, Outlook
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus
from ballast_worker.forecast import Forecast

APPRAISE_SECONDS = 2.0
"""How often the outlooks of a queue are updated."""
REPEAT_SECONDS = 10.0
"""How often the figures of an unchanged outlook are updated."""
MOST_JOBS = 64
"""Jobs in one update, those with the oldest outlook first; about 30 ms with 1,000 jobs."""
_ENDS = {JobState.FINALIZING, JobState.CANCELLING}


def update_outlooks(queue: Queue, workers: Sequence[WorkerStatus], now: float, weights: Mapping[str, float]) -> None:
    """Update the outlooks of jobs with a deadline, unless another worker just did. `now` is the time of the server.

    Raises:
        QueueError: the next update repeats it.
    """
    if not queue.jobs.begin_forecast(APPRAISE_SECONDS):
        return
    active = queue.jobs.active()
    due = [job for job in active if job.deadline is not None and job.state not in _ENDS]
    if not due:
        return
    forecast = Forecast(active, workers, now, weights)
    found: list[tuple[str, Outlook, str]] = []
    for job in sorted(due, key=lambda job: job.appraised or 0.0)[:MOST_JOBS]:
        outlook, because = forecast.of(job)
        if outlook is not job.outlook or now - (job.appraised or 0.0) >= REPEAT_SECONDS:
            found.append((job.id, outlook, because))
    queue.jobs.record_outlooks(found)
