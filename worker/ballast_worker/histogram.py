"""Histograms for hot paths, with one writer each.

Those of prometheus_client take a lock and a dictionary lookup per observation; these take one bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

SECONDS = (
    0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 1.5, 2.0, 3.0, 5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
)  # fmt: skip
"""Bounds of latencies."""


class Histogram:
    """Counts by upper bound, as in Prometheus."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the cumulative counts by bound, with `+Inf` last."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip([*map(repr, self.bounds), "+Inf"], list(self.counts), strict=True):
            running += count
            rows.append((bound, running))
        return rows

    @classmethod
    def sum_of(cls, parts: Iterable[Histogram]) -> Histogram:
        """Return a histogram with the counts of all `parts`. They have the same bounds."""
        parts = list(parts)
        whole = cls(parts[0].bounds)
        for part in parts:
            whole.total += part.total
            whole.counts = [a + b for a, b in zip(whole.counts, list(part.counts), strict=True)]
        return whole
