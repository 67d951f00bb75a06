"""The queue as submitters and workers use it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ballast_queue.job import Claimed, DeadLetter, Job, JobHead, Lease, Prefix, Result, Submission
from ballast_queue.outcome import Outcome
from ballast_queue.settings import QueueSettings
from ballast_queue.status import QueueStats, WorkerStatus


class Queue:
    """One queue in Redis or Valkey 7+. Safe to share between threads; one method is one round trip or few."""

    @classmethod
    def connect(
        cls,
        url: str,
        name: str,
        *,
        username: str | None = None,
        password: str | None = None,
        socket_timeout: float = 5.0,
    ) -> Queue:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def check_server(self) -> list[str]:
        raise NotImplementedError

    def require_fit(self) -> list[str]:
        """Raise ServerUnfit; return warnings."""
        raise NotImplementedError

    def ping(self) -> float:
        """Server's clock, Unix seconds."""
        raise NotImplementedError

    # Submitters

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
        raise NotImplementedError

    def jobs(self, limit: int | None = None) -> list[Job]:
        raise NotImplementedError

    def job(self, job_id: str) -> Job:
        raise NotImplementedError

    def results(self, job_id: str, *, follow: bool = False, poll_seconds: float = 1.0) -> Iterator[Result]:
        raise NotImplementedError

    def cancel(self, job_id: str) -> Job:
        raise NotImplementedError

    def pause(self, job_id: str) -> Job:
        raise NotImplementedError

    def resume(self, job_id: str) -> Job:
        raise NotImplementedError

    def redrive(self, job_id: str) -> int:
        raise NotImplementedError

    def dead_letters(self, job_id: str | None = None) -> Iterator[DeadLetter]:
        raise NotImplementedError

    def stats(self) -> QueueStats:
        raise NotImplementedError

    def workers(self) -> list[WorkerStatus]:
        raise NotImplementedError

    # Workers

    def configure(self, settings: QueueSettings) -> bool:
        """True when these settings are in force now."""
        raise NotImplementedError

    def settings(self) -> QueueSettings:
        raise NotImplementedError

    def take_in(self, limit: int = 500) -> int:
        raise NotImplementedError

    def heads(self) -> list[JobHead]:
        raise NotImplementedError

    def claim(self, job_id: str, n: int, worker: str) -> list[Claimed]:
        raise NotImplementedError

    def heartbeat(self, worker: str, leases: Sequence[Lease]) -> list[Lease]:
        """Lease = (job_id, index, token); returns those lost."""
        raise NotImplementedError

    def finish(self, worker: str, claimed: Claimed, result: Result) -> Outcome:
        raise NotImplementedError

    def finish_many(self, worker: str, finished: Sequence[tuple[Claimed, Result]]) -> list[Outcome]:
        raise NotImplementedError

    def give_back(self, worker: str, claimed: Claimed, prefix: Prefix | None = None) -> Outcome:
        raise NotImplementedError

    def retry(
        self,
        worker: str,
        claimed: Claimed,
        error_code: str,
        message: str,
        *,
        is_retryable: bool = True,
        status_code: int = 500,
    ) -> Outcome:
        raise NotImplementedError

    def reap(self, limit: int = 500) -> int:
        """Call about once a second: due leases, backoffs, deadlines, kept results."""
        raise NotImplementedError

    def publish(self, status: WorkerStatus, ttl_seconds: float) -> None:
        raise NotImplementedError

    def withdraw(self, worker: str) -> None:
        raise NotImplementedError

    def charge(self, costs: Mapping[str, float]) -> dict[str, float]:
        """Add to tenants' service; returns the whole ledger."""
        raise NotImplementedError

    def lift(self, floors: Mapping[str, float]) -> dict[str, float]:
        """Raise tenants' service to at least these values (return from idle)."""
        raise NotImplementedError

    def service(self) -> dict[str, float]:
        raise NotImplementedError
