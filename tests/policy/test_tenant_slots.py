"""Reservations of tenants: which tenant is below its own, and that shares hold in whole runs."""

from __future__ import annotations

from collections.abc import Container, Iterator

import pytest
from engine_snapshot import Engine
from fake_engine import FakeEngine
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import lawful
from workloads import EXACT, Arrival

from ballast_policy.backlog import Backlog
from ballast_policy.fairness.ledger import Ledger
from ballast_policy.fairness.tenant_slots import BelowReservation, TenantSlots, reserved_first
from ballast_policy.host import Host
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_policy.step.class_requests import by_class
from ballast_policy.step.gate import candidates

OFFLINE = RequestClass.OFFLINE


def make_request(seq: int, tenant: str, priority: int = 0, phase: Phase = Phase.WAITING) -> Request:
    return Request(seq, OFFLINE, 0.0, 10, 10, tenant=tenant, priority=priority, num_tokens=10, phase=phase)


def first_below(slots: TenantSlots, tenants: Container[str]) -> str | None:
    return BelowReservation(slots, tenants).first(tenants)


def names(requests) -> str:
    return "".join(request.tenant for request in requests)


@pytest.mark.parametrize(
    ("reserved", "held", "below"),
    [
        pytest.param({"a": 0.25}, {}, "a", id="no tenant holds a slot"),
        pytest.param({"a": 0.25}, {"a": 1}, None, id="the first of four"),
        pytest.param({"a": 0.25}, {"a": 1, "b": 3}, "a", id="the fifth slot"),
        pytest.param({"a": 0.25, "b": 0.5}, {"a": 1, "c": 5}, "b", id="the tenant that has been below it longest"),
        pytest.param({"a": 0.1}, {"a": 3, "b": 26}, None, id="three tenths of a tenth are three"),
        pytest.param({}, {"b": 3}, None, id="no tenant reserves anything"),
    ],
)
def test_a_tenant_is_below_its_reservation_while_it_holds_less_than_its_share(reserved, held, below):
    assert first_below(TenantSlots(reserved, held), {"a", "b", "c"}) == below


def test_a_tenant_without_work_is_not_below_its_reservation():
    assert first_below(TenantSlots({"a": 0.5}, {}), {"b"}) is None


@given(st.floats(0.01, 1.0), st.integers(0, 40), st.integers(0, 40))
def test_a_tenant_falls_below_its_reservation_where_the_formula_says(reserved, own, others):
    slots = TenantSlots({"a": reserved}, {"a": own, "b": others})
    share = reserved * (own + others + 1)

    assert abs(share - own) < 1e-6 or (first_below(slots, "ab") == "a") is (share > own)
    assert (slots.due("a") <= slots.num_held) is (first_below(slots, "ab") == "a")


def test_a_tenant_that_loses_its_reservation_starts_level():
    ledger = Ledger(reserved={"a": 0.5})
    ledger.charge("a", 1000)
    ledger.charge("b", 300)
    ledger.charge("c", 200)
    ledger.reserve({"b": 0.1})

    assert ledger.services == {"a": 300, "b": 300, "c": 200}
    ledger.charge("b", 100)
    ledger.reserve({"b": 0.1})
    assert ledger.services == {"a": 300, "b": 400, "c": 200}, "b keeps its reservation"


def test_the_service_of_the_only_tenant_is_no_debt_without_its_reservation():
    ledger = Ledger(reserved={"a": 0.5, "idle": 0.1})
    ledger.charge("a", 1000)
    ledger.reserve({})

    assert ledger.services == {"a": 0}


def test_a_tenant_below_its_reservation_goes_first_and_then_the_order_goes_on():
    requests = [make_request(i, tenant) for i, tenant in enumerate("bbbbbbbaaa")]

    assert names(reserved_first(requests, TenantSlots({"a": 0.25}, {}))) == "abbbabbbab"


requests_in_order = st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1)), max_size=24).map(
    lambda drawn: [make_request(i, t, -p) for i, (t, p) in enumerate(sorted(drawn, key=lambda pair: pair[1]))]
)
reservations = st.dictionaries(st.sampled_from("ab"), st.sampled_from([0.1, 0.3, 0.5]))


def every_prefix_holds_the_shares(order: list[Request], reserved: dict[str, float], held: dict[str, int]) -> None:
    priorities = [r.priority for r in order]
    assert priorities == sorted(priorities, reverse=True)
    for position, request in enumerate(order):
        others = {r.tenant for r in order[position:] if r.priority == request.priority}
        counts = {t: held[t] + sum(r.tenant == t for r in order[:position]) for t in "abc"}
        short = {t for t in reserved if t in others and counts[t] < reserved[t] * (sum(counts.values()) + 1) - 1e-6}
        assert request.tenant in short or not short, "a tenant was below its reservation and another went first"


@given(requests_in_order, reservations, st.data())
def test_every_prefix_of_the_order_holds_the_shares_and_no_request_is_left_out(requests, reserved, data):
    held = {tenant: data.draw(st.integers(0, 4)) for tenant in "abc"}
    order = reserved_first(requests, TenantSlots(reserved, held))

    assert sorted(r.seq for r in order) == [r.seq for r in requests]
    for tenant in "abc":
        own = [r.seq for r in order if r.tenant == tenant]
        assert own == sorted(own), "the order within a tenant changed"
    every_prefix_holds_the_shares(order, reserved, held)


