"""What the planner does, one situation at a time."""

from __future__ import annotations

import pytest
from engine_snapshot import OFFLINE, ONLINE, Engine, why
from fake_engine import FakeEngine
from workloads import EXACT, Arrival

from ballast_policy.host import Host
from ballast_policy.learning.cost import StepWork
from ballast_policy.learning.expectation import Expectation
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import Phase
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


def test_short_kv_comes_from_offline_beyond_its_reservation_and_the_least_work_is_lost():
    engine = Engine(num_blocks=40, offline_share=0.1)
    kept = engine.decoding(OFFLINE, tokens=16)
    cheap = engine.decoding(OFFLINE, tokens=32)
    engine.decoding(OFFLINE, tokens=80)
    newcomer = engine.add(ONLINE, 40)

    decided = engine.plan()

    assert decided.preempt == (cheap,)
    assert why(decided, cheap) is Reason.KV_RECLAIMED
    assert newcomer in decided.admit
    assert kept in dict(decided.grants)


def test_the_first_request_of_the_reservation_needs_no_blocks_for_its_answer():
    engine = Engine(slots=2, num_blocks=20, offline_share=0.5, tail_tokens=64)
    item = engine.add(OFFLINE, 40)
    for _ in range(2):
        engine.add(ONLINE, 20)

    decided = engine.plan()

    assert why(decided, item) is Reason.OFFLINE_RESERVATION


def test_the_only_answer_is_parked_until_a_request_that_leaves_frees_its_blocks():
    engine = Engine(num_blocks=20, most_residents=8)
    answer = engine.decoding(ONLINE, tokens=37)
    engine.extra |= {"free_blocks": 0, "num_leaving": 1}

    decided = engine.plan()

    assert decided.park == (answer,)
    assert why(decided, answer) is Reason.NO_KV


def test_the_only_online_answer_grows_even_if_just_the_reservation_has_blocks():
    """Two offline requests share their only block, so the preemption of either frees nothing."""
    engine = Engine(num_blocks=20, offline_share=0.5)
    answer = engine.decoding(ONLINE, tokens=37)
    item = engine.decoding(OFFLINE, tokens=41)
    for _ in range(2):
        engine.decoding(OFFLINE, tokens=5, num_private_blocks=0)
    engine.extra["free_blocks"] = 0

    decided = engine.plan()

    assert answer in dict(decided.grants)
    assert item in decided.preempt


def test_a_newcomer_that_finds_its_blocks_beside_a_shared_prefix_preempts_nothing():
    engine = Engine(num_blocks=40, offline_share=0.0)
    item = engine.decoding(OFFLINE, tokens=40)
    newcomer = engine.add(ONLINE, 40, num_cached=20)
    engine.extra["free_blocks"] = 5

    decided = engine.plan()

    assert newcomer in decided.admit
    assert item not in decided.preempt


def test_an_online_prompt_that_goes_on_takes_the_kv_that_offline_borrows():
    engine = Engine(num_blocks=20, offline_share=0.0)
    prompt = engine.prefilling(ONLINE, tokens=40, done=8)
    item = engine.decoding(OFFLINE, tokens=72)

    decided = engine.plan()

    assert decided.preempt == (item,)
    assert decided.grants == ((prompt, 32),)


def test_offline_keeps_its_kv_where_giving_it_up_would_not_suffice():
    engine = Engine(num_blocks=40)
    engine.decoding(ONLINE, tokens=88)
    item = engine.decoding(OFFLINE, tokens=64)
    newcomer = engine.add(ONLINE, 120)

    decided = engine.plan()

    assert not decided.preempt
    assert item in dict(decided.grants)
    assert why(decided, newcomer) is Reason.NO_KV


def test_the_kv_reservation_is_not_evicted_for_a_newcomer():
    engine = Engine(num_blocks=40)
    engine.decoding(ONLINE, tokens=100)
    item = engine.decoding(OFFLINE, tokens=40)
    newcomer = engine.add(ONLINE, 40)

    decided = engine.plan()

    assert not decided.preempt
    assert item in dict(decided.grants)
    assert why(decided, newcomer) is Reason.NO_KV


def test_an_online_request_that_fits_nowhere_beside_the_reservation_is_served_all_the_same():
    engine = Engine(num_blocks=40)
    engine.decoding(OFFLINE, tokens=40)
    newcomer = engine.add(ONLINE, 150)

    assert newcomer in engine.plan().admit


