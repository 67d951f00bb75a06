"""Reservations of tenants: a share of the slots that their class holds, and the debt where they got less.

A tenant is *behind* while it has work for a slot and holds fewer than

    share + min(share, debt / REPAY_SECONDS), with share = reserved * (slots of its class, the next one counted)

of them; a slot that falls vacant then goes to it, before the other tenants of its priority. Nobody is stopped in the
middle of an answer for it, and a higher priority still goes first.

The debt of a tenant is the sum of `max(0, share - slots held)` over the time in which it had work for more slots, in
slot-seconds, less what it held beyond its share since. It is at most what `REPAY_SECONDS` of its share of all slots
come to, and is forgotten when the tenant has nothing left here: absence earns nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import groupby
from math import floor, inf

from ballast_policy.request import Request

REPAY_SECONDS = 10.0
_ROUNDING = 1e-9
"""`0.1 * 30` is 3.0000000000000004 in floating point, and three slots of it are enough."""


class Floors:
    """Counts the slots of one class by tenant while they are given out, and says who is behind."""

    __slots__ = ("_due", "_held", "_owed", "_reserved", "num_held")

    def __init__(self, reserved: Mapping[str, float], owed: Mapping[str, float], held: Mapping[str, int]) -> None:
        self.num_held = sum(held.values())
        """Slots given out."""
        self._reserved = reserved
        self._owed = owed
        self._held = {tenant: held.get(tenant, 0) for tenant in reserved}
        self._due = {tenant: self._falls_behind(tenant) for tenant in reserved}

    def due(self, tenant: str) -> float:
        """Give the number of slots given out from which on a tenant is behind; inf where it reserves nothing."""
        return self._due.get(tenant, inf)

    def behind(self, tenants: Collection[str]) -> str | None:
        """Give the one of `tenants` that has been behind for longest; None if nobody is."""
        late = [(due, tenant) for tenant, due in self._due.items() if due <= self.num_held and tenant in tenants]
        return min(late)[1] if late else None

    def count(self, tenant: str) -> None:
        """Count a slot that was given out."""
        self.num_held += 1
        if tenant in self._held:
            self._held[tenant] += 1
            self._due[tenant] = self._falls_behind(tenant)

    def _falls_behind(self, tenant: str) -> int:
        """Solve `share + min(share, debt / REPAY_SECONDS) > held`, share = reserved * (n + 1), for the least n."""
        reserved, held = self._reserved[tenant], self._held[tenant]
        extra = self._owed.get(tenant, 0.0) / REPAY_SECONDS
        slots = held / 2 if held < 2 * extra else held - extra
        return floor(slots / reserved + _ROUNDING)


class Debts:
    """What the tenants of one class are owed, in slot-seconds, and what they reserve."""

    __slots__ = ("_at", "_owed", "_rates", "reserved")

    def __init__(self, reserved: Mapping[str, float] | None = None) -> None:
        self.reserved: dict[str, float] = {}
        """Shares by tenant, of those that reserve anything."""
        self._owed: dict[str, float] = {}
        self._rates: dict[str, float] = {}
        """Slots that each tenant is short of since `_at`; negative where it holds more than its share."""
        self._at = 0.0
        self.reserve(reserved or {})

    def reserve(self, reserved: Mapping[str, float]) -> None:
        """Go by these shares from now on; who reserves nothing any more is owed nothing."""
        self.reserved = {tenant: share for tenant, share in reserved.items() if share > 0}
        for book in (self._owed, self._rates):
            for tenant in book.keys() - self.reserved.keys():
                del book[tenant]

    def owed(self, tenant: str) -> float:
        """Give what a tenant is owed, in slot-seconds."""
        return self._owed.get(tenant, 0.0)

    def floors(self, held: Mapping[str, int]) -> Floors:
        """Begin to count from the slots that every tenant holds now."""
        return Floors(self.reserved, self._owed, held)

    def note(self, now: float, held: Mapping[str, int], backlogged: Collection[str], slots: int) -> None:
        """Take in who holds slots from now on, and which tenants have work for more; `slots` are those of all."""
        num_held = sum(held.values())
        seconds, self._at = max(0.0, now - self._at), now
        for tenant, share in self.reserved.items():
            if tenant not in backlogged and not held.get(tenant):
                self._owed.pop(tenant, None)
                self._rates.pop(tenant, None)
                continue
            owed = self._owed.get(tenant, 0.0) + seconds * self._rates.get(tenant, 0.0)
            self._owed[tenant] = min(max(0.0, owed), share * slots * REPAY_SECONDS)
            short = share * num_held - held.get(tenant, 0)
            self._rates[tenant] = short if tenant in backlogged else min(0.0, short)


def in_turn(requests: Iterable[Request], floors: Floors) -> Iterator[Request]:
    """Go through requests of one class that stand in policy order, those of tenants that are behind first.

    However many of them get a slot, the reservations hold among them as far as there is work for it.
    """
    for _, band in groupby(requests, key=lambda request: request.priority):
        order = list(band)
        own: dict[str, deque[Request]] = {}
        for request in order:
            if floors.due(request.tenant) < inf:
                own.setdefault(request.tenant, deque()).append(request)
        late = [(floors.due(tenant), tenant) for tenant in own]
        heapify(late)
        early: set[Request] = set()
        for request in order:
            while late and late[0][0] <= floors.num_held:
                due, tenant = heappop(late)
                if not own[tenant]:
                    continue
                if due == floors.due(tenant):
                    first = own[tenant].popleft()
                    early.add(first)
                    floors.count(tenant)
                    yield first
                heappush(late, (floors.due(tenant), tenant))
            if request in early:
                continue
            if request.tenant in own:
                own[request.tenant].popleft()
            floors.count(request.tenant)
            yield request
