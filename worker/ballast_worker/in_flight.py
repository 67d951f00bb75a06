"""Items under lease in this worker, and the reports about them that Redis does not have yet."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from pydantic_core import PydanticSerializationError

from ballast_engine.request import FinishReason, Output
from ballast_log import Log
from ballast_queue.errors import RefusedCall, ResultTooLarge
from ballast_queue.job import Claimed, Lease, Prefix, Result
from ballast_queue.leases import json_of
from ballast_queue.outcome import Outcome
from ballast_queue.redis_store import Queue
from ballast_worker.items import ItemFailure, PreparedItem
from ballast_worker.requests import RequestTiming
from ballast_worker.responses import AnswerBuffer

log = Log(__name__)

_Sent = TypeVar("_Sent")
_Answer = TypeVar("_Answer")

UNWRITABLE = "The answer is nested too deeply, or has text that is not Unicode, so it cannot be stored as JSON."


@dataclass(slots=True)
class InFlightItem:
    """An item in the engine."""

    claimed: Claimed
    timing: RequestTiming
    prepared: PreparedItem
    answer: AnswerBuffer = field(default_factory=AnswerBuffer)
    is_lost: bool = False
    """Whether the lease is lost. Its result is discarded."""
    is_expired: bool = False
    """Whether the lease could not be extended in time, so that the engine returns the item."""


@dataclass(slots=True)
class InFlightItems:
    """Every claimed item is either in the engine or in one of the reports to Redis.

    While Redis is unavailable, no item is claimed, so the reports need no bound of their own.
    """

    worker: str
    revision: str
    held: dict[str, InFlightItem] = field(default_factory=dict)
    """Items in the engine, by request id."""
    results: list[tuple[Claimed, Result]] = field(default_factory=list)
    failures: list[ItemFailure] = field(default_factory=list)
    returns: list[tuple[Claimed, Prefix | None]] = field(default_factory=list)
    unserved: set[Lease] = field(default_factory=set)
    """Leases among `returns` of items that name another model."""

    def __len__(self) -> int:
        return len(self.held) + len(self.results) + len(self.failures) + len(self.returns)

    @property
    def has_reports(self) -> bool:
        """Whether there is something to report to Redis."""
        return bool(self.results or self.failures or self.returns)

    def requests_by_tenant(self) -> Counter[str]:
        """Return how many requests the items in the engine are, by tenant. Each of them takes a slot."""
        found = Counter[str]()
        for item in self.held.values():
            found[item.claimed.tenant] += item.prepared.num_requests
        return found

    def held_up_by_tenant(self) -> Counter[str]:
        """Return how many of these requests can take no slot, while other requests can, by tenant."""
        found = Counter[str]()
        for item in self.held.values():
            found[item.claimed.tenant] += item.prepared.num_held_up
        return found

    def leases(self) -> list[Lease]:
        """Return every lease that this worker wants to keep."""
        kept = [item.claimed.lease for item in self.held.values() if not item.is_lost]
        kept += [claimed.lease for claimed, _ in self.results]
        kept += [failure.claimed.lease for failure in self.failures]
        kept += [claimed.lease for claimed, _ in self.returns]
        return kept

    def expire(self, extended_at: float, before: float) -> list[str]:
        """Return the requests whose lease was last extended or claimed before a time. Return each of them once.

        `extended_at` is the time of the last call that extended all leases.
        """
        found = []
        for request_id, item in self.held.items():
            is_late = max(extended_at, item.timing.arrival) < before
            if is_late and not (item.is_lost or item.is_expired):
                item.is_expired = True
                found.append(request_id)
        return found

    def progress(self, num_computed: Callable[[str], int]) -> dict[Lease, int]:
        """Return the tokens computed of each item in the engine, if there are any."""
        found = {item.claimed.lease: num_computed(request_id) for request_id, item in self.held.items()}
        return {lease: count for lease, count in found.items() if count}

    def lose(self, lost: list[Lease]) -> list[str]:
        """Forget lost leases, and return the requests to abort in the engine."""
        lost_leases = set(lost)
        self.results = [pair for pair in self.results if pair[0].lease not in lost_leases]
        self.failures = [failure for failure in self.failures if failure.claimed.lease not in lost_leases]
        self.returns = [pair for pair in self.returns if pair[0].lease not in lost_leases]
        to_abort: list[str] = []
        for request_id, item in self.held.items():
            if item.claimed.lease in lost_leases and not item.is_lost:
                item.is_lost = True
                to_abort.append(request_id)
        return to_abort

    def settle(self, output: Output, *, num_cached: int) -> InFlightItem | None:
        """Record the last output of a request. Return its item, or None if the request has none."""
        item = self.held.pop(output.request_id, None)
        if item is None or item.is_lost:
            return item
        answer = item.answer
        answer.add(output)
        answer.num_cached = num_cached
        claimed = item.claimed
        match output.finish_reason:
            case FinishReason.STOP | FinishReason.LENGTH:
                body = item.prepared.whole(answer)
                result = Result(
                    custom_id=claimed.custom_id,
                    status_code=200,
                    body=None if isinstance(body, bytes) else body,
                    body_text=body if isinstance(body, bytes) else b"",
                    tokens_in=answer.num_prompt,
                    tokens_out=answer.num_output,
                    worker=self.worker,
                )
                self.results.append((claimed, result))
            case FinishReason.FAILED:
                self.failures.append(item.prepared.failure(claimed, output))
            case _:
                earlier = claimed.prefix or Prefix()
                if output.generated:
                    earlier = Prefix(token_ids=output.generated, seed=item.prepared.seed, model_revision=self.revision)
                computed = max(output.num_computed, earlier.num_computed)
                prefix = earlier.model_copy(update={"num_computed": computed}) if computed else None
                self.returns.append((claimed, prefix))
        return item

    def report(self, queue: Queue, outcomes: Counter[Outcome]) -> None:
        """Report everything to Redis, and count its answers. A report that succeeded is forgotten if a later one fails.

        If the record of a job cannot be read, its reports are dropped, and its leases expire.

        Raises:
            QueueError: the other reports stay. A repeated report changes nothing in Redis.
        """
        if self.results:
            self._report_results(queue, outcomes)
        while self.failures:
            with contextlib.suppress(RefusedCall):
                outcomes[_fail(queue, self.failures[-1])] += 1
            self.failures.pop()
        if self.returns:
            outcomes.update(all_or_each(partial(queue.leases.give_back_many, unserved=self.unserved), self.returns))
            self.returns = []
            self.unserved.clear()

    def _report_results(self, queue: Queue, outcomes: Counter[Outcome]) -> None:
        try:
            self._finish(queue, outcomes)
        except (PydanticSerializationError, ResultTooLarge):
            self.results = [pair for pair in self.results if self._is_writable(pair)]
            self._finish(queue, outcomes)

    def _finish(self, queue: Queue, outcomes: Counter[Outcome]) -> None:
        """Store all results, and forget those of each round trip. If Redis cannot read a value, send each alone."""

        def send(results: Sequence[tuple[Claimed, Result]]) -> None:
            for page in queue.leases.finish_in_pages(self.worker, results):
                del self.results[: len(page)]
                outcomes.update(page)

        try:
            send(self.results.copy())
        except RefusedCall:
            while self.results:
                try:
                    send(self.results[:1])
                except RefusedCall:
                    del self.results[0]

    def _is_writable(self, pair: tuple[Claimed, Result]) -> bool:
        """Return whether an answer can be stored. Otherwise fail its item, as each attempt would."""
        claimed, result = pair
        try:
            json_of(result)
        except PydanticSerializationError as error:
            code, message, because = "unwritable_answer", UNWRITABLE, str(error)
        except ResultTooLarge as error:
            code = "answer_too_large"
            because = message = str(error)
        else:
            return True
        log.warning("answer cannot be stored", job=claimed.job_id, item=claimed.custom_id, because=because)
        self.failures.append(ItemFailure(claimed, code, message, is_retryable=False, status_code=500))
        return False


def _fail(queue: Queue, failure: ItemFailure) -> Outcome:
    return queue.leases.retry(
        failure.claimed,
        _writable(failure.code),
        _writable(failure.message),
        is_retryable=failure.is_retryable,
        status_code=failure.status_code,
    )


def _writable(text: str) -> str:
    """Return text that UTF-8 can express. An error may quote a lone surrogate of a body, which Redis cannot store."""
    return text.encode(errors="backslashreplace").decode()


def all_or_each(send: Callable[[Sequence[_Sent]], list[_Answer]], values: Sequence[_Sent]) -> list[_Answer]:
    """Send all values at once. If Redis cannot read a record, send each value alone, and skip those that fail."""
    try:
        return send(values)
    except RefusedCall:
        answers: list[_Answer] = []
        for value in values:
            with contextlib.suppress(RefusedCall):
                answers += send([value])
        return answers
