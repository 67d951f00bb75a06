"""The predicted peak of KV, held against a replay of what it predicts, and what an engine comes to expect."""

from __future__ import annotations

from dataclasses import replace
from math import exp, inf

import pytest
from fake_engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st
from workloads import Arrival, make_snapshot

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import (
    NUM_BURSTS,
    NUM_LENGTHS,
    REFRESH,
    UNKNOWN,
    UNKNOWN_SHARE,
    Expectation,
    ExpectationLearner,
)
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.kv_peak import KvPeak
from ballast_policy.step.online import serve_online
from ballast_policy.step.planner import plan
from ballast_policy.step.reserved import Reserved

COST = CostModel(0.001, 1e-5, 0, 1e-5, 0, is_trusted=True)


def make_request(seq: int = 0, request_class: RequestClass = OFFLINE, **fields) -> Request:
    usual = {"arrival": 0.0, "num_prompt": 16, "max_output": 100, "num_tokens": 16}
    return Request(seq, request_class, **{**usual, **fields})


def make_resident(seq: int, num_blocks: int, left: int, block_tokens: int = 1) -> Request:
    """Build one that decodes and will generate exactly `left` tokens more, where lengths are unknown."""
    tokens = num_blocks * block_tokens
    return make_request(
        seq,
        num_tokens=tokens,
        num_computed=tokens,
        num_blocks=num_blocks,
        num_private_blocks=num_blocks,
        max_output=left,
        phase=Phase.RUNNING,
    )


ends = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=8)


@given(ends, st.integers(1, 9), st.integers(0, 12))
def test_the_peak_is_what_a_replay_of_the_growth_needs(residents, num_blocks, left):
    peak = KvPeak(UNKNOWN, 1, unknown=1000)
    for seq, (held, growth) in enumerate(residents):
        peak.add(make_resident(seq, held, growth), held)
    newcomer = make_request(99, num_tokens=num_blocks, max_output=left)
    found = peak.missing(newcomer, num_blocks, free=0)

    everyone = [*residents, (num_blocks, left)]
    used = [
        sum(held + min(after, left) for held, left in everyone if left >= after)
        for after in range(max(left for _, left in everyone) + 1)
    ]
    most = max(0, *(blocks - sum(held for held, _ in everyone) for blocks in used))
    assert found == most
    for free in (most - 1, most, most + 3, 10 * most):
        quick = peak.missing(newcomer, num_blocks, free)
        assert (quick <= free) is (most <= free), "the quick answer is another"
        assert quick >= most, "the quick answer is no upper bound"


@pytest.mark.parametrize(("tokens", "output", "expected"), [(8, 3, 1), (8, 4, 1), (8, 5, 2), (7, 1, 0), (6, 3, 1)])
def test_an_answer_begins_whole_blocks(tokens: int, output: int, expected: int):
    request = make_request(num_prompt=tokens, num_tokens=tokens, max_output=output)

    assert KvPeak(UNKNOWN, 4, unknown=1000).missing(request, 0, free=0) == expected


def test_a_resident_without_a_promise_frees_the_blocks_that_it_holds():
    short, long = make_resident(0, 10, 1), make_request(1, num_prompt=20, num_tokens=20, max_output=20)
    config = PolicyConfig(slots=4, num_blocks=100, block_tokens=1, tail_tokens=1000)
    step = StepDraft(make_state(config, [short], 90, UNKNOWN))

    assert step.kv_peak([short]).missing(long, 0, free=0) == 20 - 10
    step.blocks.promised[short] = 4
    assert step.kv_peak([short]).missing(long, 0, free=0) == 20 - 14


def test_promised_blocks_come_free_with_the_rest():
    resident = make_request(0, num_tokens=40, num_computed=10, num_blocks=10, num_private_blocks=10, max_output=2)
    peak = KvPeak(UNKNOWN, 1, unknown=1000)
    peak.add(resident, 10 + 30)

    assert peak.missing(make_request(1, max_output=10), 16, free=0) == max(2 * 2, 10 - 40)


@pytest.mark.parametrize(
    ("generated", "most", "expected"),
    [
        pytest.param(0, 1000, 40, id="a newcomer"),
        pytest.param(50, 1000, 20, id="those longer than it is already"),
        pytest.param(100, 1000, 40, id="longer than all that ended"),
        pytest.param(50, 60, 10, id="no more than it may"),
    ],
)
def test_what_remains_is_taken_from_answers_that_were_longer(generated, most, expected):
    expectation = Expectation({OFFLINE: (10, 20, 30, 40, 50, 60, 70, 80, 90, 100)})

    assert expectation.remaining(make_request(max_output=most, num_output=generated), 64) == expected


