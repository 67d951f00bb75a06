"""Estimate how long a new online request waits for a slot."""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING_SECONDS = 2.0
"""The half-life of the past in the measured rate."""


@dataclass(slots=True)
class SlotWait:
    """The rate at which online requests get slots, measured only while all slots are taken.

    An idle worker has no rate: few requests get a slot because few ask. Then no wait is expected, so a burst on an idle
    worker is accepted for the first seconds.
    """

    _rate: float = 0.0
    _before: tuple[float, int] | None = None
    """Time and number of requests at the last sample, if all slots were taken."""

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

    def expected(self, num_before: int) -> float:
        """Return the expected seconds until a slot, with `num_before` requests before the new one; 0: unknown."""
        return max(0, num_before) / self._rate if self._rate else 0.0
