"""How many items a worker claims. PURE: time and measurements are arguments.

With too few prefetched items, a slot stays empty for a round trip to Redis. With too many, items are idle under lease
here while another worker could run them, and their order is fixed too early.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import ceil, sqrt

from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_queue.claimable import Group

MEMORY_SECONDS = 2.0
"""Half-life of the past in the measured rates."""


@dataclass(slots=True)
class Prefetch:
    """Measure how fast items start and how long a claim takes; compute how many items to prefetch."""

    rate: float = 0.0
    """Items that started in the engine, per second."""
    round_trip: float = 0.002
    """Seconds from the decision to claim to the submission to the engine."""

    def add_starts(self, count: int, seconds: float) -> None:
        """Note that `count` items started within the last `seconds`."""
        if seconds > 0:
            keep = 0.5 ** (seconds / MEMORY_SECONDS)
            self.rate = self.rate * keep + count / seconds * (1 - keep)

    def add_round_trip(self, seconds: float) -> None:
        """Record the time of a claim. A longer time counts fully, a shorter one partly."""
        self.round_trip = max(seconds, 0.9 * self.round_trip + 0.1 * seconds)

    def ahead(self) -> int:
        """Return the items to prefetch beyond the free slots: the starts of two round trips, and two deviations.

        `ceil(m + 2 * sqrt(m)) + LEAST_AHEAD` with `m = 2 * rate * round_trip`, because starts are random.
        """
        expected = 2 * self.rate * self.round_trip
        return ceil(expected + 2 * sqrt(expected)) + LEAST_AHEAD


@dataclass(frozen=True, slots=True)
class OfflineSlots:
    """The slots that offline work may use."""

    slots: int
    """Slots that offline and online share: all slots, or the ceiling of the SLO if that is lower."""
    maximum: int
    """The largest number that offline may hold."""
    reserved: int
    online: int
    """Online requests that run or wait. They go first."""
    offline: int
    """Offline requests that run or are parked."""

    def usable(self) -> int:
        """Return the slots that an offline request could take now.

        `max(slots - online - offline, reserved - offline)`, at most `maximum - offline`, never negative: the free
        slots, or the missing part of the reservation.
        """
        return max(0, min(max(self.slots - self.online, self.reserved) - self.offline, self.maximum - self.offline))


def num_to_claim(slots: OfflineSlots, ahead: int, prefetched: int) -> int:
    """Return the items to claim: the usable slots and `ahead` more, less the prefetched items.

    The result is 0 while offline may hold no slot.
    """
    if slots.maximum <= 0:
        return 0
    target = slots.usable() + min(ahead, slots.maximum)
    return max(0, target - prefetched)


def groups_to_read(
    groups: Sequence[Group],
    services: Mapping[str, float],
    *,
    count: int,
    limits: Mapping[str, int],
    reserved: Collection[str],
) -> list[Group]:
    """Return the groups from which `share_out` could pick `count` items: the first in order, and tenants that reserve.

    Each group has at least one item, so `count` groups suffice if no other worker claims. Twice as many leave few
    claims short.
    """
    claimable = [group for group in groups if limits.get(group.tenant, 1) > 0]
    first = nsmallest(
        2 * count + LEAST_AHEAD,
        (group for group in claimable if group.tenant not in reserved),
        key=lambda group: (-group.priority, services.get(group.tenant, 0.0)),
    )
    return [*(group for group in claimable if group.tenant in reserved), *first]