def test_online_is_expected_to_last_longer_than_offline():
    expectation = Expectation({ONLINE: tuple(range(1, 101)), OFFLINE: tuple(range(1, 101))})

    assert expectation.remaining(make_request(request_class=ONLINE), 0) > expectation.remaining(make_request(), 0)


lengths = st.lists(st.integers(1, 500), min_size=1, max_size=40).map(lambda drawn: tuple(sorted(drawn)))


@given(lengths, st.integers(0, 600), st.integers(0, 600))
def test_what_remains_is_never_more_than_allowed_nor_negative(seen, generated, left):
    request = make_request(num_output=generated, max_output=generated + left)

    assert 0 <= Expectation({OFFLINE: seen}).remaining(request, 64) <= left


@pytest.mark.parametrize(
    ("generated", "most", "expected"),
    [
        pytest.param(0, 500, 3, id="2 of 100 are shorter"),
        pytest.param(50, 500, 52, id="of the 50 that got this far, 1 ends at once"),
        pytest.param(50, 51, 51, id="no answer is longer than its max_tokens"),
        pytest.param(99, 500, 100, id="the longest"),
        pytest.param(100, 500, 100, id="longer than all"),
    ],
)
def test_98_of_100_online_answers_surely_reach_a_length(generated: int, most: int, expected: int):
    request = make_request(request_class=ONLINE, max_output=most, num_output=generated)

    assert Expectation({ONLINE: tuple(range(1, 101))}).surely_reached(request) == expected
    assert Expectation().surely_reached(request) == generated, "without lengths, only what is there is sure"


def test_lengths_are_known_once_some_answers_have_ended():
    learner = ExpectationLearner()
    request = make_request(max_output=400)
    assert learner.expectation.remaining(request, 64) == UNKNOWN_SHARE * 400
    for _ in range(REFRESH):
        learner.finished(make_request(num_output=7))

    assert learner.expectation.remaining(request, 64) == 7
    assert learner.expectation.remaining(make_request(request_class=ONLINE), 64) == 64, "a class learns for itself"
    assert learner.expectation.online_answer == 0


def test_the_lengths_are_updated_with_each_16_answers():
    learner = ExpectationLearner()
    for number in range(2 * REFRESH):
        assert learner.expectation.outputs == ({OFFLINE: (7,) * REFRESH} if number >= REFRESH else {})
        learner.finished(make_request(num_output=7 if number < REFRESH else 9))

    assert learner.expectation.outputs == {OFFLINE: (7,) * REFRESH + (9,) * REFRESH}


