"""The jobs of a queue, and the changes of state that users ask for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from ballast_queue.errors import JobNotFound, JobStateConflict
from ballast_queue.job import MOST_ACTIVE, Job, JobState, Outlook, Redriven
from ballast_queue.records import job_of, parse_record, readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

READ_JOBS = 200
"""Records read in one call."""
SWEEP_ITEMS = 200
"""Items that get their error result in one call."""


@dataclass(frozen=True, slots=True)
class Jobs:
    """The jobs of a queue.

    A job that is over keeps its state, except that a redrive reopens a completed one.
    """

    _store: Store

    def get(self, job_id: str) -> Job:
        """Return one job.

        Raises:
            JobNotFound: the queue has no job with this id.
        """
        records = self._records([job_id])
        if not records:
            raise JobNotFound(job_id, self._store.name)
        return job_of(records[0])

    @readable("the jobs")
    def all(self) -> list[Job]:
        """Return all jobs in the order of submission. Jobs that cannot be read are left out."""
        return self._read_all(self.ids())

    @readable("the jobs")
    def active(self, limit: int | None = MOST_ACTIVE) -> list[Job]:
        """Return at most `limit` jobs that are not over, or all, those with the nearest deadlines first.

        Jobs that cannot be read are left out.
        """
        members = self._store.connection.members(self._store.keys.active, 0, -1 if limit is None else limit - 1)
        return self._read_all([text_of(job_id) for job_id in members])

    def cancel(self, job_id: str) -> Job:
        """End a job that is not over. Items under lease end at their worker's next heartbeat.

        Each waiting item gets an error result with the code `cancelled`.

        Raises:
            JobNotFound: the queue has no job with this id.
            UnreadableValue: a value of the record cannot be read; the job ends all the same.
            RefusedCall: the job does not end, because Redis cannot read a value that the change needs.
        """
        self._store.call(self._store.functions.begin_end(job_id, "cancelled"))
        while self._store.call(self._store.functions.sweep(job_id, SWEEP_ITEMS)):
            pass
        return self.get(job_id)

    def pause(self, job_id: str) -> Job:
        """Stop claims of a job's items. Items under lease finish.

        Raises:
            JobStateConflict: the job is over or ending.
        """
        return self._hold(job_id, "paused")

    def resume(self, job_id: str) -> Job:
        """End a pause.

        Raises:
            JobStateConflict: the job is over or ending.
        """
        return self._hold(job_id, "resumed")

    @readable("a job")
    def delete(self, job_id: str) -> None:
        """Delete a job that is over, with its lines, results and idempotency key.

        Raises:
            JobNotFound: the queue has no job with this id, or not any more.
            JobStateConflict: the job is not over.
        """
        status, state = self._store.call(self._store.functions.delete(job_id))
        if status == b"missing":
            raise JobNotFound(job_id, self._store.name)
        if status == b"conflict":
            is_ending = JobState(state.decode()) in {JobState.CANCELLING, JobState.FINALIZING}
            advice = "repeat the call when its running items have ended" if is_ending else "cancel it first"
            raise JobStateConflict(
                f"job {job_id} is {state.decode()}: only a job that is over can be deleted; {advice}"
            )

    @readable("the jobs")
    def redrive(self, job_id: str, *, takes_all: bool = False) -> Redriven:
        """Return the dead letters of a job to the queue with new attempts, and remove their error results.

        Dead letters that no attempt can serve stay, unless `takes_all`. Use it after a change of the worker.

        Raises:
            JobStateConflict: the job was cancelled, has failed or has expired.
        """
        total, left, cursor = 0, 0, b"0"
        while True:
            call = self._store.functions.redrive(job_id, SWEEP_ITEMS, cursor, takes_all=takes_all)
            status, done, cursor, left = self._store.call(call)
            if status == b"missing":
                raise JobNotFound(job_id, self._store.name)
            if status == b"passed":
                raise JobStateConflict(f"the deadline of job {job_id} has passed: submit its lines as another job")
            if status == b"conflict":
                state = JobState(done.decode())
                raise JobStateConflict(f"job {job_id} is {state}: submit its lines as another job")
            total += done
            if cursor == b"0":
                return Redriven(total, left)

    def record_outlooks(self, outlooks: Sequence[tuple[str, Outlook, str]]) -> None:
        """Store whether jobs will meet their deadlines, each with a reason. Jobs that are over or ending ignore it."""
        self._store.connection.call_many([self._store.functions.appraise(*each) for each in outlooks])

    def begin_forecast(self, seconds: float) -> bool:
        """Return True to the first worker that calls it within `seconds`: this worker records the outlooks."""
        return bool(self._store.call(self._store.functions.take_turn(seconds)))

    @readable("the jobs")
    def ids(self) -> list[str]:
        """Return the ids of all jobs in the order of submission."""
        return [job_id.decode() for job_id in self._store.connection.members(self._store.keys.jobs, 0, -1)]

    def _hold(self, job_id: str, change: Literal["paused", "resumed"]) -> Job:
        status, state = self._store.call(self._store.functions.hold(job_id, change))
        if status == b"missing":
            raise JobNotFound(job_id, self._store.name)
        if status == b"conflict":
            raise JobStateConflict(
                f"job {job_id} is {state.decode()}: only a job that is not over or ending can be {change}"
            )
        return self.get(job_id)

    def _read_all(self, job_ids: list[str]) -> list[Job]:
        """Return the jobs that exist and can be read."""
        read = self._store.unreadable.try_read
        found = (read(f"job {job_id}", partial(_job, reply)) for job_id, reply in self._replies(job_ids))
        return [job for job in found if job is not None]

    def _records(self, job_ids: list[str]) -> list[dict[str, str]]:
        """Return the records of the jobs that exist."""
        records = (parse_record(reply) for _, reply in self._replies(job_ids))
        return [record for record in records if record is not None]

    def _replies(self, job_ids: list[str]) -> Iterator[tuple[str, bytes]]:
        for start in range(0, len(job_ids), READ_JOBS):
            page = job_ids[start : start + READ_JOBS]
            yield from zip(page, self._store.call(self._store.functions.read(page)), strict=True)


def _job(reply: bytes) -> Job | None:
    record = parse_record(reply)
    return None if record is None else job_of(record)
