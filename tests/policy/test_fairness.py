from __future__ import annotations

from itertools import permutations

from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from workloads import EXACT, Arrival

from ballast_policy.fairness.ledger import Ledger, token_cost
from ballast_policy.host import Host
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.replay.fairness import most_ahead


def test_output_costs_twice_what_input_costs():
    assert token_cost(num_input=100, num_output=50) == 200


def test_service_is_cost_over_weight():
    ledger = Ledger({"heavy": 4.0})
    ledger.charge("heavy", 100)
    ledger.charge("light", 100)

    assert (ledger.service("heavy"), ledger.service("light")) == (25, 100)


def test_a_returning_tenant_is_lifted_to_the_least_served_that_stayed():
    ledger = Ledger()
    for tenant, cost in {"away": 10, "b": 200, "c": 300}.items():
        ledger.charge(tenant, cost)

    ledger.lift("away", ["b", "c"])

    assert ledger.service("away") == 200


def test_lifting_never_takes_service_away():
    ledger = Ledger()
    ledger.charge("rich", 500)
    ledger.charge("poor", 5)

    ledger.lift("rich", ["poor"])

    assert ledger.service("rich") == 500


def test_with_nobody_active_a_newcomer_starts_where_the_last_one_stood():
    ledger = Ledger()
    ledger.charge("old", 1000)

    ledger.lift("new", [])

    assert ledger.service("new") == 1000


def test_new_weights_leave_the_past_alone():
    ledger = Ledger({"a": 2.0})
    ledger.charge("a", 100)
    ledger.weights = {"a": 10.0}
    ledger.charge("a", 100)

    assert ledger.service("a") == 60


def test_forgetting_idle_tenants_changes_nobody_s_standing():
    ledger = Ledger()
    for tenant, cost in {"gone": 10, "ahead": 400, "here": 100}.items():
        ledger.charge(tenant, cost)

    ledger.forget_idle(["here"])
    ledger.lift("gone", ["here"])

    assert (ledger.service("gone"), ledger.service("ahead")) == (100, 400)


def test_the_totals_of_a_shared_ledger_are_taken_over_for_the_tenants_that_it_names():
    ledger = Ledger({"a": 2.0})
    ledger.charge("a", 100)
    ledger.charge("c", 30)
    ledger.services.update({"a": 500, "b": 70})

    assert [ledger.service(tenant) for tenant in "abc"] == [500, 70, 30]


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
def test_nobody_gets_further_ahead_of_who_waits_than_the_bound(tenants, slots, chunk, late, shared):
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