def test_growing_online_preempts_the_last_online_request_when_nothing_is_lent():
    engine = Engine(num_blocks=20, offline_share=0.0)
    first = engine.decoding(ONLINE, tokens=41)
    last = engine.decoding(ONLINE, tokens=41)

    decided = engine.plan()

    assert decided.preempt == (last,)
    assert decided.grants == ((first, 1),)


def test_prefill_is_shared_between_online_and_the_reservation():
    engine = Engine()
    online = engine.prefilling(ONLINE, tokens=500)
    offline = engine.prefilling(OFFLINE, tokens=500)

    assert dict(engine.plan().grants) == {online: 48, offline: 16}


def test_unused_reserved_prefill_goes_to_online():
    engine = Engine()
    online = engine.prefilling(ONLINE, tokens=500)
    offline = engine.prefilling(OFFLINE, tokens=10, done=8)

    assert dict(engine.plan().grants) == {online: 62, offline: 2}


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


def test_a_tenant_at_its_cap_leaves_the_slot_to_the_next():
    engine = Engine(offline_share=0.0, tenants={"capped": TenantShare(max_slots=1)})
    engine.decoding(OFFLINE, tenant="capped")
    second = engine.add(OFFLINE, 5, tenant="capped")
    other = engine.add(OFFLINE, 5, tenant="other")

    decided = engine.plan()

    assert decided.admit == (other,)
    assert why(decided, second) is Reason.TENANT_CAP


def test_a_lowered_cap_parks_the_last_of_the_tenant():
    engine = Engine(tenants={"capped": TenantShare(max_slots=1)})
    first, second = engine.decoding(OFFLINE, tenant="capped"), engine.decoding(OFFLINE, tenant="capped")

    decided = engine.plan()

    assert decided.park == (second,)
    assert dict(decided.grants) == {first: 1}


def test_offline_never_holds_more_slots_than_its_maximum():
    engine = Engine(offline_max_share=0.5)
    for _ in range(8):
        engine.add(OFFLINE, 4)

    assert len(engine.plan().admit) == 4


def test_a_large_item_does_not_keep_others_from_filling_the_reservation():
    engine = Engine(num_blocks=40, offline_share=0.25)
    engine.decoding(ONLINE, tokens=100)
    large = engine.add(OFFLINE, 80)
    small = engine.add(OFFLINE, 12)

    decided = engine.plan()

    assert decided.admit == (small,)
    assert why(decided, large) is Reason.NO_KV


def test_an_item_that_waits_for_free_blocks_of_the_reservation_is_not_overtaken():
    engine = Engine(num_blocks=40, offline_share=0.5)
    for _ in range(2):
        engine.decoding(ONLINE, tokens=70)
    first = engine.add(OFFLINE, 20)
    small = engine.add(OFFLINE, 4)

    decided = engine.plan()

    assert not decided.admit
    assert why(decided, first) is Reason.NO_KV
    assert small not in dict(decided.grants)


def test_offline_is_admitted_only_with_blocks_for_the_whole_prompt_and_some_to_grow():
    engine = Engine(num_blocks=40, offline_share=0.0, tail_tokens=16)
    engine.decoding(OFFLINE, tokens=80)
    tight = engine.add(OFFLINE, 60)

    assert why(engine.plan(), tight) is Reason.NO_KV

    engine.waiting.clear()
    fits = engine.add(OFFLINE, 44)

    assert engine.plan().admit == (fits,)


def test_lent_admissions_leave_a_watermark_for_online_only_while_online_is_expected():
    engine = Engine(num_blocks=40, offline_share=0.0, watermark=0.5)
    engine.decoding(OFFLINE, tokens=30)
    item = engine.add(OFFLINE, 60)

    assert item in engine.plan().admit

    engine.extra["expectation"] = Expectation(online_until=engine.now + 1)

    assert item not in engine.plan().admit


def test_cached_blocks_that_a_preemption_may_free_are_not_counted_twice():
    """The newcomer shares its prefix with the victim: what it takes over is not free for others."""
    engine = Engine(num_blocks=20, offline_share=0.0)
    engine.decoding(OFFLINE, tokens=41)
    engine.decoding(ONLINE, tokens=33)
    newcomer = engine.add(ONLINE, 47, num_cached=40, num_cached_idle=0)

    decided = engine.plan()

    # 8 blocks stay with online, whose token takes one more; 12 cannot hold its 12 and the one to grow by.
    assert decided.preempt == ()
    assert why(decided, newcomer) is Reason.NO_KV


