"""`ballast cancel`, `ballast pause`, `ballast resume`, and `ballast delete`: change or delete one job."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from ballast_cli.connection import AsJson, CaFile, JobId, PasswordFile, Place, QueueName, RedisUrl, open_queue
from ballast_cli.console import examples, print_json, say
from ballast_openai.errors import counted
from ballast_queue.errors import JobStateConflict
from ballast_queue.job import Job, JobState

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

CANCEL_EXAMPLES = examples("ballast cancel job-1f3a")
PAUSE_EXAMPLES = examples("ballast pause job-1f3a")
RESUME_EXAMPLES = examples("ballast resume job-1f3a")
DELETE_EXAMPLES = examples(
    "ballast delete job-1f3a",
    "ballast cancel job-1f3a && ballast delete job-1f3a   # refused while items run: repeat the second command",
)


def _transition(
    move: Callable[[Queue, str], Job], sentence: Callable[[Job], str], *, purpose: str
) -> Callable[..., None]:
    """Return a subcommand. `purpose` is its help, `sentence` describes the job that `move` returns."""

    def verb(
        *,
        job_id: JobId,
        redis_url: RedisUrl = None,
        queue: QueueName = None,
        password_file: PasswordFile = None,
        ca_file: CaFile = None,
        as_json: AsJson = False,
    ) -> None:
        place = Place.of(redis_url, queue, password_file, ca_file=ca_file)
        with open_queue(place) as connected:
            after = move(connected, job_id)
        if as_json:
            print_json({"version": 1, "queue": place.queue, "job": after.model_dump(mode="json")})
        else:
            say(f"{after.id} is {after.state}: {sentence(after)}.")

    verb.__doc__ = purpose
    return verb


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


cancel = _transition(
    _cancel,
    lambda job: f"{job.counts.done:,} of {counted(job.counts.total, 'item')} over, {job.counts.leased:,} running",
    purpose="Cancel a job.\n\nNo further item starts. Results are kept. A job that is over is not cancelled.",
)
pause = _transition(
    lambda queue, job_id: queue.jobs.pause(job_id),
    lambda job: f"{counted(job.counts.waiting, 'item')} waiting for `ballast resume`, {job.counts.leased:,} running",
    purpose="Pause a job.\n\nNo further item starts until `ballast resume`. Running items finish.",
)
resume = _transition(
    lambda queue, job_id: queue.jobs.resume(job_id),
    lambda job: f"{job.counts.waiting:,} of {counted(job.counts.total, 'item')} waiting for a slot",
    purpose="Resume a paused job.",
)


def _delete(queue: Queue, job_id: str) -> Job:
    """Delete a job, and return what it was."""
    before = queue.jobs.get(job_id)
    queue.jobs.delete(job_id)
    return before


delete = _transition(
    _delete,
    lambda _: "deleted with its lines and results",
    purpose=(
        "Delete a job that is over, with its lines and results.\n\nIt frees their memory in Redis before the end of "
        "`resultsDays`. A job that is not over is refused: cancel it first.\n"
        "A later submission with its key is a new job."
    ),
)
