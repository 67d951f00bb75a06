"""Shows progress on stderr: as a bar on a terminal, otherwise as a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ballast_cli.console import printable, say, stderr
from ballast_cli.errors import CliError
from ballast_openai.errors import counted
from ballast_queue.errors import CommandForbidden, JobNotFound, QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.job import Job, JobState

if TYPE_CHECKING:
    from ballast_queue.redis_store import Queue

_T = TypeVar("_T")
_POLL_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_AWAY_SECONDS = 60.0
"""Time without an answer of Redis after which following ends: a port-forward that restarts takes some seconds."""


@contextmanager
def progress(title: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Show progress. Call the function that this yields with the number done so far."""
    console = stderr()
    if console.is_terminal:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            task = bars.add_task(title, total=total)
            yield lambda done: bars.update(task, completed=done)
        return
    said = time.monotonic()

    def plain(done: int) -> None:
        nonlocal said
        if time.monotonic() - said >= _PLAIN_SECONDS:
            said = time.monotonic()
            say(f"{title}: {done:,}" + (f" of {total:,}" if total is not None else ""))

    yield plain


def watch(queue: Queue, job_id: str, *, options: str = "") -> None:
    """Follow a stored job until it is over. Ctrl-C stops following, but not the job.

    `options` follow each command that a message names.

    Raises:
        QueueError: Redis does not answer for a minute, or refuses the call. The job continues.
        CliError: the job did not complete, or has failed items.
    """
    read = partial(queue.jobs.get, job_id)
    try:
        job = waiting(read)
        with progress(job_id, job.counts.total) as advance:
            while not job.state.is_over:
                advance(job.counts.done)
                time.sleep(_POLL_SECONDS)
                job = waiting(read)
    except JobNotFound:
        raise
    except (KeyboardInterrupt, QueueError):
        say(
            f"{job_id} is stored and continues: do not submit it again. `ballast job {job_id}{options}` shows its "
            "progress."
        )
        raise
    _judge(queue, job, options)


def waiting(call: Callable[[], _T]) -> _T:
    """Make a call, and repeat it while Redis does not answer. The caller has reached this Redis before.

    Raises:
        QueueUnavailable, QueueForbidden: Redis does not answer for a minute.
    """
    since, is_away = time.monotonic(), False
    while True:
        try:
            return call()
        except (QueueUnavailable, QueueForbidden) as error:
            # After a restart, Valkey does not know its users until the operator has created them again.
            if isinstance(error, CommandForbidden) or time.monotonic() - since > _AWAY_SECONDS:
                raise
            if not is_away:
                is_away = True
                say(f"Redis does not answer. Waiting for it, at most {_AWAY_SECONDS:.0f} s ...")
            time.sleep(_POLL_SECONDS)


def _judge(queue: Queue, job: Job, options: str) -> None:
    counts = job.counts
    summary = f"{job.id} is {job.state}: {counts.succeeded:,} of {counted(counts.total, 'item')} succeeded"
    if job.state is JobState.COMPLETED and counts.succeeded == counts.total:
        say(
            f"{summary}, {counted(job.tokens_out, 'token')}. `ballast results {job.id} -o out.jsonl{options}` writes "
            "the results."
        )
        return
    others = (("failed", counts.failed), ("cancelled", counts.cancelled), ("expired", counts.expired))
    rest = "".join(f", {number:,} {state}" for state, number in others if number)
    why = f" ({printable(job.reason)})" if job.reason else ""
    can_redrive = job.state is JobState.COMPLETED and any(True for _ in queue.results.dead_letters(job.id))
    raise CliError(
        f"{summary}{rest}{why}. `ballast results {job.id}{options}` shows the reason of each."
        + (f" `ballast redrive {job.id}{options}` retries the dead letters." if can_redrive else "")
    )
