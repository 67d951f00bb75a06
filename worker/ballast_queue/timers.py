"""The work that becomes due with time: expired leases, ended backoffs, passed deadlines, old results."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass

from ballast_queue.errors import RefusedCall
from ballast_queue.records import readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

BATCH = 200
"""Items of one job that one call moves. It blocks the server for some milliseconds."""
MOST_TIMERS = 100


@dataclass(frozen=True, slots=True)
class Timers:
    """The timers of a queue.

    Any worker may run due work, and several workers may do so at the same time.
    """

    _store: Store
    _clock: Callable[[], float] = time.monotonic

    def run_due(self, seconds: float = 0.0) -> int:
        """Run due work until `seconds` have passed, and return how many items and jobs moved.

        Work on about `BATCH` items runs in any case. The server serves its other clients between two calls.

        Call it every second. An expired lease returns its item, which spends the attempt, or makes it a dead letter.
        An item whose backoff has ended becomes claimable. A job past its deadline ends and keeps its results. So does a
        job that was paused or open for too long. A job whose results were kept long enough is deleted. A job with more
        due items than this waits behind the other due timers, and so does a timer that cannot run.

        If no timers ran for a while, e.g. because the server was away or its clock jumped, no lease expires for some
        seconds, in which living workers renew theirs.
        """
        end = self._clock() + seconds
        with contextlib.suppress(RefusedCall):  # the timers run even if a value that shows a gap cannot be read
            self._store.call(self._store.functions.begin_timers())
        moved = total = self._run_some()
        while moved and self._clock() < end:
            moved = self._run_some()
            total += moved
        return total

    @readable("a timer")
    def _run_some(self) -> int:
        moved, stuck = 0, list[bytes]()
        due = self._store.call(self._store.functions.due(MOST_TIMERS))
        for timer in due[:MOST_TIMERS]:  # a hostile server may answer more
            kind, _, job_id = text_of(timer).partition(":")
            moved_now: int | None = 1
            try:
                while moved < BATCH and moved_now:  # a call ends earlier if the lines of its items are long
                    moved_now = self._run(kind, job_id)
                    moved += moved_now or 0
            except RefusedCall:
                self._store.unreadable.skip(f"job {job_id}")
                moved_now = None
            if moved_now is None:
                stuck.append(timer)
        if stuck:
            self._store.call(self._store.functions.postpone(stuck))
        return moved

    def _run(self, kind: str, job_id: str) -> int | None:
        """Return how many items and jobs moved, or None for a timer of a newer version, which runs it itself."""
        call, functions = self._store.call, self._store.functions
        match kind:
            case "lease":
                return int(call(functions.expire_leases(job_id, BATCH)))
            case "wake":
                return int(call(functions.wake(job_id, BATCH)))
            case "deadline" | "abandon":
                return int(call(functions.begin_end(job_id, "expired")))
            case "sweep":
                return int(call(functions.sweep(job_id, BATCH)))
            case "forget":
                return int(call(functions.forget(job_id)))
        return None
