"""Steps nested in suspended ones: for any state, nothing of the step in flight is touched, and every law holds."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from sys import maxsize

import pytest
from engine_snapshot import Engine
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import After, left, slots_and_chunk_are_never_exceeded, the_plan_is_well_formed
from workloads import EXACT, snapshots

from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, Phase
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.budget import SUSPENDED_SHARE
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.planner import plan
from ballast_policy.step.suspension import plan_nested, suspendable_seconds

EXAMPLES = settings().max_examples


@settings(max_examples=5 * EXAMPLES)
@given(snapshots(), st.data())
def test_a_nested_plan_serves_newcomers_and_touches_nothing_in_flight(snapshot: EngineSnapshot, data: st.DataObject):
    config = replace(snapshot.config, can_suspend=True, most_residents=maxsize)
    snapshot = replace(snapshot, config=config, num_leaving=0)
    running = [r for r in snapshot.residents if r.phase is Phase.RUNNING]
    in_flight = data.draw(st.lists(st.sampled_from(running), unique_by=id)) if running else []
    seconds = data.draw(st.sampled_from([0.0, 0.006, 0.02, 10.0]))

    nested = plan_nested(snapshot, in_flight, seconds)

    for law in (the_plan_is_well_formed, slots_and_chunk_are_never_exceeded):
        law(snapshot, nested)
    assert all(r.request_class is ONLINE and r.phase is Phase.WAITING for r in nested.admit)
    assert dict(nested.grants) == {r: left(r) for r in nested.admit}, "a newcomer has its first token, or waits"
    assert not set(in_flight) & {*nested.preempt, *dict(nested.grants)}, "the step in flight writes its KV"
    assert all(r.request_class is OFFLINE and r.phase is Phase.PARKED for r in nested.preempt)
    assert all(r.request_class is OFFLINE for r in nested.park)
    assert not nested.resume
    assert nested.predicted_seconds <= seconds
    assert bool(nested.admit) or not (nested.park or nested.preempt), "only a newcomer takes anything away"
    assert plan_nested(snapshot, in_flight, seconds) == nested


@settings(max_examples=3 * EXAMPLES)
@given(snapshots())
def test_a_nested_plan_leaves_the_reservation_its_slots(snapshot: EngineSnapshot):
    running = [r for r in snapshot.residents if r.phase is Phase.RUNNING and r.request_class is OFFLINE]

    nested = plan_nested(snapshot, (), inf)

    after = After(snapshot, nested)
    assert len(after.offline) >= min(after.reserved, len(running))
    reasons = {because.request: because.reason for because in nested.because}
    assert all(reasons[r] is Reason.SLOT_RECLAIMED for r in nested.park)
    assert all(reasons[r] is Reason.ONLINE_FIRST for r in nested.admit)


@settings(max_examples=3 * EXAMPLES)
@given(snapshots())
def test_a_step_stands_still_only_as_long_as_its_online_tokens_can_wait(snapshot: EngineSnapshot):
    decided = plan(snapshot)

    if not decided.suspendable_seconds:
        return
    decodes = [
        r for r in snapshot.residents if r.request_class is ONLINE and r in dict(decided.grants) and left(r) == 1
    ]
    assert not any(r.phase is Phase.RUNNING for r in decodes) or decided.predicted_seconds > 2 * snapshot.cost.k0
    end = snapshot.now + decided.predicted_seconds + decided.suspendable_seconds
    for request, _ in decided.grants:
        if request.request_class is ONLINE and request.phase is not Phase.WAITING:
            dues = [request.next_deadline]
            if left(request) == 1:
                dues.append(request.first_token + request.num_output * request.tpot)
            assert all(end <= due + 1e-9 for due in dues if due >= snapshot.now + decided.predicted_seconds)


def test_two_newcomers_take_the_blocks_of_two_parked_ones():
    engine = Engine(slots=4, offline_share=0.0)
    parked = [engine.decoding(OFFLINE, phase=Phase.PARKED) for _ in range(2)]
    newcomers = [engine.add(ONLINE, 16) for _ in range(2)]
    engine.extra["free_blocks"] = 2

    nested = plan_nested(engine.snapshot(), (), inf)

    assert nested.admit == tuple(newcomers)
    assert set(nested.preempt) == set(parked)


@pytest.mark.parametrize(("free", "is_in"), [(3, False), (4, True)])
def test_a_newcomer_leaves_each_running_online_request_a_block(free: int, is_in: bool):
    engine = Engine(slots=4, offline_share=0.0)
    running = [engine.decoding(ONLINE) for _ in range(2)]
    engine.add(ONLINE, 8)
    engine.extra["free_blocks"] = free

    assert bool(plan_nested(engine.snapshot(), running, inf).admit) is is_in


def waits(
    *, decodes: tuple = (), waiting: dict | None = None, prefill: float | None = None, seconds: float = 0.03, **fields
) -> float:
    """Return how long a step of `seconds` that begins at 10 s may be suspended. The TTFT is 1 s."""
    engine = Engine(**{"ttft": 1.0, **fields})
    for decode in decodes:
        engine.decoding(ONLINE, **{"arrival": 9.5, "ttft": 0.4, "tpot": 0.05, "num_output": 5, **decode})
    if prefill is not None:
        engine.prefilling(ONLINE, tokens=8).ttft = prefill
    if waiting is not None:
        engine.add(ONLINE, 1, **waiting)
    step = StepDraft(engine.snapshot())
    for request in step.online.prefills:
        step.grant(request, 8)
    for request in step.online.waiting:
        step.start(request, 1, Reason.ONLINE_FIRST)
    step.time.seconds = seconds
    return suspendable_seconds(step)


@pytest.mark.parametrize(
    ("step", "slack"),
    [
        pytest.param({}, inf, id="only the TTFT of a newcomer limits an offline step"),
        pytest.param({"seconds": 0.004}, inf, id="nor a short one"),
        pytest.param({"decodes": ({"first_token": 9.8},)}, 0.02, id="a decode is due at 10.05"),
        pytest.param({"decodes": ({"first_token": 9.7},)}, 0.12, id="late by its first token, not by its TTFT"),
        pytest.param({"decodes": ({"first_token": 9.75},)}, 0.0, id="a decode is due now"),
        pytest.param({"decodes": ({"first_token": 9.0, "ttft": 0.1},)}, inf, id="a decode is late in any case"),
        pytest.param(
            {
                "decodes": (
                    {"first_token": 9.9},
                    {"first_token": 9.8},
                )
            },
            0.02,
            id="the first of two decodes",
        ),
        pytest.param({"decodes": ({"first_token": 9.8},), "seconds": 0.01}, 0.0, id="as short as two fixed costs"),
        pytest.param({"decodes": ({"first_token": 9.8},), "seconds": 0.012}, 0.038, id="longer than two fixed costs"),
        pytest.param({"waiting": {"arrival": 9.9, "ttft": 0.5}}, 0.37, id="a prompt of one token"),
        pytest.param({"prefill": 0.2}, 0.17, id="a prompt"),
        pytest.param({"prefill": 0.03}, 0.0, id="a prompt that is due at the end"),
        pytest.param({"prefill": 0.02}, inf, id="a prompt that is late in any case"),
        pytest.param({"can_suspend": False}, 0.0, id="an engine that cannot"),
        pytest.param({"ttft": inf}, 0.0, id="no newcomer is in a hurry"),
    ],
)
def test_a_step_can_wait_for_a_share_of_the_time_until_an_online_token_of_it_is_late(step: dict, slack: float):
    assert waits(**step) == pytest.approx(min(1.0, SUSPENDED_SHARE * slack))


def test_a_plan_states_how_long_its_step_can_wait():
    engine = Engine(ttft=1.0)
    engine.decoding(OFFLINE)

    assert engine.plan().suspendable_seconds == 1.0


EXPERTS = replace(EXACT, k5=0.03, missed=0.9)
TWO_PROMPTS = EXPERTS.k0 + EXPERTS.prefill(0, 8) + EXPERTS.prefill(0, 8, 8)
TWO_TOKENS = EXPERTS.k0 + EXPERTS.decode(1) + EXPERTS.decode(1, 1)


@pytest.mark.parametrize(
    ("sizes", "fields", "num_admitted"),
    [
        pytest.param([8] * 5, {"slots": 4}, 4, id="slots"),
        pytest.param([32, 32, 8], {}, 2, id="prefill tokens"),
        pytest.param([8] * 3, {"seconds": TWO_PROMPTS}, 2, id="time"),
        pytest.param([8] * 3, {"seconds": TWO_PROMPTS + 0.001}, 2, id="too little time for the third"),
        pytest.param([1] * 3, {"seconds": TWO_TOKENS}, 2, id="time of prompts of one token"),
        pytest.param([1] * 3, {"seconds": TWO_TOKENS - 1e-6}, 1, id="too little time for the token of a second"),
        pytest.param([8] * 3, {"num_blocks": 5}, 2, id="blocks"),
        pytest.param([40] * 3, {"num_cached": 20}, 3, id="only what the cache does not hold counts"),
    ],
)
def test_a_nested_plan_admits_newcomers_in_order_until_something_is_used_up(sizes, fields, num_admitted):
    fields = {"offline_share": 0.0, **fields}
    seconds, num_cached = fields.pop("seconds", 10.0), fields.pop("num_cached", 0)
    engine = Engine(**fields)
    engine.cost = EXPERTS
    newcomers = [engine.add(ONLINE, size, num_cached=num_cached) for size in sizes]

    nested = plan_nested(engine.snapshot(), (), seconds)

    assert nested.admit == tuple(newcomers[:num_admitted])
    assert (nested.budget_seconds, nested.suspendable_seconds) == (seconds, 0.0)


def test_a_newcomer_takes_the_slot_of_the_last_offline_request_that_borrows_one():
    engine = Engine(slots=4)
    offline = [engine.decoding(OFFLINE) for _ in range(4)]
    newcomer = engine.add(ONLINE, 8)

    nested = plan_nested(engine.snapshot(), offline, 10.0)

    assert nested.park == (offline[3],)
    assert {because.request: because.reason for because in nested.because} == {
        newcomer: Reason.ONLINE_FIRST,
        offline[3]: Reason.SLOT_RECLAIMED,
    }
    engine.config = replace(engine.config, slots=5)
    assert not plan_nested(engine.snapshot(), offline, 10.0).park


def test_a_newcomer_takes_no_blocks_of_a_prompt_that_goes_on_nor_of_a_running_request():
    engine = Engine(offline_share=0.0)
    engine.prefilling(ONLINE, tokens=16, done=4)
    engine.decoding(OFFLINE, tokens=33)
    engine.add(ONLINE, 8)
    engine.extra["free_blocks"] = 4

    nested = plan_nested(engine.snapshot(), (), 10.0)

    assert (nested.admit, nested.preempt) == ((), ())


def test_the_blocks_that_a_newcomer_shares_are_reclaimed_because_its_victims_may_hold_them():
    engine = Engine(offline_share=0.0)
    parked = [engine.decoding(OFFLINE, tokens=13, phase=Phase.PARKED) for _ in range(3)]
    newcomer = engine.add(ONLINE, 16, num_cached=8)
    engine.extra["free_blocks"] = 0

    nested = plan_nested(engine.snapshot(), (), 10.0)

    assert nested.admit == (newcomer,)
    assert len(nested.preempt) == 2 < len(parked), "four blocks are needed, and a victim has three"
