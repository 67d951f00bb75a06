"""How many items to claim, and of which jobs. PURE: time and measurements are arguments.

Too few at hand leaves a slot empty for a round trip to Redis; too many lie idle under lease here while another worker
could run them, and tie the order down before it is due.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from math import ceil, sqrt

from ballast_queue.work import Group

MEMORY_SECONDS = 2.0
"""Weight of the past in the measured rates halves about this fast."""
LEAST_AHEAD = 2
"""Items at hand beyond the free slots, however slow the consumption: one may start while the next is fetched."""


@dataclass(slots=True)
class Appetite:
    """Measures how fast items are taken up and how long fetching takes; says how many to have at hand."""

    rate: float = 0.0
    """Items that started in the engine, per second."""
    round_trip: float = 0.002
    """Seconds from the wish for items to their submission to the engine."""

    def saw_starts(self, count: int, seconds: float) -> None:
        """`count` items started within the last `seconds`."""
        if seconds > 0:
            keep = 0.5 ** (seconds / MEMORY_SECONDS)
            self.rate = self.rate * keep + count / seconds * (1 - keep)

    def saw_round_trip(self, seconds: float) -> None:
        """Fetching took this long; slow ones count at once, quick ones slowly."""
        self.round_trip = max(seconds, 0.9 * self.round_trip + 0.1 * seconds)

    def ahead(self) -> int:
        """Items to have at hand beyond the free slots: what starts in two round trips, and two deviations more.

        `ceil(m + 2 * sqrt(m)) + LEAST_AHEAD` with `m = 2 * rate * round_trip`, as starts come at random.
        """
        expected = 2 * self.rate * self.round_trip
        return ceil(expected + 2 * sqrt(expected)) + LEAST_AHEAD


@dataclass(frozen=True, slots=True)
class Room:
    """Slots as offline sees them."""

    slots: int
    """What offline and online share: all of them, or fewer where the SLO's ceiling is lower."""
    most: int
    """Most that offline may hold."""
    reserved: int
    online: int
    """Online requests that run or wait: they come first."""
    offline: int
    """Offline requests that run or are parked."""

    def usable(self) -> int:
        """Slots that an offline request could take now.

        `max(slots - online - offline, reserved - offline)`, at most `most - offline`, never negative: the free ones,
        or what is missing of the reservation.
        """
        return max(0, min(max(self.slots - self.online, self.reserved) - self.offline, self.most - self.offline))


def wanted(room: Room, ahead: int, at_hand: int) -> int:
    """Items to claim: fill what is usable and `ahead` more, less what is at hand.

    None while offline holds its cap: what then comes free is taken by what is parked or at hand.
    """
    if room.most <= 0:
        return 0
    target = room.usable() + min(ahead, room.most)
    return max(0, target - at_hand)


def worth_reading(
    groups: Sequence[Group],
    services: Mapping[str, float],
    *,
    count: int,
    rooms: Mapping[str, int],
    reserved: Collection[str],
) -> list[Group]:
    """Groups that `share_out` could pick `count` items from: the first in order, and who reserves slots.

    Each of them has an item at least, so `count` would do if nobody else claimed; twice that leaves few claims short.
    """
    able = [group for group in groups if rooms.get(group.tenant, 1) > 0]
    first = nsmallest(
        2 * count + LEAST_AHEAD,
        (group for group in able if group.tenant not in reserved),
        key=lambda group: (-group.priority, services.get(group.tenant, 0.0)),
    )
    return [*(group for group in able if group.tenant in reserved), *first]