def test_old_answers_are_forgotten():
    learner = ExpectationLearner()
    for length in [5] * NUM_LENGTHS + [300] * NUM_LENGTHS:
        learner.finished(make_request(num_output=length))

    assert learner.expectation.outputs[OFFLINE] == (300,) * NUM_LENGTHS


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        pytest.param([500] * 20, 0.0, id="steady"),
        pytest.param([500] * 10 + [8000] * 10, 7500 / (2 * 19) ** 0.5, id="a new phase counts once, as a change"),
        pytest.param([0, 1000] * 10, 500.0, id="bursts count around their mean"),
        pytest.param([500, 500, 1500, 1500] * 5, 500.0, id="of changes that are noise as well"),
        pytest.param([500] * 4 + ([1500] * 4 + [500] * 4) * 2, 1000 * (4 / 38) ** 0.5, id="phases of four"),
        pytest.param([0, 1000] * 10 + [500] * NUM_BURSTS, 0.0, id="old bursts are forgotten"),
    ],
)
def test_the_spread_of_online_prompts_is_that_of_bursts(tokens: list[int], expected: float):
    learner = ExpectationLearner()

    for second, number in enumerate([*tokens, 0]):
        for part in (0.0, 0.5):  # two requests are one burst
            learner.arrived(make_request(request_class=ONLINE, num_tokens=number // 2), 1.01 * second + part)

    assert learner.expectation.online_spread == pytest.approx(expected)


def test_seconds_without_arrivals_are_bursts_without_tokens():
    learner = ExpectationLearner()
    learner.arrived(make_request(request_class=ONLINE, num_tokens=1000), 100.0)
    learner.arrived(make_request(request_class=ONLINE, num_tokens=1), 104.5)

    assert learner.expectation.online_spread == pytest.approx(400.0), "of 0, 1000, 0, 0, 0"


def test_an_arrival_counts_for_the_rate_of_about_five_seconds():
    learner, rates = ExpectationLearner(), []
    for now in (100.0, 105.0):
        learner.arrived(make_request(request_class=ONLINE), now)
        rates.append(learner.expectation.online_rate)

    assert rates == pytest.approx([1 / 5, (1 + exp(-1)) / 5])


def test_offline_does_not_count_as_a_burst():
    learner = ExpectationLearner()
    for second in range(10):
        learner.arrived(make_request(num_tokens=9000), second * 1.01)

    learner.arrived(make_request(request_class=ONLINE, num_tokens=1), 20.0)
    learner.arrived(make_request(request_class=ONLINE, num_tokens=1), 22.0)
    assert learner.expectation.online_spread < 1


def look(free: int, expectation: Expectation, *, has_online: bool = False, watermark: float = 0.0) -> EngineSnapshot:
    """Ten residents of 10 blocks each that have generated nothing yet, and one of 10 blocks that waits."""
    residents = [make_resident(seq, 10, 100) for seq in range(10)]
    for resident in residents:
        resident.num_tokens += 1
    if has_online:
        residents[0].request_class = ONLINE
    config = PolicyConfig(slots=20, num_blocks=100 + free, block_tokens=1, offline_share=0.0, watermark=watermark)
    return make_state(config, [*residents, make_request(20, num_tokens=10)], free, expectation)


def make_state(config: PolicyConfig, requests: list[Request], free: int, expectation: Expectation) -> EngineSnapshot:
    snapshot = make_snapshot(Host(config, cost=COST), requests, now=0.0, free_blocks=free)
    return replace(snapshot, expectation=expectation)


def is_admitted(snapshot: EngineSnapshot) -> bool:
    decided = plan(snapshot)
    assert decided.admit or any(because.reason is Reason.NO_KV for because in decided.because)
    return bool(decided.admit)


@pytest.mark.parametrize(("free", "is_in"), [(10 + 10 + 11 * 5, True), (10 + 10 + 11 * 5 - 1, False)])
def test_a_newcomer_is_admitted_if_the_peak_of_all_requests_fits(free, is_in):
    assert is_admitted(look(free, Expectation({OFFLINE: (5,)}))) is is_in


def test_a_watermark_is_left_to_online():
    expectation = Expectation({ONLINE: (5,), OFFLINE: (5,)})

    assert is_admitted(look(200, expectation, watermark=0.3))
    assert is_admitted(look(110, expectation, watermark=0.3))
    assert not is_admitted(look(110, expectation, watermark=0.3, has_online=True))


def online_of(free: int, expectation: Expectation, lent: int = 0, priority: int = 0) -> EngineSnapshot:
    """Ten online residents of 10 blocks each, one offline resident of `lent`, and an online newcomer of 10 blocks."""
    residents = [make_resident(seq, 10, 100) for seq in range(10)]
    for resident in residents:
        resident.num_tokens += 1
        resident.request_class = ONLINE
    if lent:
        residents.append(make_resident(11, lent, 100))
        residents[-1].num_tokens += 1
    newcomer = make_request(20, ONLINE, num_tokens=10, priority=priority)
    config = PolicyConfig(slots=20, num_blocks=100 + lent + free, block_tokens=1, offline_share=0.0)
    return make_state(config, [*residents, newcomer], free, expectation)


FIVE_EACH = 10 + 10 + 11 * 5
"""Blocks for the first token of the residents, the newcomer, and what everybody will generate."""


@pytest.mark.parametrize(
    ("free", "fields", "is_in"),
    [
        pytest.param(FIVE_EACH, {}, True, id="the peak fits"),
        pytest.param(FIVE_EACH - 1, {}, False, id="one block is missing at the peak"),
        pytest.param(FIVE_EACH - 20, {"lent": 30}, True, id="lent blocks will be taken back when they are needed"),
        pytest.param(FIVE_EACH - 20, {"lent": 20}, True, id="just enough blocks are lent"),
        pytest.param(FIVE_EACH - 20, {"lent": 19}, False, id="too few blocks are lent"),
        pytest.param(FIVE_EACH - 20, {"priority": 1}, True, id="lower priorities will yield"),
    ],
)
def test_an_online_newcomer_gets_in_if_online_fits_at_its_peak(free, fields, is_in):
    assert is_admitted(online_of(free, Expectation({ONLINE: (5,)}), **fields)) is is_in


@pytest.mark.parametrize(("free", "is_in"), [(10 + 11 * 5 + 3, True), (10 + 11 * 5 + 2, False)])
def test_the_peak_of_online_leaves_the_blocks_held_for_the_reservation(free: int, is_in: bool):
    step = StepDraft(online_of(free, Expectation({ONLINE: (5,)})))
    serve_online(step, Reserved(held_blocks=3))

    assert bool(step.draft.admit) is is_in


@pytest.mark.parametrize(("free", "is_in"), [(100 + 1 + 2 * 5, True), (100 + 1 + 2 * 5 - 1, False)])
def test_the_peak_of_online_leaves_the_blocks_of_prompts_that_are_not_computed_yet(free: int, is_in: bool):
    prompt = make_request(0, ONLINE, num_tokens=100, phase=Phase.RUNNING)
    config = PolicyConfig(slots=20, num_blocks=1000, block_tokens=1, chunk_tokens=64, offline_share=0.0)
    newcomer = make_request(1, ONLINE, num_tokens=1)

    assert is_admitted(make_state(config, [prompt, newcomer], free, Expectation({ONLINE: (5,)}))) is is_in


def test_a_newcomer_that_ends_soon_leaves_its_blocks_to_the_next_one():
    """After one token the first newcomer frees its 20 blocks. The two others grow by ten tokens each."""
    resident = make_resident(0, 10, 100)
    resident.request_class, resident.num_tokens = ONLINE, 11
    newcomers = [make_request(1, ONLINE, num_tokens=20, max_output=1), make_request(2, ONLINE, num_tokens=5)]
    config = PolicyConfig(slots=20, num_blocks=1000, block_tokens=1, chunk_tokens=512, offline_share=0.0)
    state = make_state(config, [resident, *newcomers], 1 + 20 + 5 + 3, Expectation({ONLINE: (10,)}))

    assert plan(state).admit == tuple(newcomers)


def test_while_lengths_are_unknown_online_gets_in_where_its_prompt_fits():
    assert is_admitted(online_of(30, UNKNOWN))


def test_no_request_is_preempted_if_lengths_are_as_expected():
    """Growth is what was predicted, so nothing is computed twice."""
    config = PolicyConfig(slots=30, num_blocks=160, block_tokens=1, offline_share=0.0)
    host = Host(config, cost=COST)
    host.expectations.expectation = Expectation({OFFLINE: (30,)})
    engine = FakeEngine(host, [Arrival(0.0, OFFLINE, 1 + seq * 7 % 13, 30) for seq in range(60)])
    held = 0
    while engine.has_work:
        dispatch = engine.begin()
        assert not dispatch.plan.preempt
        held = max(held, config.num_blocks - engine.kv.num_free)
        engine.compute(dispatch)
    assert held > 0.9 * config.num_blocks


def test_online_is_expected_for_ten_mean_gaps_of_the_last_minutes():
    learner = ExpectationLearner()
    learner.arrived(make_request(), 1000.0)
    assert learner.expectation.online_until == -inf, "offline requests do not count"

    learner.arrived(make_request(request_class=ONLINE), 1000.0)
    assert learner.expectation.online_until == 1010.0

    learner.arrived(make_request(request_class=ONLINE), 1000.5)
    assert learner.expectation.online_until == pytest.approx(1000.5 + 10 / 2, abs=0.02), "two requests in a second"

    for second in range(300):
        learner.arrived(make_request(request_class=ONLINE), 1000.0 + second // 2)
    assert learner.expectation.online_until == pytest.approx(1149.0 + 10 / 2.0, abs=0.3)

    learner.arrived(make_request(request_class=ONLINE), 1149.0 + 600.0)
    assert learner.expectation.online_until > 1749.0 + 1000.0


@pytest.mark.parametrize("silence", [0.0, 100.0])
def test_the_rate_of_online_requests_is_that_of_the_last_seconds(silence: float):
    learner = ExpectationLearner()
    learner.arrived(make_request(request_class=ONLINE), 0.0)
    for number in range(120):
        learner.arrived(make_request(request_class=ONLINE), silence + number / 12)

    assert learner.expectation.online_rate == pytest.approx(12.0, rel=0.15)


def test_the_first_online_prompt_is_the_usual_one_and_later_prompts_change_it_slowly():
    learner = ExpectationLearner()
    for request_class, tokens in ((OFFLINE, 9000), (ONLINE, 400), (ONLINE, 500)):
        learner.admitted(make_request(request_class=request_class), tokens)

    assert learner.typical_prompt == pytest.approx(400 + 0.1 * 100)


def test_the_mean_online_answer_is_published_once_some_have_ended():
    learner = ExpectationLearner()
    for length in [10] * 8 + [30] * 8:
        learner.finished(make_request(request_class=ONLINE, num_output=length))

    assert learner.expectation.online_answer == 20.0


@pytest.mark.parametrize(("number", "short"), [(16, 1), (96, 1), (112, 2), (208, 3)])
def test_all_online_answers_but_one_percent_are_longer_than_the_short_one(number: int, short: int):
    learner = ExpectationLearner()
    for length in range(1, number + 1):
        learner.finished(make_request(request_class=ONLINE, num_output=length))

    assert learner.expectation.online_short == short
