"""The service and the reservations of offline tenants over all workers of a queue.

Each worker computes the same figures, from the tenants that wait and from their items under lease. The queue adds up
the service.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from ballast_engine.stats import OTHERS
from ballast_policy.fairness.tenant_slots import TenantSlots
from ballast_policy.request import RequestClass
from ballast_queue.claimable import Demand
from ballast_queue.ledger import Service
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus, held_requests

KEPT_REPLIES = 100
"""Partial replies in a row that a tenant with work may be missing in.

Of 100,000 groups, each reply has a tenth, and 0.9 ** 100 is 1 in 38,000.
"""


class LedgerView:
    """The shared ledger and the reservations, as one worker knows them. Only the feeder's thread uses it."""

    def __init__(self) -> None:
        self.service = Service()
        """The shared ledger at the last tick."""
        self._reserved: dict[str, float] = {}
        self._num_replies = 0
        self._working: dict[str, int] | None = None
        """Tenants with waiting or leased items when there last were any, and the last reply that had each; None before
        the first read."""
        self._counted: dict[str, float] = {}
        """Service of offline tenants on this worker at the last call of `gained`."""

    @property
    def reserved(self) -> Collection[str]:
        """Tenants with a reservation."""
        return self._reserved.keys()

    def reserve(self, shares: Mapping[str, float]) -> None:
        """Set the reservations, as shares of the slots of offline work."""
        self._reserved = {tenant: share for tenant, share in shares.items() if share > 0}

    def slots(self, demand: Demand, workers: Iterable[WorkerStatus] = ()) -> TenantSlots | None:
        """Return the requests in flight by tenant over all workers; None if no tenant has a reservation."""
        return TenantSlots(self._reserved, held_requests(demand.held, workers)) if self._reserved else None

    def gained(
        self, counted: Mapping[tuple[RequestClass, str], float], weights: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the service of offline tenants on this worker since the last call, divided by their weights.

        `counted` is the service by class and tenant that the engine has counted so far.
        """
        served = {
            tenant: service
            for (request_class, tenant), service in counted.items()
            if request_class is RequestClass.OFFLINE and tenant != OTHERS
        }
        gained: dict[str, float] = {}
        for tenant, service in served.items():
            before = self._counted.get(tenant, 0.0)
            new = service - before if service >= before else service  # less: the engine began to count it again
            if new > 0:
                gained[tenant] = new / weights.get(tenant, 1.0)
        self._counted = served  # before it is posted: a failed call may have counted, and counting twice is worse
        return gained

    def post(self, queue: Queue, gained: Mapping[str, float]) -> None:
        """Add the service of tenants on this worker, divided by their weights, to the ledger."""
        self.service = queue.ledger.charge(gained)

    def lift_returning(self, queue: Queue, demand: Demand) -> None:
        """Raise the service of tenants that return from idle to that of the least served tenant that stayed."""
        found = demand.tenants | demand.held.keys()
        if not found:
            return
        last, known = self._working, self.service.tenants.keys()
        self._num_replies += 1
        self._working = dict.fromkeys(found, self._num_replies)
        if demand.is_partial and last:  # the others have not gone, unless they are missing for long
            oldest = self._num_replies - KEPT_REPLIES
            self._working = {tenant: at for tenant, at in last.items() if at >= oldest} | self._working
        working = self._working.keys()
        # Before the first reply, tenants in the ledger may have been active all the time.
        before = (working & known or set(known)) if last is None else last.keys()
        returning = working - before
        # If no tenant stayed, use those that left last: no tenant keeps an advantage from before.
        stayed = before & working or before
        if not returning or not stayed:
            return
        level = min(self.service.of(tenant) for tenant in stayed)
        behind = [tenant for tenant in returning if self.service.of(tenant) < level]
        if behind:
            self.service = queue.ledger.lift(level, behind)

    def forget(self, queue: Queue) -> None:
        """Drop idle tenants that the ledger does not need, so that it does not grow."""
        needless = self.service.needless((self._working or {}).keys())
        if needless:
            self.service = queue.ledger.forget(self.service, needless)
