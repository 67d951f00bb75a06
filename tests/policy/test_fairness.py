from __future__ import annotations

from itertools import permutations
from math import inf

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ranking
from workloads import EXACT, Arrival

from ballast_policy.fairness.ledger import Ledger, token_cost
from ballast_policy.fairness.order import ranked
from ballast_policy.host import Host
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.replay.fairness import most_ahead


def test_output_costs_twice_what_input_costs():
    assert token_cost(num_input=100, num_output=50) == 200


def test_service_is_cost_over_weight():
    ledger = Ledger({"heavy": 4.0})
    ledger.charge("heavy", 100)
    ledger.charge("light", 100)

    assert (ledger.service("heavy"), ledger.service("light")) == (25, 100)


@pytest.mark.parametrize(
    ("services", "active", "lifted"),
    [
        pytest.param({"tenant": 10, "b": 200, "c": 300}, ["b", "c"], 200, id="to the least served that stayed"),
        pytest.param({"tenant": 500, "poor": 5}, ["poor"], 500, id="never down"),
        pytest.param({"last": 1000}, [], 1000, id="to the tenant charged last if none is active"),
    ],
)
def test_a_tenant_that_returns_is_lifted(services, active, lifted):
    ledger = Ledger()
    for tenant, cost in services.items():
        ledger.charge(tenant, cost)

    ledger.lift("tenant", active)

    assert ledger.service("tenant") == lifted


def test_new_weights_leave_the_past_alone():
    ledger = Ledger({"a": 2.0})
    ledger.charge("a", 100)
    ledger.weights = {"a": 10.0}
    ledger.charge("a", 100)

    assert ledger.service("a") == 60


def test_forgetting_idle_tenants_changes_no_service_that_counts():
    ledger = Ledger()
    for tenant, cost in {"gone": 10, "ahead": 400, "here": 100}.items():
        ledger.charge(tenant, cost)

    ledger.forget_idle(["here"])
    ledger.lift("gone", ["here"])

    assert (ledger.service("gone"), ledger.service("ahead")) == (100, 400)


def test_an_idle_tenant_with_the_least_service_of_those_present_is_dropped():
    ledger = Ledger()
    for tenant in ("here", "as much"):
        ledger.charge(tenant, 100)

    ledger.forget_idle(["here"])

    assert ledger.services == {"here": 100}
    ledger.forget_idle([])
    assert ledger.services == {}, "all would be lifted to the one that was charged last"


def test_beside_a_tenant_that_gets_little_the_most_served_idle_tenants_are_kept():
    ledger = Ledger()
    ledger.charge("little", 1)
    for number in range(30):
        ledger.charge(f"user-{number}", 10 + number)

    ledger.forget_idle(["little"], 10)

    assert ledger.services == {"little": 1, **{f"user-{number}": 10 + number for number in range(20, 30)}}


def test_active_tenants_are_kept_beyond_the_limit():
    ledger = Ledger()
    active = [f"user-{number}" for number in range(30)]
    for tenant in (*active, "idle"):
        ledger.charge(tenant, 1)
    ledger.charge("idle", 1)

    ledger.forget_idle(active, 1)

    assert ledger.services == {**dict.fromkeys(active, 1), "idle": 2}


def test_equally_served_idle_tenants_do_not_exceed_the_limit():
    ledger = Ledger()
    for number in range(30):
        ledger.charge(f"user-{number}", 7)

    ledger.forget_idle([], 10)

    assert len(ledger.services) <= 10


weights = st.sampled_from([0.5, 1.0, 3.0])


@settings(max_examples=25)
@given(
    tenants=st.dictionaries(
        st.sampled_from("abc"), st.tuples(weights, st.integers(2, 40), st.integers(1, 12)), min_size=2
    ),
    slots=st.integers(1, 6),
    chunk=st.sampled_from([8, 32]),
    late=st.booleans(),
    shared=st.integers(0, 20),
)
def test_no_tenant_exceeds_a_waiting_tenant_by_more_than_the_bound(tenants, slots, chunk, late, shared):
    """Tenants differ in weight and lengths, one may come late, and prompts may share a prefix, which costs nothing."""
    config = PolicyConfig(
        slots=slots,
        num_blocks=400,
        block_tokens=4,
        chunk_tokens=chunk,
        tenants={name: TenantShare(weight=weight) for name, (weight, _, _) in tenants.items()},
    )
    first = min(tenants)
    arrivals = [
        Arrival(
            0.3 if late and name == first else 0.0,
            RequestClass.OFFLINE,
            prompt,
            output,
            tenant=name,
            prefix_key=ord(name),
            shared=min(shared, prompt),
        )
        for _ in range(25)
        for name, (_, prompt, output) in tenants.items()
    ]
    engine = FakeEngine(Host(config, cost=EXACT), arrivals)
    bounds = {
        pair: most_ahead(
            slots, *(max(tenants[name][i] for name in pair) for i in (1, 2)), min(tenants[n][0] for n in pair)
        )
        for pair in permutations(tenants, 2)
    }
    waited: set[str] = set()
    for _ in range(120):
        engine.step()
        service = engine.host.ledgers[RequestClass.OFFLINE].service
        waiting = engine.host.backlog.tenants(RequestClass.OFFLINE)
        if len(waited | waiting) > len(waiting):
            break  # one has nothing left: the others get all
        waited |= waiting
        for behind in waiting:
            for ahead in tenants.keys() - {behind}:
                assert service(ahead) - service(behind) <= bounds[ahead, behind] + 1e-9


def test_two_tenants_with_unequal_weights_share_in_their_proportion():
    config = PolicyConfig(
        slots=8,
        num_blocks=400,
        block_tokens=4,
        chunk_tokens=64,
        tenants={"a": TenantShare(weight=1.0), "b": TenantShare(weight=3.0)},
    )
    arrivals = [Arrival(0.0, RequestClass.OFFLINE, 10, 10, tenant=tenant) for tenant in "abbb" for _ in range(150)]
    engine = FakeEngine(Host(config, cost=EXACT), arrivals)
    engine.step()
    while len(engine.host.backlog.tenants(RequestClass.OFFLINE)) == 2:
        engine.step()
    ledger = engine.host.ledgers[RequestClass.OFFLINE]

    assert abs(ledger.service("a") / ledger.service("b") - 1) < 0.02


items = st.builds(
    Request,
    seq=st.integers(0, 10_000),
    request_class=st.just(RequestClass.OFFLINE),
    arrival=st.just(0.0),
    num_prompt=st.just(1),
    max_output=st.just(1),
    tenant=st.sampled_from("abcd"),
    priority=st.integers(-1, 1),
    slack=st.sampled_from([inf, -1.0, 2.5]),
    prefix_seq=st.integers(0, 2),
)


@given(st.lists(items, unique_by=lambda item: item.seq), st.dictionaries(st.sampled_from("abc"), st.integers(0, 3)))
def test_sorting_part_by_part_is_sorting_by_rank(requests: list[Request], service: dict[str, int]):
    ledger = Ledger()
    for tenant, cost in service.items():
        ledger.charge(tenant, cost)

    assert ranked(requests, ledger) == sorted(requests, key=ranking(ledger))
