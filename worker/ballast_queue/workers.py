"""The statuses that workers publish."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from pydantic import ValidationError

from ballast_queue.records import readable
from ballast_queue.status import WorkerStatus
from ballast_queue.store import Store


@dataclass(frozen=True, slots=True)
class Workers:
    """The status of each worker. A status expires on its own, so a worker without one is unknown, not idle."""

    _store: Store

    def publish(self, status: WorkerStatus, ttl_seconds: float) -> None:
        """Publish a worker's status for `ttl_seconds`."""
        call = self._store.functions.publish_status(status.worker_id, ttl_seconds, status.model_dump_json())
        self._store.call(call)

    def withdraw(self, worker: str) -> None:
        """Remove a worker's status at once, as a stopping worker does."""
        self._store.call(self._store.functions.publish_status(worker, 0, ""))

    @readable("the statuses of the workers")
    def statuses(self) -> list[WorkerStatus]:
        """Return the statuses that have not expired, without those that this version cannot read.

        The reply is limited: to 5,000 workers and 2 MiB in all, and without statuses above 128 KiB.
        """
        statuses = []
        for text in self._store.call(self._store.functions.statuses()):
            with contextlib.suppress(ValidationError):
                statuses.append(WorkerStatus.model_validate_json(text or b""))
        return sorted(statuses, key=lambda status: status.worker_id)
