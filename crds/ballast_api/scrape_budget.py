"""Limits the part of the time that a process spends on its metrics. PURE: time is an argument."""

from __future__ import annotations

SHARE = 0.05
"""The part of the time for metrics."""
MOST_SECONDS = 0.2
"""The time that may be spent at once. It covers many scrapes of a worker, so that each scrape of Prometheus is new."""


class ScrapeBudget:
    """Whether a process may render its metrics, or repeats the last text.

    Whoever reaches a port may request its metrics as often as it likes. The same thread renews a Lease, or streams
    tokens.
    """

    def __init__(self) -> None:
        self._seconds = MOST_SECONDS
        self._at = 0.0

    def has_left(self, now: float) -> bool:
        """Return whether the metrics may be rendered."""
        self._seconds = min(MOST_SECONDS, self._seconds + SHARE * max(0.0, now - self._at))
        self._at = now
        return self._seconds > 0

    def spend(self, seconds: float) -> None:
        """Count the CPU time of one rendering. The time in which it waits for other threads does not count."""
        self._seconds -= seconds
