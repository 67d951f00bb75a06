"""How the planner shares KV blocks between online and offline, one situation at a time."""

from __future__ import annotations

import pytest
from engine_snapshot import Engine, why

from ballast_policy.learning.expectation import Expectation
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, Phase


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


def test_online_answers_that_grow_wait_a_step_for_a_prefix_that_offline_requests_share():
    """Neither of them frees it alone. No online answer is preempted meanwhile."""
    engine = Engine(num_blocks=80, offline_share=0.1)
    answers = [engine.decoding(ONLINE, tokens=17) for _ in range(4)]
    tied = [engine.decoding(OFFLINE, tokens=160, num_private_blocks=1, prefix_key=1) for _ in range(2)]
    engine.extra["free_blocks"] = 0

    decided = engine.plan()

    assert decided.preempt == (tied[1],)
    assert decided.park == tuple(answers[1:])


@pytest.mark.parametrize("num_private_lower", [1, 10])
def test_a_prefix_that_offline_requests_share_spares_online_answers_of_a_lower_priority(num_private_lower: int):
    """Even if theirs would free the blocks in this step."""
    engine = Engine(num_blocks=120, offline_share=0.1)
    tied = [engine.decoding(OFFLINE, tokens=163, num_private_blocks=1, prefix_key=1) for _ in range(2)]
    for _ in range(2):
        engine.decoding(ONLINE, tokens=43, num_private_blocks=num_private_lower, priority=-1)
    newcomer = engine.add(ONLINE, 150)
    engine.extra["free_blocks"] = 21

    decided = engine.plan()

    assert decided.preempt == (tied[1],)
    assert why(decided, newcomer) is Reason.NO_KV


def test_two_prefixes_that_may_begin_alike_are_not_counted_twice():
    """Together they free one prefix of 40 blocks, so no preemption helps."""
    engine = Engine(num_blocks=120, offline_share=0.05)
    for key in (1, 2, 1, 2):
        engine.decoding(OFFLINE, tokens=163, num_private_blocks=1, prefix_key=key)
    engine.add(ONLINE, 4 * 70)
    engine.extra["free_blocks"] = 5

    assert not engine.plan().preempt


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
    """Two offline requests share their only block with the answer, so their preemption frees nothing."""
    engine = Engine(num_blocks=20, offline_share=0.5)
    answer = engine.decoding(ONLINE, tokens=37, num_private_blocks=8)
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


@pytest.mark.parametrize(
    ("online", "offline", "newcomer"),
    [
        pytest.param(88, 64, 120, id="giving it up would not suffice"),
        pytest.param(100, 40, 40, id="the reservation covers it"),
    ],
)
def test_offline_keeps_its_kv_beside_a_newcomer(online: int, offline: int, newcomer: int):
    engine = Engine(num_blocks=40)
    engine.decoding(ONLINE, tokens=online)
    item = engine.decoding(OFFLINE, tokens=offline)
    waiting = engine.add(ONLINE, newcomer)

    decided = engine.plan()

    assert not decided.preempt
    assert item in dict(decided.grants)
    assert why(decided, waiting) is Reason.NO_KV


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


@pytest.mark.parametrize(("tail", "is_inside"), [(0, True), (8, False)])
def test_a_new_item_is_within_the_reservation_with_the_blocks_of_its_answer(tail: int, is_inside: bool):
    """Ten blocks are reserved, five are held, and the item needs four for its prompt."""
    engine = Engine(num_blocks=40, slots=16, tail_tokens=tail)
    engine.decoding(OFFLINE, tokens=21)
    item = engine.add(OFFLINE, 16)

    reason = why(engine.plan(), item)

    assert (reason is Reason.OFFLINE_RESERVATION) is is_inside


def test_kv_that_offline_gives_up_does_not_count_against_its_reservation():
    engine = Engine(num_blocks=40)
    for _ in range(4):
        engine.decoding(ONLINE, tokens=17)  # the next token begins a block
    large, small = engine.decoding(OFFLINE, tokens=96), engine.add(OFFLINE, 16)
    decided = engine.plan()

    assert large in decided.preempt
    assert why(decided, small) is Reason.OFFLINE_RESERVATION
