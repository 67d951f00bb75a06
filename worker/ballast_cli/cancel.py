"""`ballast cancel`: cancel a job."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ballast_cli.console import examples
from ballast_cli.transition import transition
from ballast_openai.errors import counted
from ballast_queue.errors import JobStateConflict
from ballast_queue.job import Job, JobState

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

EXAMPLES = examples("ballast cancel job-1f3a")


def _cancel(queue: Queue, job_id: str) -> Job:
    """Cancel a job. A repetition changes nothing.

    Raises:
        JobStateConflict: the job ended in another way.
    """
    after = queue.jobs.cancel(job_id)
    if after.state not in {JobState.CANCELLING, JobState.CANCELLED}:
        raise JobStateConflict(
            f"job {job_id} is {after.state}: only a job that is not over or ending can be cancelled; its results stay"
        )
    return after


cancel = transition(
    _cancel,
    lambda job: f"{job.counts.done:,} of {counted(job.counts.total, 'item')} over, {job.counts.leased:,} running",
    purpose="Cancel a job.\n\nNo further item starts. Results are kept. A job that is over is not cancelled.",
)
