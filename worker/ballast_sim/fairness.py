"""How evenly tenants were served: samples of their service while they had work waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Sample = Mapping[str, float]
"""Service so far, over its weight, of each tenant that had requests waiting at that moment."""


@dataclass
class Samples:
    """The service of tenants over time."""

    times: list[float] = field(default_factory=list)
    service: list[Sample] = field(default_factory=list)

    def after(self, seconds: float) -> Sequence[Sample]:
        """The samples of the measured part of the run."""
        return [sample for time, sample in zip(self.times, self.service, strict=True) if time >= seconds]


def service_gap(samples: Sequence[Sample]) -> float:
    """Largest difference of service that two tenants got over any span in which both always had work waiting.

    Over a span the difference is that of their counters at its end less that at its start, so for each pair it is the
    range of the counters' difference while neither ran dry.
    """
    spans: dict[tuple[str, str], tuple[float, float]] = {}
    widest = 0.0
    for sample in samples:
        current = {}
        for a, b in combinations(sorted(sample), 2):
            difference = sample[a] - sample[b]
            low, high = spans.get((a, b), (difference, difference))
            low, high = min(low, difference), max(high, difference)
            current[a, b] = (low, high)
            widest = max(widest, high - low)
        spans = current
    return widest


def jain(samples: Sequence[Sample]) -> float:
    """Jain's index of the service of the tenants that always had work waiting: `(sum x)^2 / (n sum x^2)`; 1 is even.

    1 where fewer than two tenants were backlogged throughout.
    """
    if not samples:
        return 1.0
    always = set(samples[0]).intersection(*samples[1:])
    gained = [samples[-1][tenant] - samples[0][tenant] for tenant in always]
    squares = sum(x * x for x in gained)
    return 1.0 if len(gained) < 2 or squares == 0 else sum(gained) ** 2 / (len(gained) * squares)
