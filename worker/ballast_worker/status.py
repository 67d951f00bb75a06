"""What a worker publishes about itself."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_queue.status import ClassLoad, ReservationStatus

SMOOTHING_SECONDS = 5.0
"""Rates forget half of the past in about this time."""


@dataclass(slots=True)
class _ClassRates:
    prefill: float = 0.0
    decode: float = 0.0
    requests: float = 0.0
    ended: float = 0.0


@dataclass(slots=True)
class Rates:
    """Tokens and requests per second by class, smoothed; `sample` is called about once a second by one thread."""

    classes: dict[RequestClass, _ClassRates] = field(default_factory=lambda: {c: _ClassRates() for c in RequestClass})
    offline_items: float = 0.0
    """Items taken up per second while more waited than got slots; the last measurement stands while fewer do."""
    offline_tokens: float = 0.0
    """Tokens decoded of them per second."""
    _was_full: bool = False
    _before: dict[RequestClass, tuple[int, int, int, int]] | None = None
    _at: float = 0.0

    def sample(
        self, stats: EngineStats, taken_up: dict[RequestClass, int], ended: dict[RequestClass, int], now: float
    ) -> None:
        """Look at the counters; `taken_up` counts arrivals (online) and items taken up (offline)."""
        seen = {c: (stats.of(c).prefill_tokens, stats.of(c).decode_tokens, taken_up[c], ended[c]) for c in RequestClass}
        elapsed = now - self._at
        if self._before is not None and elapsed > 0:
            keep = 0.5 ** (elapsed / SMOOTHING_SECONDS)
            for request_class, rates in self.classes.items():
                news = [
                    (after - before) / elapsed
                    for after, before in zip(seen[request_class], self._before[request_class], strict=True)
                ]
                rates.prefill = rates.prefill * keep + news[0] * (1 - keep)
                rates.decode = rates.decode * keep + news[1] * (1 - keep)
                rates.requests = rates.requests * keep + news[2] * (1 - keep)
                rates.ended = rates.ended * keep + news[3] * (1 - keep)
                if request_class is RequestClass.OFFLINE and self._was_full and stats.offline.waiting:
                    past = keep if self.offline_items else 0.0
                    self.offline_items = self.offline_items * past + news[2] * (1 - past)
                    self.offline_tokens = self.offline_tokens * past + news[1] * (1 - past)
        self._was_full = stats.offline.waiting > 0
        self._before, self._at = seen, now

    def load(self, stats: EngineStats, request_class: RequestClass) -> ClassLoad:
        """One class as the status shows it."""
        of, rates = stats.of(request_class), self.classes[request_class]
        return ClassLoad(
            running=of.running,
            parked=of.parked,
            waiting=of.waiting,
            reserved=of.reserved,
            borrowed=of.lent,
            prefill_tokens_per_second=round(rates.prefill, 3),
            decode_tokens_per_second=round(rates.decode, 3),
            requests_per_second=round(rates.requests, 4),
        )


def reservation(stats: EngineStats) -> ReservationStatus:
    """Return the engine's reservation as the status shows it."""
    found = stats.reservation
    return ReservationStatus(
        slots=found.slots, blocks=found.blocks, chunk=found.chunk, in_use=found.in_use, is_met=found.is_met
    )


def coefficients(stats: EngineStats) -> tuple[float, ...]:
    """The cost model, empty until it is trusted."""
    cost = stats.cost
    if not cost.is_trusted:
        return ()
    values = (cost.k0, cost.k1, cost.k2, cost.k3, cost.k4)
    return values if all(math.isfinite(value) for value in values) else ()
