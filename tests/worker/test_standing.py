"""How tenants stand with each other, as workers find it in a real queue."""

from __future__ import annotations

import json

import pytest

from ballast_queue.claimable import Demand, Group
from ballast_queue.redis_store import Queue
from ballast_worker.standing import Standing


@pytest.fixture
def queue(valkey, queue_name):
    queue = Queue.connect(valkey.url, queue_name)
    yield queue
    queue.close()


def demand(*waiting: str, **held: int) -> Demand:
    return Demand(tuple(Group(0, tenant) for tenant in waiting), held)


def stand(standing: Standing, *tenants: str) -> list[float]:
    return [standing.service.of(tenant) for tenant in tenants]


def test_who_returns_is_lifted_to_the_least_served_of_those_that_stayed(queue) -> None:
    standing = Standing()
    standing.post(queue, {"a": 10, "b": 20, "away": 1})
    standing.notice(queue, demand("a", "b"))
    standing.notice(queue, demand("a", "b", "away", "new"))

    assert stand(standing, "a", "b", "away", "new") == [10, 20, 10, 10]


def test_who_comes_to_an_idle_queue_has_no_claim_on_those_that_left(queue) -> None:
    standing = Standing()
    standing.post(queue, {"a": 1000})
    standing.notice(queue, demand("a"))
    standing.notice(queue, demand())
    standing.notice(queue, demand("new"))
    standing.notice(queue, demand("a", "new"))

    assert stand(standing, "a", "new") == [1000, 1000]


@pytest.mark.parametrize(("working", "new"), [(["a"], 1000), (["a", "b"], 500), ([], 500)])
def test_a_worker_that_starts_takes_the_ledger_for_those_that_stayed(queue, working, new) -> None:
    queue.ledger.charge({"a": 1000, "b": 500})
    standing = Standing()
    standing.post(queue, {})
    standing.notice(queue, demand(*working, "new"))

    assert stand(standing, "new") == [new]


def test_who_holds_items_has_not_been_away(queue) -> None:
    standing = Standing()
    standing.post(queue, {"a": 10, "b": 1})
    standing.notice(queue, demand("a", "b"))
    standing.notice(queue, demand("a", b=1))
    standing.notice(queue, demand("a", "b"))

    assert stand(standing, "b") == [1]


def test_names_do_not_pile_up_in_the_ledger(queue) -> None:
    standing = Standing()
    for i in range(30):
        standing.notice(queue, demand("steady", f"once-{i}"))
        standing.post(queue, {"steady": 5, f"once-{i}": 1})
        standing.notice(queue, demand("steady"))
        standing.forget(queue)

    assert set(queue.ledger.read().tenants) <= {"steady", *(f"once-{i}" for i in range(20, 30))}
    assert queue.ledger.read().of("once-3") <= queue.ledger.read().of("steady")


def given(slots, tenant: str) -> int:
    """Count the slots in a row that a tenant gets until it has its reservation."""
    number = 0
    while slots.below({tenant}):
        slots.count(tenant)
        number += 1
    return number


def test_a_reservation_is_counted_over_all_workers() -> None:
    standing = Standing()
    standing.reserve({"small": 0.25, "none": 0.0})

    assert standing.reserved == {"small"}
    assert given(standing.slots(demand("small", "big", big=8)), "small") == 3, "3 of 11 slots, 2 of 10 before"
    assert Standing().slots(demand("a")) is None


def test_every_worker_finds_the_same_reservation_in_the_queue(queue) -> None:
    lines = [
        json.dumps(
            {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": {"model": "m", "prompt": "p"}}
        )
        for i in range(8)
    ]
    for tenant in ("big", "small"):
        queue.submissions.submit(lines, tenant=tenant)
    big, small = (head.job_id for head in queue.claimable.heads())
    queue.leases.claim(big, 6, "w1")
    queue.leases.claim(small, 1, "w2")
    standing = Standing()
    standing.reserve({"small": 0.5})
    slots = standing.slots(queue.claimable.demand())

    assert given(slots, "small") == 6, "7 of 13 slots, 1 of 7 before"
