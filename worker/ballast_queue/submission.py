"""How a job gets in from a file: in chunks, each line once, however often it is tried."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from secrets import token_hex
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ballast_openai.errors import describe
from ballast_queue.errors import (
    DeadlinePassed,
    EmptyJob,
    InvalidJob,
    JobNotFound,
    JobStateConflict,
    QueueError,
)
from ballast_queue.functions import Source
from ballast_queue.intake import Chunk, chunks
from ballast_queue.job import JobState, Submission
from ballast_queue.settings import Name
from ballast_queue.store import Store

_NAME = TypeAdapter(Name)
MAX_KEY = 256


def check_tenant(tenant: str) -> str:
    """Refuse a tenant whose name is unsafe in keys and labels."""
    try:
        return _NAME.validate_python(tenant)
    except ValidationError:
        raise InvalidJob(
            f"tenant: found {describe(tenant)}, wanted letters, digits, '.', '_', '/' and '-', "
            "with a letter or digit at both ends"
        ) from None


def check_deadline(deadline: float | None) -> float | None:
    """Refuse what is no moment in Unix seconds."""
    if deadline is not None and not (math.isfinite(deadline) and 0 < deadline < 1e11):
        raise InvalidJob(f"deadline: found {deadline}, wanted Unix seconds, such as `date -d +1hour +%s` prints")
    return deadline


def new_job_id() -> str:
    """Draw an id; ids sort by the time they were drawn, as far as clocks agree."""
    return f"job-{time.time_ns() // 1_000_000:011x}-{token_hex(5)}"


@dataclass(frozen=True, slots=True)
class Opened:
    """A job that takes lines, or took them."""

    job_id: str
    tenant: str
    source: Source
    is_new: bool
    is_closed: bool
    lines: int
    accepted: int
    rejected: int


class Submitting(Store):
    """The side of submitters."""

    def submit(
        self,
        lines: Iterable[bytes | str],
        *,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        key: str | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> Submission:
        """Store a job from lines in OpenAI's batch format; a bad line becomes an error result at once.

        Items may run as soon as they are stored. With a `key` of the client's choice, the same call again gives the
        same job, and goes on where an earlier one stopped; its other arguments then count no more. `deadline` is in
        Unix seconds; `on_progress` gets the number of lines stored so far.

        Raises:
            InvalidJob: tenant, priority, deadline or key are wrong, or there is no line.
            JobStateConflict: the job was cancelled or expired meanwhile.
            QueueFull, QueueUnavailable: repeat with the same key to go on.
        """
        settings = self.settings()
        check_tenant(tenant)
        priority = settings.priority_of(tenant, priority)
        check_deadline(deadline)
        if key is not None and not 0 < len(key) <= MAX_KEY:
            raise InvalidJob(f"key: found {len(key)} characters, wanted 1 to {MAX_KEY}")
        pending = _with_content(chunks(lines, settings))
        job = self._open(new_job_id(), tenant, priority, deadline, key=key or "", source="submit")
        if job.is_closed:
            return Submission(job.job_id, accepted=job.accepted, rejected=job.rejected, is_new=False)
        try:
            accepted, rejected = self._send(job, pending, on_progress)
        except QueueError as error:
            error.add_note(f"job {job.job_id} keeps the lines stored so far: submit again with its key, or cancel it")
            raise
        return Submission(job.job_id, accepted=accepted, rejected=rejected, is_new=job.is_new)

    def _open(
        self, job_id: str, tenant: str, priority: int, deadline: float | None, *, key: str, source: Source
    ) -> Opened:
        """Open a job, or find the one that is there (by its id, or by its idempotency key)."""
        call = self._functions.open(job_id, tenant=tenant, priority=priority, deadline=deadline, key=key, source=source)
        status, *rest = self._run(call)
        if status == b"other":
            return self._open(rest[0].decode(), tenant, priority, deadline, key=key, source=source)
        if status == b"passed":
            raise DeadlinePassed(f"deadline: found {deadline:.0f}, wanted a time after now, {float(rest[0]):.0f}")
        found_tenant, found_source, lines, accepted, rejected, closed = rest
        return Opened(
            job_id,
            found_tenant.decode(),
            "submit" if found_source == b"submit" else "inbox",
            is_new=status == b"new",
            is_closed=bool(closed),
            lines=lines,
            accepted=accepted,
            rejected=rejected,
        )

    def _send(
        self, job: Opened, pending: Iterable[Chunk], on_progress: Callable[[int], None] | None
    ) -> tuple[int, int]:
        """Store the chunks behind the lines that the job has, and close it; give accepted and rejected."""
        at, stored = 0, job.lines
        for lines, group in pending:
            end = at + len(lines)
            while stored < end:
                rest = lines[stored - at :]
                call = self._functions.store(job.job_id, "submit", stored, rest, group=group, closes=False)
                status, stored, accepted, rejected = self._stored(job.job_id, call)
                if status == b"closed":
                    return accepted, rejected
                if stored < at:
                    raise JobStateConflict(f"job {job.job_id} was deleted and opened anew meanwhile: submit again")
            at = end
            if on_progress is not None:
                on_progress(min(stored, at))
        call = self._functions.store(job.job_id, "submit", -1, [], group=0, closes=True)
        return self._stored(job.job_id, call)[2:]

    def _stored(self, job_id: str, call: Any) -> tuple[bytes, int, int, int]:
        status, *numbers = self._run(call)
        if status == b"missing":
            raise JobNotFound(job_id, self.name)
        lines, accepted, rejected = numbers
        if status == b"closed":
            # By another submitter with the same key; or the job came to its end.
            state = self.job(job_id).state
            if state in {JobState.CANCELLING, JobState.CANCELLED, JobState.FINALIZING, JobState.EXPIRED}:
                raise JobStateConflict(f"job {job_id} is {state} while its lines were still coming: open another job")
        return status, lines, accepted, rejected


def _with_content(pending: Iterator[Chunk]) -> Iterator[Chunk]:
    """Pass the chunks on once one of them holds a line.

    Raises:
        EmptyJob: none does.
    """
    head: list[Chunk] = []
    for chunk in pending:
        head.append(chunk)
        if any(line.kind != "b" for line in chunk[0]):
            return chain(head, pending)
    raise EmptyJob("found no line, wanted at least one request in OpenAI's batch format")
