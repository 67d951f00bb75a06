"""Items under lease in this worker, and what Redis has not been told about them yet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ballast_engine.request import FinishReason, Output
from ballast_queue.job import Claimed, Lease, Prefix, Result
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_worker.requests import Passage
from ballast_worker.shapes import Answer, Shape


@dataclass(slots=True)
class Held:
    """One item in the engine."""

    claimed: Claimed
    passage: Passage
    shape: Shape
    seed: int
    answer: Answer = field(default_factory=Answer)
    is_lost: bool = False
    """The lease is gone: what the engine still says about it is of no use."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An item that did not get its answer here."""

    claimed: Claimed
    code: str
    message: str
    is_retryable: bool
    status_code: int


@dataclass(slots=True)
class Holdings:
    """Every claimed item is in exactly one place: in the engine, or among what is to be told to Redis.

    While Redis is away the latter grows by at most what the former held, so it needs no bound of its own.
    """

    worker: str
    revision: str
    held: dict[str, Held] = field(default_factory=dict)
    """In the engine, by request id."""
    results: list[tuple[Claimed, Result]] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    returns: list[tuple[Claimed, Prefix | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.held) + len(self.results) + len(self.failures) + len(self.returns)

    @property
    def has_news(self) -> bool:
        """Whether Redis is to be told something."""
        return bool(self.results or self.failures or self.returns)

    def leases(self) -> list[Lease]:
        """Every lease that this worker wants to keep."""
        kept = [item.claimed.lease for item in self.held.values() if not item.is_lost]
        kept += [claimed.lease for claimed, _ in self.results]
        kept += [failure.claimed.lease for failure in self.failures]
        kept += [claimed.lease for claimed, _ in self.returns]
        return kept

    def lose(self, lost: list[Lease]) -> list[str]:
        """Forget leases that are gone; gives the requests to abort in the engine."""
        gone = set(lost)
        self.results = [pair for pair in self.results if pair[0].lease not in gone]
        self.failures = [failure for failure in self.failures if failure.claimed.lease not in gone]
        self.returns = [pair for pair in self.returns if pair[0].lease not in gone]
        to_abort: list[str] = []
        for request_id, item in self.held.items():
            if item.claimed.lease in gone and not item.is_lost:
                item.is_lost = True
                to_abort.append(request_id)
        return to_abort

    def settle(self, output: Output, *, num_cached: int) -> Held | None:
        """Take in the last output of a request; gives the item, None where it is not ours."""
        item = self.held.pop(output.request_id, None)
        if item is None or item.is_lost:
            return item
        answer = item.answer
        answer.add(output)
        answer.num_cached = num_cached
        claimed = item.claimed
        match output.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                result = Result(
                    custom_id=claimed.custom_id,
                    status_code=200,
                    body=item.shape.whole(answer),
                    tokens_in=answer.num_prompt,
                    tokens_out=answer.num_output,
                    worker=self.worker,
                )
                self.results.append((claimed, result))
            case FinishReason.FAILED:
                self.failures.append(Failure(claimed, "engine_failed", output.error, True, 500))  # noqa: FBT003
            case _:
                prefix = Prefix(token_ids=output.generated, seed=item.seed, model_revision=self.revision)
                self.returns.append((claimed, prefix if output.generated else claimed.prefix))
        return item

    def tell(self, queue: Queue, count: Callable[[Outcome], None]) -> None:
        """Tell Redis everything; what it has heard is forgotten even where a later call fails.

        Raises:
            QueueError: Redis did not hear the rest, which stays. Repeating what it did hear changes nothing there.
        """
        if self.results:
            for outcome in queue.leases.finish_many(self.worker, self.results):
                count(outcome)
            self.results = []
        while self.failures:
            failure = self.failures[-1]
            outcome = queue.leases.retry(
                failure.claimed,
                failure.code,
                failure.message,
                is_retryable=failure.is_retryable,
                status_code=failure.status_code,
            )
            count(outcome)
            self.failures.pop()
        if self.returns:
            for outcome in queue.leases.give_back_many(self.returns):
                count(outcome)
            self.returns = []
