"""What users ask of jobs: look, follow, cancel, pause, resume, redrive."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import ValidationError

from ballast_queue.errors import JobNotFound, JobStateConflict, QueueError
from ballast_queue.job import DeadLetter, Job, JobState, Outlook, Redriven, Result
from ballast_queue.record import counts_of, job_of
from ballast_queue.status import QueueStats, WorkerStatus
from ballast_queue.store import Store

SWEEP_ITEMS = 500
"""Items that get their error result in one call."""
PAGE = 200
"""Results read in one call."""
MOST_ACTIVE = 2000
"""Jobs that are looked at together."""


class Jobs(Store):
    """The side of whoever looks after jobs."""

    def jobs(self, limit: int | None = None) -> list[Job]:
        """Give the newest `limit` jobs (all where it is None), in the order of their submission."""
        if limit is not None and limit < 1:
            return []
        return [job_of(record) for record in self._records(self._job_ids(-limit if limit else 0))]

    def active_jobs(self, limit: int = MOST_ACTIVE) -> list[Job]:
        """Give jobs that are not over, at most `limit`: those with the nearest deadlines, then the others."""
        job_ids = [job_id.decode() for job_id in self._connection.members(self._keys.active, 0, limit - 1)]
        return [job_of(record) for record in self._records(job_ids)]

    def appraise(self, told: Sequence[tuple[str, Outlook, str]]) -> None:
        """Say of jobs whether they will meet their deadline, and why; nothing happens to one that is over or ending."""
        self._connection.call_many([self._functions.appraise(*each) for each in told])

    def take_turn(self, seconds: float) -> bool:
        """Give True to the first of all workers that asks within so many seconds: it appraises the deadlines."""
        return bool(self._run(self._functions.take_turn(seconds)))

    def results(self, job_id: str, *, follow: bool = False, poll_seconds: float = 1.0) -> Iterator[Result]:
        """Give the results so far in the order of completion, each custom_id once; with `follow` until the job is over.

        A redrive withdraws the error results of the items it puts back: who had read those already gets the items'
        new results as well.

        Raises:
            JobNotFound: there is no such job, or it was deleted meanwhile.
        """
        key, seen = self._keys.part(job_id, "results"), b"0"
        self.job(job_id)
        while True:
            # Ask for the state first: what a job that is over has not shown by then, it has not.
            is_over = follow and self.job(job_id).state.is_over
            while page := self._connection.entries(key, seen, PAGE):
                for entry_id, fields in page:
                    seen = entry_id
                    yield _result(fields, job_id)
            if not follow or is_over:
                return
            self._connection.wait_for_entry(key, seen, poll_seconds)

    def cancel(self, job_id: str) -> Job:
        """End a job: what waits gets an error result with code `cancelled`, what runs is let go at its next heartbeat.

        A job that is over stays as it is.
        """
        self.job(job_id)
        self._run(self._functions.begin_end(job_id, "cancelled"))
        while self._run(self._functions.sweep(job_id, SWEEP_ITEMS)):
            pass
        return self.job(job_id)

    def pause(self, job_id: str) -> Job:
        """Claim nothing more of a job; what runs goes on to its end.

        Raises:
            JobStateConflict: the job is over or ending.
        """
        return self._hold(job_id, "paused")

    def resume(self, job_id: str) -> Job:
        """Take a pause back; see `pause`."""
        return self._hold(job_id, "resumed")

    def _hold(self, job_id: str, how: Literal["paused", "resumed"]) -> Job:
        status, state = self._run(self._functions.hold(job_id, how))
        if status == b"missing":
            raise JobNotFound(job_id, self.name)
        if status == b"conflict":
            raise JobStateConflict(f"job {job_id} is {state.decode()}: only a job that is not at its end can be {how}")
        return self.job(job_id)

    def redrive(self, job_id: str, *, takes_all: bool = False) -> Redriven:
        """Put a job's dead letters back, with fresh attempts; their error results are withdrawn.

        Those that no attempt can serve stay, unless `takes_all`: for where the worker has changed, not the request.

        Raises:
            JobStateConflict: the job was cancelled, failed or expired.
        """
        total, left, cursor = 0, 0, b"0"
        while True:
            call = self._functions.redrive(job_id, SWEEP_ITEMS, cursor, takes_all=takes_all)
            status, done, cursor, left = self._run(call)
            if status == b"missing":
                raise JobNotFound(job_id, self.name)
            if status == b"passed":
                raise JobStateConflict(f"the deadline of job {job_id} has passed: submit its lines as another job")
            if status == b"conflict":
                state = JobState(done.decode())
                raise JobStateConflict(f"job {job_id} is {state}: submit its lines as another job")
            total += done
            if cursor == b"0":
                return Redriven(total, left)

    def dead_letters(self, job_id: str | None = None) -> Iterator[DeadLetter]:
        """Give the items of one job (or of all) whose attempts are spent or that no attempt can serve."""
        if job_id is not None:
            self.job(job_id)
            job_ids = [job_id]
        else:
            job_ids = [record["id"] for record in self._records(self._job_ids()) if int(record["dead"])]
        for name in job_ids:
            for _, letter in self._connection.hash_pairs(self._keys.part(name, "dead")):
                yield DeadLetter.model_validate_json(letter.split(b"\n", 3)[3])

    def stats(self) -> QueueStats:
        """Sum the queue up."""
        at, inbox, oldest, entry, pairs = self._run(self._functions.stats())
        totals = {name.decode(): value.decode() for name, value in zip(pairs[::2], pairs[1::2], strict=True)}
        since = [float(oldest)] if oldest else []
        if entry:
            since.append(int(entry.split(b"-")[0]) / 1000)
        return QueueStats(
            at=float(at),
            items=counts_of(totals),
            inbox=inbox,
            oldest_waiting_seconds=max(0.0, float(at) - min(since)) if since else 0.0,
            dead_letters=int(totals.get("dead", 0)),
            jobs_at_risk=int(totals.get("at_risk", 0)),
            jobs={state: int(totals.get(f"jobs:{state}", 0)) for state in JobState},
        )

    def workers(self) -> list[WorkerStatus]:
        """Give the statuses that have not expired. A worker that is not among them is unknown, not idle.

        So is one of another version whose status this one cannot read.
        """
        statuses = []
        for text in self._run(self._functions.statuses()):
            with contextlib.suppress(ValidationError):
                statuses.append(WorkerStatus.model_validate_json(text or b""))
        return sorted(statuses, key=lambda status: status.worker_id)


def _result(fields: dict[bytes, bytes], job_id: str) -> Result:
    try:
        return Result.model_validate_json(fields[b"r"])
    except ValidationError as error:
        raise QueueError(f"found a result of job {job_id} that this version cannot read ({error})") from error
