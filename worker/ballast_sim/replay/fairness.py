"""How evenly tenants were served, from samples of their service while they had work waiting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

from ballast_policy.fairness.ledger import INPUT_COST, OUTPUT_COST

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


def most_ahead(slots: int, max_input: int, max_output: int, weight: float = 1.0) -> float:
    """Return the most by which a tenant's service exceeds that of another tenant that waits.

    `(2 * max_input * 1 + slots * max_output * 2) / weight`, with the longest prompt and answer and the lesser weight of
    both; for requests of one priority that fit the KV, without caps and reservations of tenants.

    When the tenant last got a slot it was the least served, the admissions before it in that step included. At most one
    prompt of these is not computed in the step: the one that the reservation of offline begins. Since then it was
    charged for its slots: one more unfinished prompt (a step admits no request behind one), and an answer for each
    slot. Over any span, the service of two waiting tenants grows apart by at most twice the bound.
    """
    return (2 * INPUT_COST * max_input + OUTPUT_COST * slots * max_output) / weight
