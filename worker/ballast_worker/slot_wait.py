"""Estimate how long a new online request waits for a slot."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING_SECONDS = 2.0
"""The half-life of the past in the measured rate."""
NEWEST_SHARE = 0.05
"""Share of the newest answer in the mean time between first and last token."""


@dataclass(slots=True)
class SlotWait:
    """The rate at which online requests get slots.

    While all slots are taken, the rate is measured. Before, the time between first and last token of the last answers
    bounds it from above, so a burst is rather accepted than refused. Before the first answer, no wait is expected.
    """

    _rate: float = 0.0
    _decode_seconds: float = 0.0
    _before: tuple[float, int] | None = None
    """Time and number of requests at the last sample, if all slots were taken."""

    def add_answer(self, decode_seconds: float) -> None:
        """Add the time between first and last token of an answer."""
        newest = NEWEST_SHARE if self._decode_seconds else 1.0
        self._decode_seconds += newest * (decode_seconds - self._decode_seconds)

    def sample(self, started: int, now: float, *, is_full: bool) -> None:
        """Read the number of requests that got a slot so far. Call it about once a second."""
        if not is_full:
            self._rate, self._before = 0.0, None
            return
        if self._before is not None and now > self._before[0]:
            elapsed = now - self._before[0]
            rate = (started - self._before[1]) / elapsed
            keep = 0.5 ** (elapsed / SMOOTHING_SECONDS) if self._rate else 0.0
            self._rate = self._rate * keep + rate * (1 - keep)
        self._before = (now, started)

    def expected(self, num_before: float, slots: int) -> float:
        """Return the expected seconds until one of the slots is free, with `num_before` requests before the new one."""
        seconds_per_slot = 1 / self._rate if self._rate else self._decode_seconds / slots
        return max(0, num_before) * seconds_per_slot
