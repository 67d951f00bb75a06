"""Which tenants hold the slots of a class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from ballast_policy.backlog import Backlog, Ledgers
from ballast_policy.floors import Floors
from ballast_policy.request import PARKED, RUNNING, Request, RequestClass


def slots_held(requests: Iterable[Request]) -> Counter[str]:
    """Count the slots by tenant."""
    return Counter(request.tenant for request in requests if request.phase is RUNNING)


def floors_of(ledgers: Ledgers, running: Collection[Request]) -> dict[RequestClass, Floors]:
    """Give the floors of the classes in which a tenant reserves anything, from who holds a slot."""
    return {
        request_class: ledger.debts.floors(Counter([r.tenant for r in running if r.request_class is request_class]))
        for request_class, ledger in ledgers.items()
        if ledger.debts.reserved
    }


def note_holding(ledgers: Ledgers, residents: Iterable[Request], backlog: Backlog, *, now: float, slots: int) -> None:
    """Tell the debts of every class who holds slots from now on; called whenever a plan was carried out."""
    if not any(ledger.debts.reserved for ledger in ledgers.values()):
        return
    everyone = list(residents)
    for request_class, ledger in ledgers.items():
        ours = [request for request in everyone if request.request_class is request_class]
        parked = {request.tenant for request in ours if request.phase is PARKED}
        ledger.debts.note(now, slots_held(ours), parked | backlog.tenants(request_class), slots)
