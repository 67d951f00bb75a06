"""Which tenants hold the slots of a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ballast_policy.backlog import Ledgers
from ballast_policy.request import RUNNING, Request, RequestClass
from ballast_policy.tenant_slots import TenantSlots


def slots_held(requests: Iterable[Request]) -> Counter[str]:
    """Count the slots by tenant."""
    return Counter(request.tenant for request in requests if request.phase is RUNNING)


def tenant_slots(ledgers: Ledgers, running: Collection[Request]) -> dict[RequestClass, TenantSlots]:
    """Return the slots by tenant of each class in which a tenant has a reservation."""
    return {
        request_class: TenantSlots(
            ledger.reserved, Counter([r.tenant for r in running if r.request_class is request_class])
        )
        for request_class, ledger in ledgers.items()
        if ledger.reserved
    }
