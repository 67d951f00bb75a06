"""Estimate how long a new online request waits for a slot."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_worker.turnover import Turnover

SMOOTHING_SECONDS = 2.0
"""The half-life of the past in the measured rate. For long answers it is longer: see `Turnover`."""
NEWEST_SHARE = 0.05
"""Share of the newest answer in the mean time between first and last token."""


@dataclass(slots=True)
class SlotWait:
    """The rate at which online requests get slots.

    While all slots are taken, the rate is measured. At first, one answer of the mean time between first and last token
    counts as measured. It bounds the rate from above, so a burst is rather accepted than refused. Before the first
    answer, no wait is expected.
    """

    _decode_seconds: float = 0.0
    _turnover: Turnover = field(default_factory=lambda: Turnover(SMOOTHING_SECONDS))
    _before: tuple[float, int] | None = None
    """Time and number of requests at the last sample, if all slots were taken."""

    def add_answer(self, decode_seconds: float) -> None:
        """Add the time between first and last token of an answer."""
        newest = NEWEST_SHARE if self._decode_seconds else 1.0
        self._decode_seconds += newest * (decode_seconds - self._decode_seconds)

    def sample(self, started: int, now: float, *, slots: int, is_full: bool) -> None:
        """Read the number of requests that got a slot so far. Call it about once a second."""
        if not is_full:
            self._before = None
            return
        if self._before is None:
            self._turnover = Turnover(SMOOTHING_SECONDS, ended=1.0, held=self._decode_seconds)
        elif now > self._before[0]:  # each request that started has the slot of one that ended
            self._turnover.add(started - self._before[1], now - self._before[0], slots)
        self._before = (now, started)

    def expected(self, num_before: float, slots: int) -> float:
        """Return the expected seconds until one of the slots is free, with `num_before` requests before the new one."""
        rate = slots * self._turnover.rate(slots) if self._before is not None else 0.0
        return max(0, num_before) * (1 / rate if rate else self._decode_seconds / slots)
