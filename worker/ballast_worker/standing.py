"""How offline tenants stand with each other over all workers of a queue: their service and their reservations.

Each worker computes the same by itself, from the tenants that wait and the items that they hold in the queue. The
queue adds up the service.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ballast_policy.fairness.tenant_slots import TenantSlots
from ballast_queue.claimable import Demand
from ballast_queue.ledger import Service
from ballast_queue.redis_store import Queue


class Standing:
    """Belongs to the feeder's thread."""

    def __init__(self) -> None:
        self.service = Service()
        """The shared ledger, as of the last tick."""
        self._reserved: dict[str, float] = {}
        self._working: set[str] | None = None
        """Tenants that waited or held something when anybody last did; None before the first look."""

    @property
    def reserved(self) -> Collection[str]:
        """Tenants with a reservation."""
        return self._reserved.keys()

    def reserve(self, shares: Mapping[str, float]) -> None:
        """Go by these reservations, shares of the slots that offline holds."""
        self._reserved = {tenant: share for tenant, share in shares.items() if share > 0}

    def slots(self, demand: Demand) -> TenantSlots | None:
        """Return the items in flight by tenant over all workers; None if no tenant has a reservation."""
        return TenantSlots(self._reserved, demand.held) if self._reserved else None

    def post(self, queue: Queue, gained: Mapping[str, float]) -> None:
        """Add what tenants got here, over their weights, to the ledger."""
        self.service = queue.ledger.charge(gained)

    def notice(self, queue: Queue, demand: Demand) -> None:
        """Lift tenants that return from idle to the least served tenant that stayed."""
        working = demand.tenants | demand.held.keys()
        if not working:
            return
        before, known = self._working, self.service.tenants.keys()
        self._working = working
        if before is None:  # who is in the ledger may have been there all the time
            before = working & known or set(known)
        returning = working - before
        # With nobody who stayed, those that left last: neither they nor who comes now has a claim from before.
        stayed = before & working or before
        if not returning or not stayed:
            return
        level = min(self.service.of(tenant) for tenant in stayed)
        behind = [tenant for tenant in returning if self.service.of(tenant) < level]
        if behind:
            self.service = queue.ledger.lift(level, behind)

    def forget(self, queue: Queue) -> None:
        """Drop idle tenants that the ledger does not need, so that names do not pile up."""
        needless = self.service.needless(self._working or set())
        if needless:
            self.service = queue.ledger.forget(self.service, needless)
