"""Reservations of tenants: the share of the slots of their class that they get first.

A tenant is *below its reservation* while it has work for a slot and holds fewer than `reserved * (n + 1)` slots, if its
class holds `n` slots. It then gets the next free slot of its priority.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import groupby
from math import floor
from operator import attrgetter

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.request import Request
from ballast_policy.reservation import ROUNDING


class TenantSlots:
    def __init__(self, reserved: Mapping[str, float], held: Mapping[str, int]) -> None:
        self.num_held = sum(held.values())
        self.reserved = reserved
        """Shares by tenant, for tenants with a reservation."""
        self._held = {tenant: held.get(tenant, 0) for tenant in reserved}

    def due(self, tenant: str) -> int:
        """Return the number of held slots at which a tenant with a reservation falls below it."""
        return floor(self._held[tenant] / self.reserved[tenant] + ROUNDING)

    def count(self, tenant: str) -> None:
        self.num_held += 1
        if tenant in self._held:
            self._held[tenant] += 1

    def dues(self, requests: Sequence[Request]) -> list[tuple[int, str, int]]:
        """Return (due, tenant, index) of the requests that become due among `requests`, in order."""
        reserved, held = self.reserved, self._held.copy()
        end = self.num_held + len(requests)
        dues: list[tuple[int, str, int]] = []
        for index, request in enumerate(requests):
            num = held.get(tenant := request.tenant)
            if num is not None and (due := floor(num / reserved[tenant] + ROUNDING)) < end:
                held[tenant] = num + 1
                dues.append((due, tenant, index))
        return sorted(dues)


class BelowReservation:
    """Finds the tenant that has been below its reservation longest, repeatedly while slots are counted."""

    def __init__(self, slots: TenantSlots, tenants: Container[str]) -> None:
        self._slots = slots
        self._heap = [(slots.due(tenant), tenant) for tenant in slots.reserved if tenant in tenants]
        """Dues as of now. A tenant that gets a slot is due later, which `first` looks up."""
        heapify(self._heap)

    def first(self, tenants: Container[str]) -> str | None:
        """Return the tenant; None if none is below. A tenant that is not in `tenants` has no more work."""
        heap, slots = self._heap, self._slots
        while heap and heap[0][0] <= slots.num_held:
            due, tenant = heap[0]
            if tenant not in tenants:
                heappop(heap)
            elif due == (later := slots.due(tenant)):
                return tenant
            else:
                heapreplace(heap, (later, tenant))
        return None


def reserved_first(requests: Iterable[Request], slots: TenantSlots) -> list[Request]:
    """Move requests of tenants below their reservation forward, among requests of one class in policy order.

    In each prefix of the result, each tenant with enough requests has its reservation.
    """
    out: list[Request] = []
    for _, band in groupby(requests, key=attrgetter("priority")):
        equals = list(band)
        out += _reserved_first(equals, slots)
        for request in equals:
            slots.count(request.tenant)
    return out


def _reserved_first(order: Sequence[Request], slots: TenantSlots) -> list[Request]:
    """Order one priority: a request goes as soon as it is due, and the others fill the gaps in their order."""
    out: list[Request] = []
    left: list[Request | None] = [*order]  # None: moved forward
    index = 0
    for due, _, first in slots.dues(order):
        before = due - slots.num_held
        while len(out) < before:
            if (request := left[index]) is not None:
                out.append(request)
            index += 1
        if first >= index:
            out.append(order[first])
            left[first] = None
    return out + [request for request in left[index:] if request is not None]


def tenant_slots(ledger: Ledger, holders: Iterable[Request]) -> TenantSlots | None:
    """Return the slots of one class by tenant; None if no tenant has a reservation."""
    reserved = ledger.reserved
    return TenantSlots(reserved, Counter([request.tenant for request in holders])) if reserved else None