def in_order(residents: list[Request], waiting: list[Request], ledger: Ledger) -> list[Request]:
    """Return the parked and the waiting requests in the order in which they take slots."""
    engine = Engine()
    engine.residents, engine.waiting, engine.ledgers = residents, waiting, {OFFLINE: ledger}
    offline = by_class(engine.snapshot())[OFFLINE]
    return list(candidates(offline, offline.waiting))


@given(requests_in_order, requests_in_order, reservations, st.data())
def test_parked_and_waiting_requests_share_one_order_that_holds_the_shares(parked, waiting, reserved, data):
    for request in parked:
        request.seq, request.phase = request.seq + 100, Phase.PARKED
    held = {tenant: data.draw(st.integers(0, 4)) for tenant in "abc"}
    holders = [make_request(200, tenant, phase=Phase.RUNNING) for tenant in "abc" for _ in range(held[tenant])]
    ledger = Ledger(reserved=reserved)
    for tenant in "abc":
        ledger.charge(tenant, data.draw(st.integers(0, 99)))
    waiting = reserved_first(waiting, TenantSlots(reserved, held))  # as the backlog lists them

    order = in_order([*holders, *parked], waiting, ledger)

    assert sorted(r.seq for r in order) == sorted(r.seq for r in [*parked, *waiting])
    every_prefix_holds_the_shares(order, reserved, held)


@pytest.mark.parametrize(
    ("held", "order"),
    [
        pytest.param("aaaa", [6, 7, 5], id="the tenant holds its reservation: its turn comes last"),
        pytest.param("bbbb", [5, 6, 7], id="the tenant is below its reservation"),
    ],
)
def test_a_parked_request_goes_first_only_where_its_tenant_is_below_its_reservation(held: str, order: list[int]):
    ledger = Ledger(reserved={"a": 0.25})
    ledger.charge("a", 100)
    ledger.charge("b", 10)
    parked = [make_request(5, "a", phase=Phase.PARKED), make_request(6, "b", phase=Phase.PARKED)]
    waiting = [make_request(7, "b")]
    holders = [make_request(seq, tenant, phase=Phase.RUNNING) for seq, tenant in enumerate(held)]

    found = in_order([*holders, *parked], waiting, ledger)

    assert [r.seq for r in found] == order


def test_the_head_of_the_backlog_lists_tenants_below_their_reservation():
    backlog = Backlog()
    for seq, tenant in enumerate("b" * 40 + "a" * 3):
        backlog.add(make_request(seq, tenant))
    ledger = Ledger(reserved={"a": 0.25})
    ledger.charge("a", 1e6)

    head = backlog.head(8, {OFFLINE: ledger}, slots={OFFLINE: TenantSlots(ledger.reserved, {"b": 2})})

    assert names(head) == "ababbbab"
    assert names(backlog.head(8, {OFFLINE: ledger})) == "bbbbbbbb"


def run_of(
    reserved: float, *, late: bool, slots: int = 8, num_each: int = 120, steps: int = 400
) -> Iterator[FakeEngine]:
    """Two tenants that always wait, one of them with far more service behind it."""
    config = PolicyConfig(
        slots=slots,
        num_blocks=400,
        block_tokens=4,
        chunk_tokens=64,
        tenants={"a": TenantShare(weight=0.001, reserved=reserved), "b": TenantShare()},
    )
    arrivals = [Arrival(0.0, OFFLINE, 8, 10, tenant="b") for _ in range(num_each)]
    arrivals += [Arrival(0.15 if late else 0.0, OFFLINE, 8, 10, tenant="a") for _ in range(num_each)]
    engine = FakeEngine(Host(config, cost=EXACT, planner=lawful), arrivals)
    for _ in range(steps):
        engine.step()
        if len(engine.host.backlog.tenants(OFFLINE)) < 2 and engine.now > 0.3:
            break
        yield engine


def slots_of(engine: FakeEngine, tenant: str) -> int:
    return sum(request.tenant == tenant and request.phase is Phase.RUNNING for request in engine.kv.tables)


def test_a_tenant_keeps_its_reserved_slots_whatever_its_service():
    shares = [(slots_of(engine, "a"), len(engine.kv.tables)) for engine in run_of(0.25, late=False)]
    held = sum(a for a, _ in shares) / sum(n for _, n in shares)

    assert len(shares) > 50
    assert held == pytest.approx(0.25, abs=0.03), "its weight alone would give it next to nothing"


def test_without_a_reservation_the_weight_decides():
    shares = [(slots_of(engine, "a"), len(engine.kv.tables)) for engine in run_of(0.0, late=False)]

    assert sum(a for a, _ in shares) < 0.05 * sum(n for _, n in shares)


@settings(max_examples=12)
@given(reserved=st.sampled_from([0.1, 0.25, 0.5, 0.9]), slots=st.integers(2, 9), late=st.booleans())
def test_a_backlogged_tenant_holds_its_share_once_every_slot_was_vacant(reserved, slots, late):
    """Requests last twelve steps; one slot of rounding."""
    num_steps = 0
    for engine in run_of(reserved, late=late, slots=slots, num_each=60):
        num_steps += any(arrival.tenant == "a" for arrival in engine.present.values())
        if num_steps > 24:
            assert slots_of(engine, "a") >= reserved * len(engine.kv.tables) - 1
    assert num_steps > 24
