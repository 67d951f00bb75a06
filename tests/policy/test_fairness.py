from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from replay import Arrival, Replay

from ballast_policy.fairness import Ledger, token_cost
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare


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
    ledger.reweigh({"a": 10.0})
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
    ledger.absorb({"a": 500, "b": 70})

    assert [ledger.service(tenant) for tenant in "abc"] == [500, 70, 30]


@settings(max_examples=60)
@given(
    prompts=st.tuples(st.integers(5, 40), st.integers(5, 40)),
    outputs=st.tuples(st.integers(1, 12), st.integers(1, 12)),
    weights=st.tuples(st.sampled_from([1.0, 2.0]), st.sampled_from([1.0, 4.0])),
    slots=st.integers(1, 6),
)
def test_the_service_of_two_backlogged_tenants_stays_within_the_bound_of_vtc(prompts, outputs, weights, slots):
    """`2 * max(w_in * longest input, w_out * tokens in KV)`, by the smaller weight."""
    names = ("a", "b")
    config = PolicyConfig(
        slots=slots,
        num_blocks=40,
        block_tokens=4,
        chunk_tokens=32,
        tail_tokens=4,
        tenants={name: TenantShare(weight=weight) for name, weight in zip(names, weights, strict=True)},
    )
    arrivals = [
        Arrival(0.0, RequestClass.OFFLINE, prompts[i], outputs[i], tenant=names[i]) for _ in range(60) for i in (0, 1)
    ]
    replay = Replay(config, arrivals)
    bound = 2 * max(*prompts, 2 * config.num_blocks * config.block_tokens) / min(weights)
    widest = 0.0
    replay.step()
    while replay.backlog.tenants(RequestClass.OFFLINE) == set(names):
        ledger = replay.ledgers[RequestClass.OFFLINE]
        widest = max(widest, abs(ledger.service("a") - ledger.service("b")))
        replay.step()

    assert 0 < widest <= bound
