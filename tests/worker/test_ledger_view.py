"""How tenants stand with each other, as workers find it in a real queue."""

from __future__ import annotations

from dataclasses import replace

import pytest
from queue_objects import make_line, make_status

from ballast_engine.stats import OTHERS
from ballast_policy.fairness.tenant_slots import BelowReservation
from ballast_policy.request import RequestClass
from ballast_queue.claimable import Demand, Group
from ballast_worker.ledger_view import KEPT_REPLIES, LedgerView

ONLINE, OFFLINE = RequestClass


def demand(*waiting: str, **held: int) -> Demand:
    return Demand(tuple(Group(0, tenant) for tenant in waiting), held)


def stand(ledger: LedgerView, *tenants: str) -> list[float]:
    return [ledger.service.of(tenant) for tenant in tenants]


def test_who_returns_is_lifted_to_the_least_served_of_those_that_stayed(queue) -> None:
    ledger = LedgerView()
    ledger.post(queue, {"a": 10, "b": 20, "away": 1})
    ledger.lift_returning(queue, demand("a", "b"))
    ledger.lift_returning(queue, demand("a", "b", "away", "new"))

    assert stand(ledger, "a", "b", "away", "new") == [10, 20, 10, 10]


def test_who_comes_to_an_idle_queue_has_no_claim_on_those_that_left(queue) -> None:
    ledger = LedgerView()
    ledger.post(queue, {"a": 1000})
    ledger.lift_returning(queue, demand("a"))
    ledger.lift_returning(queue, demand())
    ledger.lift_returning(queue, demand("new"))
    ledger.lift_returning(queue, demand("a", "new"))

    assert stand(ledger, "a", "new") == [1000, 1000]


@pytest.mark.parametrize(("working", "new"), [(["a"], 1000), (["a", "b"], 500), ([], 500)])
def test_a_worker_that_starts_takes_the_ledger_for_those_that_stayed(queue, working, new) -> None:
    queue.ledger.charge({"a": 1000, "b": 500})
    ledger = LedgerView()
    ledger.post(queue, {})
    ledger.lift_returning(queue, demand(*working, "new"))

    assert stand(ledger, "new") == [new]


def test_who_holds_items_has_not_been_away(queue) -> None:
    ledger = LedgerView()
    ledger.post(queue, {"a": 10, "b": 1})
    ledger.lift_returning(queue, demand("a", "b"))
    ledger.lift_returning(queue, demand("a", b=1))
    ledger.lift_returning(queue, demand("a", "b"))

    assert stand(ledger, "b") == [1]


def test_who_is_missing_in_a_part_of_the_demand_has_not_been_away(queue, monkeypatch) -> None:
    monkeypatch.setattr("ballast_queue.claimable.MOST_GROUPS", 2)
    ledger = LedgerView()
    ledger.post(queue, {"a": 10, "b": 1, "c": 2})
    for tenants in ("abc", "ab", "ac", "bc"):
        groups = "\n".join(f"1000|{tenant}|" for tenant in tenants).encode()
        with monkeypatch.context() as patched:
            patched.setattr(queue.store, "call", lambda _, groups=groups: [groups, []])
            found = queue.claimable.demand()
        ledger.lift_returning(queue, found)
        ledger.forget(queue)

    assert ledger.service.texts == {"a": "10", "b": "1", "c": "2"}


def test_who_is_missing_in_many_parts_of_the_demand_has_left(queue) -> None:
    def part(*tenants: str) -> Demand:
        return replace(demand("steady", *tenants), is_partial=True)

    once = [f"once-{i}" for i in range(30)]
    ledger = LedgerView()
    ledger.post(queue, dict.fromkeys(["steady", "away", *once], 1.0))
    ledger.lift_returning(queue, demand("steady", "away", *once))
    ledger.lift_returning(queue, part("new"))  # the level rises to 1
    kept = []
    for _ in range(KEPT_REPLIES):
        ledger.lift_returning(queue, part())
        ledger.forget(queue)
        kept.append(len(ledger.service.tenants))
    ledger.post(queue, {"steady": 10})
    ledger.lift_returning(queue, part("away"))

    assert kept == [32] * (KEPT_REPLIES - 1) + [1]
    assert stand(ledger, "away") == [11]


def test_names_do_not_pile_up_in_the_ledger(queue) -> None:
    ledger = LedgerView()
    for i in range(30):
        ledger.lift_returning(queue, demand("steady", f"once-{i}"))
        ledger.post(queue, {"steady": 5, f"once-{i}": 1})
        ledger.lift_returning(queue, demand("steady"))
        ledger.forget(queue)

    assert set(queue.ledger.charge({}).tenants) <= {"steady", *(f"once-{i}" for i in range(20, 30))}
    assert queue.ledger.charge({}).of("once-3") <= queue.ledger.charge({}).of("steady")


def given(slots, tenant: str) -> int:
    """Count the slots in a row that a tenant gets until it has its reservation."""
    number = 0
    while BelowReservation(slots, {tenant}).first({tenant}):
        slots.count(tenant)
        number += 1
    return number


def test_a_reservation_is_counted_over_all_workers() -> None:
    ledger = LedgerView()
    ledger.reserve({"small": 0.25, "none": 0.0})

    assert ledger.reserved == {"small"}
    assert given(ledger.slots(demand("small", "big", big=8)), "small") == 3, "3 of 11 slots, 2 of 10 before"
    assert LedgerView().slots(demand("a")) is None


def test_every_worker_finds_the_same_reservation_in_the_queue(queue) -> None:
    for tenant in ("big", "small"):
        queue.submissions.submit(map(make_line, range(8)), tenant=tenant)
    big, small = (head.job_id for head in queue.claimable.heads())
    queue.leases.claim(big, 6, "w1")
    queue.leases.claim(small, 1, "w2")
    ledger = LedgerView()
    ledger.reserve({"small": 0.5})
    slots = ledger.slots(queue.claimable.demand())

    assert given(slots, "small") == 6, "7 of 13 slots, 1 of 7 before"
    slots = ledger.slots(queue.claimable.demand(), [make_status(tenant_requests={"small": 4}), make_status()])
    assert given(slots, "small") == 3, "7 of 13 slots, 4 of 10 before: its item is four requests"


def test_the_ledger_gets_what_offline_tenants_gained_over_their_weights() -> None:
    ledger = LedgerView()
    first = ledger.gained({(OFFLINE, "a"): 10.0, (OFFLINE, "b"): 6.0, (ONLINE, "a"): 7.0}, {"b": 2.0})
    second = ledger.gained({(OFFLINE, "a"): 10.0, (OFFLINE, "b"): 8.0}, {"b": 2.0})

    assert (first, second) == ({"a": 10.0, "b": 3.0}, {"b": 1.0})


def test_tenants_that_the_engine_counts_together_are_none_of_the_ledger() -> None:
    assert LedgerView().gained({(OFFLINE, OTHERS): 10.0}, {}) == {}


@pytest.mark.parametrize("between", [{}, None], ids=["read while it is forgotten", "forgotten between two reads"])
def test_a_tenant_that_the_engine_forgot_and_counts_again_pays_for_what_is_new(between) -> None:
    ledger = LedgerView()
    ledger.gained({(OFFLINE, "a"): 100.0}, {})
    if between is not None:
        ledger.gained(between, {})

    assert ledger.gained({(OFFLINE, "a"): 3.0}, {}) == {"a": 3.0}
