"""How evenly tenants were served, from samples of their service while they had work waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

Sample = Mapping[str, float]
"""Service over weight, up to one moment, of each tenant that had requests waiting at that moment."""


@dataclass
class ServiceSamples:
    """The service of tenants over time."""

    times: list[float] = field(default_factory=list)
    service: list[Sample] = field(default_factory=list)

    def after(self, seconds: float) -> Sequence[Sample]:
        """Return the samples from `seconds` on."""
        return [sample for time, sample in zip(self.times, self.service, strict=True) if time >= seconds]


def service_gap(samples: Sequence[Sample]) -> float:
    """Compute the largest difference of service between two tenants over any span in which both always had work
    waiting.

    For each pair of tenants, this is the range of the difference of their counters while neither runs out of work.
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
    """Compute Jain's index of the tenants that always had work waiting: `(sum x)^2 / (n sum x^2)`. 1 is even.

    The index is 1 if fewer than two tenants always had work waiting.
    """
    if not samples:
        return 1.0
    always = set(samples[0]).intersection(*samples[1:])
    gained = [samples[-1][tenant] - samples[0][tenant] for tenant in always]
    squares = sum(x * x for x in gained)
    return 1.0 if len(gained) < 2 or squares == 0 else sum(gained) ** 2 / (len(gained) * squares)
