"""What time brings to a queue: leases and backoffs end, deadlines pass, results were kept long enough."""

from __future__ import annotations

from ballast_queue.store import Store

BATCH = 500
"""Items of one job that one call moves, so that no call holds the server for long."""


class Upkeep(Store):
    """The side of whoever keeps the queue going: any worker, several at once where it happens."""

    def reap(self, limit: int = BATCH) -> int:
        """Do what is due, up to about `limit` items; give how many items and jobs were moved. Call it every second.

        Expired leases return their items (the attempt is spent) or make them dead letters; items whose backoff is
        over stand in order again; jobs past their deadline end, what is done is kept; old jobs are deleted.
        """
        moved = 0
        for timer in self._run(self._functions.due(min(limit, 100))):
            what, _, job_id = timer.decode().partition(":")
            moved += self._on_timer(what, job_id, limit)
            if moved >= limit:
                break
        return moved

    def _on_timer(self, what: str, job_id: str, limit: int) -> int:
        batch = min(limit, BATCH)
        call = self._functions
        match what:
            case "lease":
                return int(self._run(call.expire_leases(job_id, batch)))
            case "wake":
                return int(self._run(call.wake(job_id, batch)))
            case "deadline":
                return int(self._run(call.begin_end(job_id, "expired")))
            case "sweep":
                self._run(call.sweep(job_id, batch))
                return batch
            case "forget":
                return int(self._run(call.forget(job_id)))
        return 0  # a timer of a newer version, which sees to it itself
