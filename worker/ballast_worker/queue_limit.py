"""The limit of the waiting queue: requests that would wait too long get 429 and a time for the next try.

An encoder computes many calls in a step, so a call may come after others and not wait for them. It is expected to wait
as the number of calls before it and the rate of answers imply, but at most twice as long as the last calls waited: the
time of a call beyond that of calls of its size that came while none waited.

With API keys, tenants share the queue by weight: see `Tenancy.num_before`. A tenant that comes to a full queue still
gets its share of the limit, so the queue of a class may have more requests than the limit, up to twice as many.
"""

from __future__ import annotations

from collections.abc import Callable

from ballast_api.sections import MOST_SHARED, Limits
from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_worker.errors import Refused
from ballast_worker.slot_wait import SlotWait
from ballast_worker.status import SmoothedRates

MAX_RETRY_SECONDS = 30
MOST_WAITS = 2.0
"""The longest wait that a new call to an encoder is expected to have, in waits of the last calls.

A server that gets few calls answers few, although it could answer more. So the rate of answers alone would refuse calls
at any load.
"""
NEWEST_SHARE = 0.1
"""Share of the newest call to an encoder, or of its newest step, in a mean."""


class QueueLimit:
    """The limit of one server. It belongs to the event loop that serves HTTP."""

    def __init__(self, rates: SmoothedRates, *, is_encoder: bool = False) -> None:
        self._rates, self._is_encoder = rates, is_encoder
        self._slot_wait = SlotWait()
        """For an encoder, all calls in the server wait for one slot, which each holds for a moment."""
        self._alone: dict[int, float] = {}
        """Mean time of calls to an encoder that came while none waited, by the bits of their number of tokens."""
        self._call_wait = 0.0
        """Mean time of the last calls to an encoder beyond that."""
        self._step_seconds: float | None = None

    def add_answer(self, decode_seconds: float) -> None:
        """Add the time between first and last token of an answer."""
        self._slot_wait.add_answer(decode_seconds)

    def add_call(self, seconds: float, num_tokens: int, *, was_alone: bool) -> None:
        """Add the time from arrival to answer of a call to an encoder. `was_alone`: it came while no other waited."""
        size = num_tokens.bit_length()
        alone = self._alone.get(size)
        if alone is not None:
            self._call_wait = _mean(self._call_wait, seconds - alone)
        if was_alone:
            self._alone[size] = _mean(alone, seconds)

    def add_step(self, seconds: float) -> None:
        """Add the time of a step of an encoder. The step of a call itself is no wait."""
        self._step_seconds = _mean(self._step_seconds, seconds)

    def sample(self, stats: EngineStats, started: int, waiting: int, now: float) -> None:
        """Read how many online requests started so far, and how many wait. Call it about once a second.

        For an encoder, `started` counts the calls that were answered.
        """
        is_full = waiting > (0 if self._is_encoder else _num_free(stats, RequestClass.ONLINE))
        self._slot_wait.sample(started, now, slots=self._num_slots(stats), is_full=is_full)

    def check(
        self,
        limits: Limits,
        read: Callable[[], EngineStats],
        request_class: RequestClass,
        waiting: int,
        num_before: Callable[[], tuple[float, float]],
    ) -> None:
        """Refuse a new request of a class in which `waiting` requests wait. `read` returns the counters of the engine.

        `num_before` returns how much of the queue the tenant fills, and how many requests get a slot before the new
        one, both by the shares of the tenants. If all requests that wait are fewer, they count.

        Raises:
            Refused: the queue is full, or an online request would wait too long for a slot.
        """
        limit, longest = limits.max_queued_requests, limits.max_queue_milliseconds
        if waiting < limit and (longest is None or not waiting or request_class is not RequestClass.ONLINE):
            return
        stats = read()
        behind = waiting - _num_free(stats, request_class)
        ahead = waiting if self._is_encoder else behind
        filled: float = behind
        before: float = ahead
        if behind < MOST_SHARED * limit:
            of_tenant, number = num_before()
            filled, before = min(behind, of_tenant), min(ahead, number)
        wait = self._wait(request_class, before, self._num_slots(stats))
        if filled >= limit:
            because = f"{_waiting(behind, request_class)}, the limit is {limit} (limits.maxQueuedRequests)"
        elif longest is not None and request_class is RequestClass.ONLINE and 1000 * wait > longest:
            because = (
                f"{_waiting(ahead, request_class)}, so another would wait about {1000 * wait:.0f} ms, the limit is "
                f"{longest:g} ms (limits.maxQueueMilliseconds)"
            )
        else:
            return
        seconds = min(MAX_RETRY_SECONDS, max(1, round(wait)))
        raise Refused(
            429,
            f"The waiting queue is full: {because}. Retry after {seconds} s.",
            code="queue_full",
            kind="rate_limit_error",
            headers={"retry-after": str(seconds)},
        )

    def _wait(self, request_class: RequestClass, num_before: float, slots: int) -> float:
        """Return the expected seconds until a new request gets a slot; 0 if no rate is measured."""
        if request_class is RequestClass.ONLINE:
            expected = self._slot_wait.expected(num_before, slots)
            if self._is_encoder:
                return max(0.0, min(expected - (self._step_seconds or 0.0), MOST_WAITS * self._call_wait))
            return expected
        rate = self._rates.offline_items
        return max(0.0, num_before) / rate if rate else 0.0

    def _num_slots(self, stats: EngineStats) -> int:
        return 1 if self._is_encoder else stats.slots


def _mean(before: float | None, newest: float) -> float:
    """Return a mean in which old values fade."""
    return newest if before is None else before + NEWEST_SHARE * (newest - before)


def _waiting(number: int, request_class: RequestClass) -> str:
    return f"{number} {request_class} {'request waits' if number == 1 else 'requests wait'}"


def _num_free(stats: EngineStats, request_class: RequestClass) -> int:
    """Return the slots that a request of the class can take now."""
    if request_class is RequestClass.ONLINE:
        return stats.slots - stats.online.running - stats.reservation.in_use
    return stats.slots - stats.online.running - stats.offline.running
