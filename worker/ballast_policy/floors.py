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

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from math import floor, inf
from operator import attrgetter, itemgetter

from ballast_policy.request import Request

REPAY_SECONDS = 10.0
_ROUNDING = 1e-9
"""`0.1 * 30` is 3.0000000000000004 in floating point, and three slots of it are enough."""


class Floors:
    """Counts the slots of one class by tenant while they are given out, and says who is behind."""

    __slots__ = ("_held", "_owed", "num_held", "reserved")

    def __init__(self, reserved: Mapping[str, float], owed: Mapping[str, float], held: Mapping[str, int]) -> None:
        self.num_held = sum(held.values())
        """Slots given out."""
        self.reserved = reserved
        """Shares by tenant, of those that reserve anything."""
        self._owed = owed
        self._held = dict.fromkeys(reserved, 0)
        for tenant, num in held.items():
            if tenant in reserved:
                self._held[tenant] = num

    def due(self, tenant: str) -> float:
        """Give the number of slots given out from which on a tenant is behind; inf where it reserves nothing."""
        held = self._held.get(tenant)
        if not held:
            return inf if held is None else 0
        if tenant in self._owed:
            return _due(held, self.reserved[tenant], self._owed[tenant] / REPAY_SECONDS)
        return floor(held / self.reserved[tenant] + _ROUNDING)  # the same: most are owed nothing

    def first_dues(self, tenants: Container[str]) -> list[tuple[float, str]]:
        """Give the `due` of those of `tenants` that reserve anything."""
        reserved, owed = self.reserved, self._owed
        return [
            (self.due(tenant) if tenant in owed else floor(num / reserved[tenant] + _ROUNDING), tenant)
            for tenant, num in self._held.items()
            if tenant in tenants
        ]

    def behind(self, tenants: Container[str]) -> str | None:
        """Give the one of `tenants` that has been behind for longest; None if nobody is."""
        return Late(self, tenants).first(tenants)

    def count(self, tenant: str) -> None:
        """Count a slot that was given out."""
        self.num_held += 1
        if tenant in self._held:
            self._held[tenant] += 1

    def count_all(self, tenants: Collection[str]) -> None:
        """Count a slot of each."""
        self.num_held += len(tenants)
        held = self._held
        for tenant in tenants:
            if tenant in held:
                held[tenant] += 1

    def dues(self, requests: Sequence[Request]) -> list[tuple[str, int, int]]:
        """Give of each request its tenant, from how many slots on it is behind, and its index, were all given a slot.

        A tenant's requests take its slots one by one, so that each is behind by what the tenant holds then, whoever
        goes in between. Who is behind first comes first; left out is who never is, however many others go before.
        """
        reserved, owed, held = self.reserved, self._owed, self._held.copy()
        end = self.num_held + len(requests)
        dues: list[tuple[str, int, int]] = []
        for index, request in enumerate(requests):
            tenant = request.tenant
            if tenant not in held:
                continue
            num = held[tenant]
            if tenant in owed:
                due = _due(num, reserved[tenant], owed[tenant] / REPAY_SECONDS)
            else:  # as in `due`
                due = floor(num / reserved[tenant] + _ROUNDING)
            if due < end:
                held[tenant] = num + 1
                dues.append((tenant, due, index))
            else:
                del held[tenant]
        dues.sort()
        dues.sort(key=itemgetter(1))
        return dues


def _due(held: int, reserved: float, extra: float) -> int:
    """Give the least n for which `share + min(share, extra) > held`, share = reserved * (n + 1)."""
    slots = held / 2 if held < 2 * extra else held - extra
    return floor(slots / reserved + _ROUNDING)


class Late:
    """Finds who of some tenants has been behind for longest, again and again while slots are given out."""

    __slots__ = ("_heap", "floors", "soonest")

    def __init__(self, floors: Floors, tenants: Container[str]) -> None:
        self.floors = floors
        self._heap = floors.first_dues(tenants)
        """With the dues of now; whoever gets a slot is due later, which is looked up when its turn comes."""
        heapify(self._heap)
        self.soonest = self._heap[0][0] if self._heap else inf
        """Nobody is behind while fewer slots are given out."""

    def first(self, tenants: Container[str]) -> str | None:
        """Give who has been behind for longest; None if nobody is. Who is not in `tenants` has no work any more."""
        heap, floors = self._heap, self.floors
        while heap and heap[0][0] <= floors.num_held:
            due, tenant = heap[0]
            if tenant not in tenants:
                heappop(heap)
            elif due == (later := floors.due(tenant)):
                return tenant
            else:
                heapreplace(heap, (later, tenant))
        self.soonest = heap[0][0] if heap else inf
        return None


class Debts:
    """What the tenants of one class are owed, in slot-seconds, and what they reserve."""

    __slots__ = ("_at", "_owed", "_rates", "reserved")

    def __init__(self, reserved: Mapping[str, float] | None = None) -> None:
        self.reserved: dict[str, float] = {}
        """Shares by tenant, of those that reserve anything."""
        self._owed: dict[str, float] = {}
        """Of those that are owed anything."""
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
            if owed > 0:
                self._owed[tenant] = min(owed, share * slots * REPAY_SECONDS)
            else:
                self._owed.pop(tenant, None)
            short = share * num_held - held.get(tenant, 0)
            self._rates[tenant] = short if tenant in backlogged else min(0.0, short)


def in_turn(requests: Iterable[Request], floors: Floors) -> list[Request]:
    """Let those of tenants that are behind go first, among requests of one class that stand in policy order.

    However many of them get a slot, the reservations hold among them as far as there is work for it.
    """
    order = list(requests)
    if not order or order[0].priority == order[-1].priority:
        return _in_turn(order, floors)
    out: list[Request] = []
    for _, band in groupby(order, key=attrgetter("priority")):
        equals = list(band)
        out += _in_turn(equals, floors)
        for request in equals:
            floors.count(request.tenant)
    return out


def _in_turn(order: Sequence[Request], floors: Floors) -> list[Request]:
    """Do it in one priority: whoever is due goes as soon as so many slots are given out, and in between the others."""
    num_held = floors.num_held
    out: list[Request] = []
    left: list[Request | None] = [*order]  # None: went early
    index = 0
    for _, due, first in floors.dues(order):
        while num_held < due:
            request = left[index]
            index += 1
            if request is not None:
                out.append(request)
                num_held += 1
        if first >= index:
            out.append(order[first])
            left[first] = None
            num_held += 1
    out += [request for request in left[index:] if request is not None]
    return out