def test_a_parked_request_goes_on_where_the_one_before_it_waits_for_its_kv():
    """Found by the engine's chaos test: no request was resumed."""
    engine = Engine(num_blocks=14, offline_share=0.0)
    parked = engine.decoding(OFFLINE, tokens=33, phase=Phase.PARKED)
    first = engine.add(OFFLINE, 40, priority=1)

    decided = engine.plan()

    assert decided.resume == (parked,)
    assert why(decided, first) is Reason.NO_KV


def test_a_single_token_is_admitted_where_the_chunk_is_spent():
    engine = Engine()
    long = engine.prefilling(ONLINE, tokens=500)
    short = engine.add(ONLINE, 1)
    engine.add(OFFLINE, 1)

    granted = dict(engine.plan().grants)

    assert (granted[long], granted[short]) == (64, 1)


def test_blocks_shared_with_an_admitted_newcomer_are_not_freed_by_a_later_preemption():
    engine = Engine(num_blocks=20, offline_share=0.0)
    victim = engine.decoding(OFFLINE, tokens=41)
    sharing = engine.add(ONLINE, 42, num_cached=40, num_cached_idle=0)
    second = engine.add(ONLINE, 48)

    decided = engine.plan()

    assert decided.admit == (sharing,)
    assert victim not in decided.preempt
    assert why(decided, second) is Reason.NO_KV


def test_blocks_shared_with_a_newcomer_stay_taken_through_every_preemption_of_the_step():
    engine = Engine(num_blocks=60, offline_share=0.0, chunk_tokens=1000)
    engine.decoding(OFFLINE, tokens=41)
    large = engine.decoding(OFFLINE, tokens=97)
    fitting = [engine.add(ONLINE, 42, num_cached=40), engine.add(ONLINE, 120), engine.add(ONLINE, 60)]
    last = engine.add(ONLINE, 48)

    decided = engine.plan()

    assert large in decided.preempt
    assert decided.admit == tuple(fitting)
    assert why(decided, last) is Reason.NO_KV


def test_the_last_request_is_preempted_if_only_shared_blocks_are_held_and_no_request_continues():
    """No request alone would free a block, so no preemption suffices."""
    engine = Engine(num_blocks=30, offline_share=0.0)
    first, _, last = (engine.decoding(OFFLINE, tokens=41, num_private_blocks=0) for _ in range(3))
    engine.extra["free_blocks"] = 0

    decided = engine.plan()

    assert decided.preempt == (last,)
    assert why(decided, first) is Reason.NO_KV


def test_prefill_waits_for_blocks_that_a_higher_priority_gave_back():
    """What was promised to a prompt in the making is promised no more once it is preempted."""
    engine = Engine(slots=2, num_blocks=38, offline_share=0.0)
    low = engine.prefilling(ONLINE, tokens=120, done=4)
    high = engine.add(ONLINE, 32, priority=1)
    item = engine.add(OFFLINE, 4)

    decided = engine.plan()

    assert decided.preempt == (low,)
    assert decided.admit == (high, item)


def test_a_parked_online_request_goes_on_beside_blocks_held_for_the_reservation():
    engine = Engine(slots=2, num_blocks=12, offline_share=0.5)
    parked = [engine.decoding(ONLINE, tokens=tokens, phase=Phase.PARKED) for tokens in (10, 6, 6)]
    engine.add(OFFLINE, 21)

    decided = engine.plan()

    assert decided.resume == tuple(parked[:2])


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


@pytest.mark.parametrize(("tail", "is_inside"), [(0, True), (8, False)])
def test_a_new_item_is_within_the_reservation_with_the_blocks_of_its_answer(tail: int, is_inside: bool):
    """Ten blocks are reserved, five are held, and the item needs four for its prompt."""
    engine = Engine(num_blocks=40, slots=16, tail_tokens=tail)
    engine.decoding(OFFLINE, tokens=21)
    item = engine.add(OFFLINE, 16)

    reason = why(engine.plan(), item)

    assert (reason is Reason.OFFLINE_RESERVATION) is is_inside


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
    assert [(request, why(decided, request)) for request in decided.park] == [(held[1], Reason.TENANT_CAP)]


def test_kv_that_offline_gives_up_does_not_count_against_its_reservation():
    engine = Engine(num_blocks=40)
    for _ in range(4):
        engine.decoding(ONLINE, tokens=17)  # the next token begins a block
    large, small = engine.decoding(OFFLINE, tokens=96), engine.add(OFFLINE, 16)
    decided = engine.plan()

    assert large in decided.preempt
    assert why(decided, small) is Reason.OFFLINE_RESERVATION
