"""Submit a job from a file, in chunks, with each line stored once even if the submission is repeated."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import call
from secrets import token_hex
from typing import Any, NamedTuple

from ballast_queue.batch_lines import as_bytes, content_of, take
from ballast_queue.errors import (
    DeadlinePassed,
    EmptyJob,
    InvalidJob,
    JobNotFound,
    JobStateConflict,
    OtherLines,
    QueueError,
)
from ballast_queue.functions import Source
from ballast_queue.job import LAST_DEADLINE, Submission
from ballast_queue.keys import require_utf8
from ballast_queue.records import readable
from ballast_queue.sending import Sending, Stored
from ballast_queue.settings import check_name
from ballast_queue.settings_store import SettingsStore
from ballast_queue.store import Attempt, Store

MAX_KEY = 256


class Terms(NamedTuple):
    """The parameters of a submission."""

    tenant: str
    priority: int = 0
    deadline: float | None = None
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Opened:
    """A job that takes lines, or has taken them."""

    job_id: str
    tenant: str
    source: Source
    is_new: bool
    is_closed: bool
    stored: Stored


def check_deadline(deadline: float | None) -> float | None:
    """Return the deadline, or raise `InvalidJob` if it is no time in Unix seconds."""
    if deadline is not None and not (math.isfinite(deadline) and 0 < deadline < LAST_DEADLINE):
        raise InvalidJob(
            f"deadline: found {deadline}, expected Unix seconds between 0 and 1e11, such as `date -d +1hour +%s` prints"
        )
    return deadline


def new_job_id() -> str:
    """Return a random id. Ids sort by their time of creation, as far as clocks agree."""
    return f"job-{time.time_ns() // 1_000_000:011x}-{token_hex(5)}"


def job_of_tenant(name: str, tenant: str) -> str:
    """Return the id of a job of a tenant's own inbox. Neither a name nor a tenant contains the separator."""
    return f"{name}@{tenant}"


@readable("a job")
def open_job(store: Store, job_id: str, terms: Terms, *, key: str, source: Source) -> Opened:
    """Open a job, or return the existing one with this id or idempotency key.

    Raises:
        DeadlinePassed: the deadline of a new submission has passed.
    """
    tenant, priority, deadline = terms
    call = store.functions.open(job_id, tenant=tenant, priority=priority, deadline=deadline, key=key, source=source)
    status, *rest = store.call(call)
    if status == b"other":
        return open_job(store, rest[0].decode(), terms, key=key, source=source)
    if status == b"passed":
        raise DeadlinePassed(f"deadline: found {deadline:.0f}, expected a time after now, {float(rest[0]):.0f}")
    return _opened(job_id, status, *rest)


@readable("a job")
def open_inbox_jobs(store: Store, jobs: Sequence[tuple[str, Terms]]) -> list[Opened]:
    """Open jobs for entries of an inbox, in one round trip. Return the existing ones with these ids as they are."""
    calls = [
        store.functions.open(job_id, tenant=tenant, priority=priority, deadline=deadline, key="", source="inbox")
        for job_id, (tenant, priority, deadline) in jobs
    ]
    replies = store.connection.call_many(calls)
    return [_opened(job_id, *reply) for (job_id, _), reply in zip(jobs, replies, strict=True)]


def _opened(job_id: str, status: bytes, *values: Any) -> Opened:
    tenant, source, lines, accepted, rejected, closed, digest = values
    return Opened(
        job_id,
        tenant.decode(),
        "submit" if source == b"submit" else "inbox",
        is_new=status == b"new",
        is_closed=bool(closed),
        stored=Stored(lines, accepted, rejected, digest.decode()),
    )


@dataclass(frozen=True, slots=True)
class Submissions:
    """The submissions to a queue.

    A repeated submission with the same key continues the first one and stores no line twice.
    """

    _store: Store
    _settings: SettingsStore

    def submit(
        self,
        lines: Iterable[bytes | str],
        *,
        tenant: str = "default",
        priority: int = 0,
        deadline: float | None = None,
        key: str | None = None,
        on_progress: Callable[[int], None] | None = None,
        attempt: Attempt = call,
    ) -> Submission:
        """Store a job from lines in OpenAI's batch format. Each bad line becomes an error result at once.

        Items may run as soon as they are stored. With the same `key` and the same lines, a repeated call returns the
        same job, continues where the first one stopped, and ignores its other arguments. `deadline` is in Unix
        seconds. `on_progress` gets the number of lines stored so far. `attempt` makes each call after the first one.

        Raises:
            InvalidJob: tenant, priority, deadline or key is wrong, or there is no line.
            OtherLines: the key names a job with other lines.
            JobStateConflict: the job was cancelled or has expired during the call.
            JobNotFound: it was deleted during the call.
            QueueFull, QueueUnavailable, LinesLost: repeat the call with the same key to continue.
        """
        settings = self._settings.read()
        terms = Terms(check_name("tenant", tenant), settings.priority_of(tenant, priority), check_deadline(deadline))
        if key is not None and not 0 < len(key) <= MAX_KEY:
            raise InvalidJob(f"key: found {len(key)} characters, expected 1 to {MAX_KEY}")
        require_utf8("key", key or "")
        found = _with_content(map(as_bytes, lines))
        job_id = new_job_id()
        job = attempt(partial(open_job, self._store, job_id, terms, key=key or "", source="submit"))
        sending = Sending(
            self._store,
            job.job_id,
            found,
            key=key or "",
            settings=settings,
            on_progress=on_progress,
            attempt=attempt,
        )
        try:
            stored = sending.compare(job.stored) if job.is_closed else sending.run(job.stored)
        except (OtherLines, JobNotFound, JobStateConflict):
            raise
        except QueueError as error:
            error.add_note(
                f"job {job.job_id} keeps the lines stored so far: submit again with the same key, or cancel and delete "
                "the job"
            )
            raise
        is_new = job.job_id == job_id  # even if the reply to the first attempt was lost
        return Submission(job.job_id, stored.accepted, stored.rejected, is_new=is_new, was_closed=job.is_closed)


def _with_content(lines: Iterator[bytes]) -> Iterator[bytes]:
    """Return the lines as soon as a chunk of them has a line that is not blank.

    Raises:
        EmptyJob: every line is blank.
    """
    head: list[bytes] = []
    while chunk := take(lines):
        head += chunk
        if any(map(content_of, chunk)):
            return chain(head, lines)
    raise EmptyJob("found no line, expected at least one request in OpenAI's batch format")
