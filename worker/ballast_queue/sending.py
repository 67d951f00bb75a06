"""Send the lines of a submission to a job that may have some of them already."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, islice
from typing import NamedTuple

from ballast_queue.batch_lines import read_lines, take
from ballast_queue.errors import JobNotFound, JobStateConflict, LinesLost, OtherLines
from ballast_queue.job import JobState
from ballast_queue.jobs import Jobs
from ballast_queue.line_digest import LineDigest
from ballast_queue.settings import QueueSettings
from ballast_queue.store import Attempt, Store


class Stored(NamedTuple):
    """The lines that a job has."""

    lines: int
    accepted: int
    rejected: int
    digest: str
    """Empty: unknown, because an older version of Ballast stored lines of the job. The numbers are compared then."""


class Sending:
    """The lines of one submission on their way to a job.

    Law: a line is added only behind lines that the job has, and that are the same ones. Whoever else submits with the
    same key, and whenever a submitter dies, each line is stored once, and no job has lines of two files.
    """

    def __init__(
        self,
        store: Store,
        job_id: str,
        lines: Iterator[bytes],
        *,
        key: str,
        settings: QueueSettings,
        on_progress: Callable[[int], None] | None,
        attempt: Attempt,
    ) -> None:
        self._store = store
        self._attempt = attempt
        self._job_id = job_id
        self._source = self._lines = lines
        self._key = key
        self._settings = settings
        self._on_progress = on_progress
        self._passed = LineDigest()

    def run(self, stored: Stored) -> Stored:
        """Store the lines that the job does not have yet, and close it. Return the lines that it has then.

        Raises:
            OtherLines: the job has other lines.
            JobStateConflict: the job was cancelled or expired during the call.
            LinesLost: Redis lost lines during the call.
        """
        while True:
            self._pass(stored)
            self._report()
            raws = take(self._lines)
            ahead = self._passed.copy()
            ahead.add(raws)
            status, now = self._append(raws, stored.lines, ahead.text())
            if status == b"closed":
                if state := self._cut_short():
                    raise JobStateConflict(
                        f"job {self._job_id} became {state} while its lines arrived: submit another job"
                    )
                self._give_back(raws)
                return self.compare(now)
            if status == b"elsewhere":  # another submitter with the same key added lines
                self._give_back(raws)
            elif raws:
                self._passed = ahead
            else:
                return now
            stored = now

    def compare(self, stored: Stored) -> Stored:
        """Compare all lines with those of a job that takes no more lines, and return its lines.

        Raises:
            OtherLines: the job has other lines.
        """
        if self._cut_short():
            if stored.digest:
                self._pass(stored)
            return stored
        self._passed.add(self._lines)
        self._report()
        self._require_same(stored, stored.accepted + stored.rejected, self._passed.num_requests)
        return stored

    def _give_back(self, raws: list[bytes]) -> None:
        # A chunk holds at least what is left of the one that was given back before, so that chains do not nest.
        self._lines = chain(raws, self._source)

    def _pass(self, stored: Stored) -> None:
        """Read the lines that the job has, and compare them."""
        passed = self._passed
        if passed.num_lines > stored.lines:
            raise LinesLost(self._job_id, stored.lines, passed.num_lines)
        passed.add(islice(self._lines, stored.lines - passed.num_lines))
        self._require_same(stored, stored.lines, passed.num_lines)

    def _require_same(self, stored: Stored, num_kept: int, num_found: int) -> None:
        is_same = stored.digest == self._passed.text() if stored.digest else num_kept == num_found
        if not is_same:
            raise OtherLines(self._job_id, self._key, num_kept, num_found)

    def _append(self, raws: list[bytes], before: int, digest: str) -> tuple[bytes, Stored]:
        """Store lines, or close the job if there are none. Return the status and the lines that the job has then."""
        lines, prefix_key = read_lines(raws, self._settings)
        call = self._store.functions.append(
            self._job_id, before, lines, digest=digest, prefix_key=prefix_key, closes=not raws
        )
        status, *found = self._attempt(partial(self._store.call, call))
        if status == b"missing":
            raise JobNotFound(self._job_id, self._store.name)
        num_lines, accepted, rejected, known = found
        return status, Stored(num_lines, accepted, rejected, known.decode())

    def _cut_short(self) -> JobState | None:
        """Return the state of a closed job if it was cut short."""
        state = self._attempt(partial(Jobs(self._store).get, self._job_id)).state
        return state if state.is_cut_short else None

    def _report(self) -> None:
        if self._on_progress is not None and self._passed.num_lines:
            self._on_progress(self._passed.num_lines)
