"""What the planner does, one situation at a time."""

from __future__ import annotations

import pytest
from engine_snapshot import Engine, why
from fake_engine import FakeEngine
from workloads import EXACT, Arrival

from ballast_policy.host import Host
from ballast_policy.learning.cost import StepWork
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, Phase
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig, TenantShare
from ballast_policy.step.planner import plan


def test_an_idle_engine_plans_nothing():
    assert Engine().plan() == StepPlan()


def test_all_decodes_continue():
    engine = Engine()
    requests = [engine.decoding(ONLINE), engine.decoding(OFFLINE)]

    assert engine.plan().grants == tuple((request, 1) for request in requests)


def test_an_online_burst_takes_the_lent_slots_back_in_one_step_and_no_more():
    engine = Engine()
    backfill = [engine.decoding(OFFLINE) for _ in range(8)]
    burst = [engine.add(ONLINE, 5) for _ in range(8)]

    decided = engine.plan()

    assert decided.admit == tuple(burst[:6])
    assert len(decided.park) == 6
    assert not decided.preempt
    assert {why(decided, request) for request in decided.park} == {Reason.SLOT_RECLAIMED}
    assert why(decided, burst[6]) is Reason.NO_SLOT
    assert [request for request, _ in decided.grants if request in backfill] == backfill[:2]


def test_idle_reservation_is_lent_to_online():
    engine = Engine()
    for _ in range(8):
        engine.add(ONLINE, 5)

    assert len(engine.plan().admit) == 8


def test_a_reservation_lent_to_online_comes_back_with_the_next_free_slot():
    engine = Engine()
    for _ in range(7):
        engine.decoding(ONLINE)
    newcomer = engine.add(ONLINE, 5)
    item = engine.add(OFFLINE, 5)

    decided = engine.plan()

    assert decided.admit == (item,)
    assert why(decided, item) is Reason.OFFLINE_RESERVATION
    assert why(decided, newcomer) is Reason.NO_SLOT


def test_online_in_the_middle_of_an_answer_is_not_stopped_for_the_reservation():
    engine = Engine()
    answers = [engine.decoding(ONLINE) for _ in range(8)]
    engine.add(OFFLINE, 5)

    decided = engine.plan()

    assert [request for request, _ in decided.grants] == answers
    assert not decided.park


@pytest.mark.parametrize(("tokens", "done", "taken"), [(500, 0, 16), (10, 8, 2)])
def test_online_prefill_gets_what_the_reservation_does_not_use(tokens: int, done: int, taken: int):
    engine = Engine()
    online = engine.prefilling(ONLINE, tokens=500)
    offline = engine.prefilling(OFFLINE, tokens=tokens, done=done)

    assert dict(engine.plan().grants) == {online: 64 - taken, offline: taken}


def test_an_online_request_that_waits_for_prefill_tokens_keeps_its_slot():
    engine = Engine()
    engine.prefilling(ONLINE, tokens=500)
    second = engine.prefilling(ONLINE, tokens=500)

    decided = engine.plan()

    assert second not in dict(decided.grants)
    assert not decided.park
    assert why(decided, second) is Reason.CHUNK_SPENT


def test_a_higher_priority_takes_the_slot_of_the_lowest_and_its_kv_stays():
    engine = Engine(slots=2, offline_share=0.0)
    low, high = engine.decoding(ONLINE, priority=-1), engine.decoding(ONLINE)
    newcomer = engine.add(ONLINE, 5, priority=3)
    peer = engine.add(ONLINE, 5)

    decided = engine.plan()

    assert decided.park == (low,)
    assert why(decided, low) is Reason.PRIORITY
    assert dict(decided.grants) == {high: 1, newcomer: 5}
    assert why(decided, peer) is Reason.NO_SLOT


def test_a_parked_request_is_resumed_before_an_equal_one_is_admitted():
    engine = Engine(slots=2, offline_share=0.0)
    engine.decoding(ONLINE)
    parked = engine.decoding(OFFLINE, phase=Phase.PARKED)
    engine.add(OFFLINE, 5)

    decided = engine.plan()

    assert decided.resume == (parked,)
    assert not decided.admit


def test_a_less_served_tenant_is_admitted_before_a_parked_one_of_another_goes_on():
    engine = Engine(slots=2, offline_share=0.0)
    engine.decoding(ONLINE)
    engine.decoding(OFFLINE, tenant="rich", phase=Phase.PARKED)
    poor = engine.add(OFFLINE, 5, tenant="poor")
    engine.ledgers[OFFLINE].charge("rich", 100)

    assert engine.plan().admit == (poor,)


def test_offline_never_holds_more_slots_than_its_maximum():
    engine = Engine(offline_max_share=0.5)
    for _ in range(8):
        engine.add(OFFLINE, 4)

    assert len(engine.plan().admit) == 4


def test_a_single_token_is_admitted_where_the_chunk_is_spent():
    engine = Engine()
    long = engine.prefilling(ONLINE, tokens=500)
    short = engine.add(ONLINE, 1)
    engine.add(OFFLINE, 1)

    granted = dict(engine.plan().grants)

    assert (granted[long], granted[short]) == (64, 1)


