"""The gate of a class: whom a request that cannot start stops, whose slot is taken, and the order."""

from __future__ import annotations

import pytest
from engine_snapshot import Engine, why

from ballast_policy.learning.cost import StepWork
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, PARKED, WAITING, Phase
from ballast_policy.snapshot import TenantShare
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.gate import AdmissionGate, candidates

PROMPTS, NEW = ["parked prompt", "prompt"], ["prompt", "token"]
ALL = ["parked prompt", "parked decode", "prompt", "token"]


def make_gate(engine: Engine, *, num_rows: int = 9, num_free: int = 0) -> AdmissionGate:
    step = StepDraft(engine.snapshot())
    return AdmissionGate(step, step.offline, lambda: num_free, num_rows)


@pytest.mark.parametrize(
    ("phase", "reason", "num_rows", "stopped"),
    [
        pytest.param(WAITING, Reason.CHUNK_SPENT, 9, PROMPTS, id="a newcomer finds no prefill tokens"),
        pytest.param(PARKED, Reason.CHUNK_SPENT, 9, PROMPTS, id="a parked prompt finds no prefill tokens"),
        pytest.param(WAITING, Reason.NO_KV, 9, NEW, id="a newcomer finds no blocks"),
        pytest.param(WAITING, Reason.STEP_BUDGET, 9, NEW, id="a newcomer finds no time"),
        pytest.param(PARKED, Reason.NO_KV, 9, ALL, id="a parked request finds no blocks"),
        pytest.param(WAITING, Reason.NO_SLOT, 1, ALL, id="no slot"),
        pytest.param(WAITING, Reason.NO_SLOT, 0, NEW, id="no row for a newcomer"),
    ],
)
def test_the_gate_stops_those_that_lack_the_same_and_explains_the_first_newcomer(
    phase: Phase, reason: Reason, num_rows: int, stopped: list[str]
):
    engine = Engine()
    closing = engine.add(OFFLINE, 9) if phase is WAITING else engine.decoding(OFFLINE, phase=PARKED)
    later = {
        "parked prompt": engine.prefilling(OFFLINE, tokens=6, done=4, phase=PARKED),
        "parked decode": engine.decoding(OFFLINE, phase=PARKED),
        "prompt": engine.add(OFFLINE, 2),
        "token": engine.add(OFFLINE, 1),
    }
    gate = make_gate(engine, num_rows=num_rows)

    assert not any(map(gate.stops, later.values()))
    gate.close(closing, reason)
    assert [name for name, request in later.items() if gate.stops(request)] == stopped
    explained = [closing] if phase is WAITING else [closing, later["prompt"]]
    assert gate.step.draft.because == [(request, reason) for request in explained]
    gate.close(later["parked decode"], Reason.NO_KV)
    assert all(map(gate.stops, later.values()))
    assert len(gate.step.draft.because) == len(explained) + 1, "another newcomer is not explained"


@pytest.mark.parametrize(("num_free", "parked"), [(0, ["c", "b"]), (1, [])])
def test_higher_priorities_take_the_slots_of_the_last_in_order(num_free: int, parked: list[str]):
    engine = Engine()
    holders = {name: engine.decoding(OFFLINE, priority=name == "a") for name in "abc"}
    first, second = (engine.add(OFFLINE, 4, priority=2) for _ in range(2))
    gate = make_gate(engine, num_free=num_free)

    for request in (first, second):
        gate.start(request, 4, Reason.LENT)

    draft = gate.step.draft
    assert draft.park == gate.step.offline.leaving == [holders[name] for name in parked]
    assert draft.admit == [first, second]


def test_prefill_goes_on_before_equal_requests_and_behind_a_closed_gate():
    engine = Engine()
    equal, low = (engine.prefilling(OFFLINE, tokens=8, done=4) for _ in range(2))
    equal.priority = 1
    first, _ = (engine.add(OFFLINE, 4, priority=1) for _ in range(2))
    gate, order = make_gate(engine), []
    for request in gate.in_order([low, equal]):
        order.append(request)
        if request is first:
            gate.close(first, Reason.NO_SLOT)

    assert order == [equal, first, low]


@pytest.mark.parametrize(("priority", "service", "is_first"), [(1, 0.5, True), (0, 0.5, False), (0, 0.0, False)])
def test_a_newcomer_goes_before_parked_requests_only_by_priority_or_service(priority, service, is_first):
    engine = Engine()
    parked = engine.decoding(OFFLINE, phase=PARKED, tenant="new")
    newcomer = engine.add(OFFLINE, 4, priority=priority, tenant="old")
    engine.ledgers[OFFLINE].charge("old", service)
    offline = StepDraft(engine.snapshot()).offline

    assert list(candidates(offline, offline.waiting)) == ([newcomer, parked] if is_first else [parked, newcomer])


def test_a_cap_counts_the_offline_requests_that_start():
    engine = Engine(tenants={"capped": TenantShare(max_slots=2)})
    online = engine.add(ONLINE, 1, tenant="capped")
    items = [engine.add(OFFLINE, 1, tenant="capped") for _ in range(4)]
    other = engine.add(OFFLINE, 1)

    decided = engine.plan()

    assert set(decided.admit) == {online, *items[:2], other}
    assert why(decided, items[2]) is Reason.TENANT_CAP


def test_a_resumed_decode_takes_the_time_of_a_decode():
    engine = Engine()
    engine.decoding(OFFLINE, tokens=40, phase=PARKED)

    assert engine.plan().predicted_seconds == pytest.approx(engine.cost.predict(StepWork(0, 0.0, 1, 40)))


def test_tenants_below_their_reservation_come_first_among_requests_of_a_class():
    engine = Engine()
    first, second, reserved = (engine.decoding(OFFLINE, tenant=tenant) for tenant in ("a", "a", "b"))
    engine.ledgers[OFFLINE].reserve({"b": 0.5})
    offline = StepDraft(engine.snapshot()).offline

    assert offline.ranked([first, second, reserved]) == [reserved, first, second]


def test_a_decode_grows_when_its_blocks_are_full():
    engine = Engine()
    _, full = engine.decoding(OFFLINE, tokens=12), engine.decoding(OFFLINE, tokens=13)

    assert StepDraft(engine.snapshot()).offline.growing == [full]


def test_the_reserved_blocks_cover_what_fits_into_them_in_order():
    engine = Engine(num_blocks=40)
    first, second, _ = (engine.decoding(OFFLINE, tokens=tokens) for tokens in (25, 13, 13))

    assert StepDraft(engine.snapshot()).coverage.residents == {first, second}, "6 and 3 of 10 blocks"
