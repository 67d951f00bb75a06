"""The work that becomes due with time: expired leases, ended backoffs, passed deadlines, old results."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_queue.errors import RefusedCall
from ballast_queue.records import readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

BATCH = 500
"""Items of one job that one call moves, so that no call blocks the server for long."""


@dataclass(frozen=True, slots=True)
class Timers:
    """The timers of a queue.

    Any worker may run due work, and several workers may do so at the same time.
    """

    _store: Store

    @readable("a timer")
    def run_due(self, limit: int = BATCH) -> int:
        """Run due work, for up to about `limit` items, and return how many items and jobs moved.

        Call it every second. An expired lease returns its item, which spends the attempt, or makes it a dead letter.
        An item whose backoff has ended becomes claimable. A job past its deadline ends and keeps its results. So does a
        job that was paused or open for too long. A job whose results were kept long enough is deleted.
        """
        moved, most = 0, min(limit, 100)
        for timer in self._store.call(self._store.functions.due(most))[:most]:  # a hostile server may answer more
            kind, _, job_id = text_of(timer).partition(":")
            try:
                moved += self._run(kind, job_id, limit)
            except RefusedCall:
                self._store.unreadable.skip(f"job {job_id}")
            if moved >= limit:
                break
        return moved

    def _run(self, kind: str, job_id: str, limit: int) -> int:
        batch = min(limit, BATCH)
        call, functions = self._store.call, self._store.functions
        match kind:
            case "lease":
                return int(call(functions.expire_leases(job_id, batch)))
            case "wake":
                return int(call(functions.wake(job_id, batch)))
            case "deadline" | "abandon":
                return int(call(functions.begin_end(job_id, "expired")))
            case "sweep":
                call(functions.sweep(job_id, batch))
                return batch
            case "forget":
                return int(call(functions.forget(job_id)))
        return 0  # a timer of a newer version, which runs it itself