def test_offline_holds_its_reservation_however_heavy_online_is():
    """Ten times as much online as there are slots, for as long as it lasts."""
    config = PolicyConfig(slots=10, num_blocks=600, block_tokens=4, offline_share=0.2, tail_tokens=16)
    flood = [Arrival(0.002 * i, ONLINE, 20, 30, ttft=0.1, tpot=0.02) for i in range(100)]
    jobs = [Arrival(0.1, OFFLINE, 12, 8) for _ in range(60)]
    held = []

    def watched(snapshot: EngineSnapshot) -> StepPlan:
        decided = plan(snapshot)
        if {request.request_class for request in snapshot.waiting} == {ONLINE, OFFLINE}:
            held.append(sum(request.request_class is OFFLINE for request, _ in decided.grants))
        return decided

    FakeEngine(Host(config, cost=EXACT, planner=watched), flood + jobs).run(max_steps=5000)

    reached = held.index(2)
    assert reached <= 30
    assert len(held) > 100
    assert set(held[reached:]) == {2}


def test_a_step_does_at_most_the_predicted_work():
    engine = Engine()
    engine.decoding(ONLINE, tokens=50)
    engine.prefilling(OFFLINE, tokens=20, done=4)

    expected = EXACT.predict(StepWork(16, 16 * (4 + 8.5), 1, 50))

    assert engine.plan().predicted_seconds == pytest.approx(expected)


def test_online_prefill_leaves_the_time_of_the_reservation_within_the_pace_of_the_decodes():
    engine = Engine(slots=16, chunk_tokens=1000, ttft=1.0, tpot=0.02)
    engine.decoding(ONLINE, ttft=1.0, tpot=0.02, num_output=50, first_token=engine.now - 50 * 0.02)
    reserved = [engine.decoding(OFFLINE) for _ in range(4)]
    prompt = engine.add(ONLINE, 900, ttft=1.0, tpot=0.02)

    decided = engine.plan()
    tokens = dict(decided.grants)

    assert all(tokens[request] == 1 for request in reserved)
    assert 0 < tokens[prompt] < 900
    assert decided.predicted_seconds == pytest.approx(0.02, abs=1e-4)


def test_a_prompt_that_is_late_at_the_pace_of_the_decodes_is_deferred():
    engine = Engine(slots=64, chunk_tokens=1000, ttft=1.0, tpot=0.02)
    for _ in range(20):
        engine.decoding(ONLINE, ttft=1.0, tpot=0.02, num_output=50, first_token=engine.now - 50 * 0.02)
    long = engine.add(ONLINE, 4000, ttft=0.45, tpot=0.02)
    short = engine.add(ONLINE, 400, ttft=0.45, tpot=0.02)

    tokens = dict(engine.plan().grants)

    assert tokens[short] > tokens.get(long, 0), "prefill alone would be in time, and has half of each step"


def test_parked_requests_with_the_least_work_make_room_where_the_batch_keeps_them():
    engine = Engine(slots=3, most_residents=3, offline_share=0.0)
    online = engine.decoding(ONLINE, tokens=6, phase=Phase.PARKED)
    short = engine.decoding(OFFLINE, tokens=10, phase=Phase.PARKED)
    long = engine.decoding(OFFLINE, tokens=90)
    newcomers = [engine.add(ONLINE, 8), engine.add(ONLINE, 8)]

    plan = engine.plan()

    assert (set(plan.admit), set(plan.resume)) == (set(newcomers), {online})
    assert (set(plan.preempt), plan.park) == ({short, long}, ())
    assert why(plan, short) == Reason.NO_SLOT


def test_the_last_newcomers_wait_for_the_rows_of_leaving_requests_instead_of_those_of_parked_ones():
    engine = Engine(slots=5, most_residents=5, offline_share=0.0)
    engine.decoding(ONLINE)
    parked = [engine.decoding(OFFLINE, tokens=tokens, phase=Phase.PARKED) for tokens in (30, 20, 10)]
    first, second = engine.add(ONLINE, 8), engine.add(ONLINE, 8)
    engine.extra = {"num_leaving": 1}

    plan = engine.plan()

    assert (plan.admit, plan.preempt) == ((first,), (parked[2],))
    assert why(plan, second) == Reason.NO_SLOT


def test_a_newcomer_takes_no_row_of_a_parked_request_of_its_class_and_priority():
    engine = Engine(slots=2, most_residents=2, offline_share=0.0, tenants={"a": TenantShare(max_slots=0)})
    parked = [engine.decoding(OFFLINE, phase=Phase.PARKED, tenant="a", priority=priority) for priority in (0, 1)]
    newcomer = engine.add(OFFLINE, 8, tenant="b", priority=0)

    plan = engine.plan()
    assert (plan.admit, plan.preempt, why(plan, newcomer)) == ((), (), Reason.NO_SLOT)

    newcomer.priority = 1
    plan = engine.plan()
    assert (plan.admit, plan.preempt) == ((newcomer,), (parked[0],))


def test_the_reservation_leaves_the_rows_of_leaving_requests():
    engine = Engine(slots=4, most_residents=4, offline_share=0.5)
    engine.decoding(ONLINE)
    engine.decoding(ONLINE)
    items = [engine.add(OFFLINE, 8), engine.add(OFFLINE, 8)]
    engine.extra = {"num_leaving": 1}

    assert engine.plan().admit == (items[0],)


def test_the_slot_above_a_lowered_cap_goes_to_online_in_the_same_step():
    engine = Engine(slots=3, num_blocks=32, offline_share=0.5, tenants={"a": TenantShare(max_slots=1)})
    held = [engine.decoding(OFFLINE, tenant="a") for _ in range(2)]
    burst = [engine.add(ONLINE, 1) for _ in range(2)]

    decided = engine.plan()

    assert decided.admit == tuple(burst)
    assert [(request, why(decided, request)) for request in decided.preempt] == [(held[1], Reason.TENANT_CAP)]
