from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest

from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import Expectation
from ballast_policy.learning.interference import Allowance
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.budget import (
    SUSPENDED_SHARE,
    OnlineStep,
    idle_budget,
    most_prefill,
    prefill_limits,
    step_budget,
)

COST = CostModel(k0=0.001, k1=0.0001, k3=0.0005, is_trusted=True)
CONFIG = PolicyConfig(slots=16, num_blocks=1000, ttft=1.0, tpot=0.05)
ONLINE_ALONE = 0.01


def make_snapshot(**fields) -> EngineSnapshot:
    usual = {"now": 10.0, "residents": (), "waiting": (), "free_blocks": 1000, "config": CONFIG, "cost": COST}
    return EngineSnapshot(reservation=CONFIG.reservation(), **{**usual, **fields})


def make_decode(**fields) -> Request:
    usual = {
        "seq": 1,
        "request_class": RequestClass.ONLINE,
        "arrival": 10.0,
        "num_prompt": 8,
        "max_output": 8,
        "ttft": 1.0,
        "tpot": 0.05,
        "phase": Phase.RUNNING,
        "num_tokens": 9,
        "num_computed": 8,
        "num_output": 1,
    }
    return Request(**{**usual, **fields})


def budget(*decodes: Request, snapshot: EngineSnapshot | None = None, fixed: float = ONLINE_ALONE) -> float:
    return step_budget(snapshot or make_snapshot(), OnlineStep(decodes, (), ONLINE_ALONE, fixed))


@pytest.mark.parametrize(
    ("decode", "config", "expected"),
    [
        pytest.param({}, {}, CONFIG.tpot_share * 0.05, id="a share of its TPOT"),
        pytest.param(
            {"num_output": 2, "first_token": 9.7, "arrival": 9.5}, {}, ONLINE_ALONE, id="late, and catches up"
        ),
        pytest.param({"num_output": 7, "first_token": 8.0, "max_output": 8}, {}, 0.05, id="its mean cannot be kept"),
        pytest.param({"num_output": 7, "first_token": 9.9, "tpot": 1e-6}, {}, 0.05, id="no step can keep its own TPOT"),
        pytest.param({"arrival": 8.97}, {}, ONLINE_ALONE + 0.5 * 0.01, id="its token is due in 20 ms"),
        pytest.param({"arrival": 0.0}, {}, 0.05, id="overdue"),
        pytest.param({"ttft": inf, "tpot": inf}, {"ttft": inf, "tpot": inf}, inf, id="no SLO"),
        pytest.param({"num_output": 8, "first_token": 9.99}, {"most_risk": 0.0}, ONLINE_ALONE, id="no risk"),
    ],
)
def test_a_decode_bounds_the_step(decode: dict, config: dict[str, float], expected: float):
    snapshot = make_snapshot(config=replace(CONFIG, **config))

    assert budget(make_decode(**{"max_output": 100, **decode}), snapshot=snapshot) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("tokens", "taken", "lent"),
    [
        pytest.param(1, 0.0, 0.0, id="the first token has just come"),
        pytest.param(5, 0.25, 0.0, id="exactly on pace"),
        pytest.param(5, 0.16, 0.5 * (0.08 + 0.05 * log(CONFIG.most_risk)), id="a bit faster"),
        pytest.param(8, 0.2, 0.04, id="twice as fast"),
        pytest.param(2, 0.3, 0.0, id="late, and catches up"),
    ],
)
def test_decodes_save_slack_for_their_mean_time_per_token(tokens: int, taken: float, lent: float):
    request = make_decode(num_output=tokens, first_token=10.0 - taken, arrival=9.5, max_output=100)

    assert budget(request) - ONLINE_ALONE == pytest.approx(lent)


def test_the_more_answers_are_young_the_less_is_lent():
    old = [make_decode(num_output=40, first_token=9.0, arrival=8.5, max_output=100) for _ in range(20)]
    young = [make_decode(num_output=1, first_token=10.0, arrival=9.5, max_output=100) for _ in range(20)]

    assert ONLINE_ALONE < budget(*old, *young) < budget(*old, *young[:5]) < budget(*old)
    assert budget(*young) == ONLINE_ALONE


def test_the_slack_that_is_kept_grows_with_the_bursts_of_prefill():
    request = make_decode(num_output=20, first_token=9.3, arrival=9.0, max_output=100)

    cost = replace(COST, k2=1e-8, k5=0.001, missed=0.99)

    def kept(spread: float) -> float:
        expectation = Expectation(online_spread=spread, online_answer=100.0)
        return budget(request, snapshot=make_snapshot(cost=cost, typical_prompt=250, expectation=expectation))

    burst = 1300 * (100 * 0.05) ** 0.5 * cost.prefill(0, 250, 1) / 250
    assert kept(0.0) == pytest.approx(CONFIG.tpot_share * 0.05 + cost.k5)
    assert kept(1300.0) - ONLINE_ALONE == pytest.approx(0.5 * (0.29 + burst * log(CONFIG.most_risk)))
    assert kept(5000.0) == ONLINE_ALONE


def test_where_the_lending_ratio_backs_off_less_risk_is_taken_and_less_of_the_time_beside_prefill():
    request = make_decode(num_output=6, first_token=9.82, arrival=9.5, max_output=100)
    risk = 0.5 * CONFIG.most_risk

    half, none = (make_snapshot(allowance=Allowance(lending_ratio=ratio)) for ratio in (0.5, 0.0))
    beside_prompts = budget(request, snapshot=half, fixed=0.8 * ONLINE_ALONE)

    assert beside_prompts - ONLINE_ALONE == pytest.approx(0.5 * 0.5 * (0.11 + 0.05 * log(risk)))
    assert budget(request, snapshot=half) - ONLINE_ALONE == pytest.approx(0.5 * (0.11 + 0.05 * log(risk)))
    assert budget(request, snapshot=none, fixed=0.8 * ONLINE_ALONE) == ONLINE_ALONE
    without_slo = replace(make_snapshot(allowance=Allowance(lending_ratio=0.0)), config=PolicyConfig(8, 64))
    assert step_budget(without_slo, OnlineStep((), (), ONLINE_ALONE, ONLINE_ALONE)) == inf
    alone = replace(without_slo, allowance=Allowance(is_alone=True))
    assert step_budget(alone, OnlineStep((), (), ONLINE_ALONE, ONLINE_ALONE)) == inf


def test_a_step_of_online_alone_lends_nothing():
    request = make_decode(num_output=20, first_token=9.8)

    alone = budget(request, snapshot=make_snapshot(allowance=Allowance(share=0.25, is_alone=True)))

    assert alone == ONLINE_ALONE < budget(request, snapshot=make_snapshot(allowance=Allowance(share=0.25)))


def room(*decodes: Request, **snapshot) -> float:
    return prefill_limits(make_snapshot(**snapshot), OnlineStep(decodes, (), ONLINE_ALONE, ONLINE_ALONE), 1)[0]


@pytest.mark.parametrize(
    ("prompt", "lent"), [(100, True), (9_900, False), (50_000, True)], ids=["in time", "just", "late"]
)
def test_prompts_that_are_late_in_any_case_do_not_stop_lending(prompt: int, lent: bool):
    """A token of prefill takes 0.1 ms, a step 1 ms more, and the TTFT is a second."""
    snapshot = make_snapshot(typical_prompt=prompt, residents=())

    found = step_budget(snapshot, OnlineStep((), (), COST.k0, COST.k0))

    assert COST.k0 < found < inf
    assert (found > COST.k0 + 0.01) is lent


@pytest.mark.parametrize(
    ("cost", "more"),
    [
        pytest.param(replace(COST, k2=1e-6), 1e-6 * 2 * 400 * 401 / 2, id="the context of every prompt before"),
        pytest.param(replace(COST, k5=0.02, missed=0.999), 2 * 0.02 * (1 - 0.999**512), id="the experts of each chunk"),
    ],
)
def test_the_slack_of_a_prompt_is_what_all_prompts_before_it_leave(cost: CostModel, more: float):
    prompts = [make_newcomer(seq=seq, num_prompt=400, num_tokens=400) for seq in range(2)]
    takes = 2 * ONLINE_ALONE + cost.k1 * 800 + more

    found = step_budget(make_snapshot(cost=cost), OnlineStep((), prompts, ONLINE_ALONE, ONLINE_ALONE))

    assert found == pytest.approx(ONLINE_ALONE + 0.5 * (1.0 - takes))


def test_a_prompt_leaves_the_time_of_its_rest_and_the_first_32_of_a_queue_count():
    begun = make_newcomer(phase=Phase.RUNNING, num_computed=50)
    queue = [make_newcomer(seq=seq, num_prompt=20, num_tokens=20) for seq in range(40)]
    found = [step_budget(make_snapshot(), OnlineStep((), p, ONLINE_ALONE, ONLINE_ALONE)) for p in ([begun], queue)]

    takes = ONLINE_ALONE + 50 * COST.k1, 2 * ONLINE_ALONE + 32 * 20 * COST.k1
    assert found == pytest.approx([ONLINE_ALONE + 0.5 * (1.0 - seconds) for seconds in takes])


def test_a_newcomer_that_suspends_the_step_gets_what_the_decodes_saved():
    cost, config = replace(COST, k2=1e-7), replace(CONFIG, ttft=0.022, most_risk=1.0)
    snapshot = make_snapshot(cost=cost, config=config, typical_prompt=100)
    request = make_decode(num_output=2, first_token=9.95, max_output=100)  # 40 ms more than online alone takes

    takes = (cost.k0 + cost.prefill(0, 100)) / SUSPENDED_SHARE
    assert budget(request, snapshot=snapshot) == pytest.approx(ONLINE_ALONE + 0.04 - takes)
    assert step_budget(snapshot, OnlineStep((), (), 0.012, 0.012)) == pytest.approx(0.012 + 0.022), "none is saved"


def make_newcomer(**fields) -> Request:
    usual = {"num_prompt": 100, "num_tokens": 100, "num_computed": 0, "num_output": 0, "phase": Phase.WAITING}
    return make_decode(**{**usual, **fields})


def test_online_prefill_takes_what_the_decodes_beside_it_can_wait():
    early = make_decode(num_output=8, first_token=9.9)

    assert room(early) == pytest.approx(0.3)
    assert room(early, make_decode(num_output=8, first_token=9.6, max_output=100)) == pytest.approx(0.05)
    unknown = OnlineStep((make_decode(),), (), ONLINE_ALONE, ONLINE_ALONE)
    assert prefill_limits(make_snapshot(), unknown) == (inf, inf), "its pace is not known"
    hopeless = make_decode(num_output=9, first_token=9.51, max_output=10)  # 50 ms late, and one token makes up for 40
    assert room(early, hopeless) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("tokens", "rate", "more"),
    [
        pytest.param(1, 0.0, 7 * 0.04 + 92 * 0.04, id="92 tokens behind its first eight"),
        pytest.param(
            1, 20.0, 7 * 0.04 + 92 * ((1 - 20 * 0.010505) * 0.05 - 0.01), id="new prompts take a fifth of the time"
        ),
        pytest.param(1, 90.0, 7 * 0.04, id="new prompts leave no time"),
        pytest.param(50, 0.0, 50 * 0.04, id="half of the answer is left"),
        pytest.param(100, 0.0, 0.0, id="no answer was longer"),
    ],
)
def test_a_patient_decode_catches_up_in_the_whole_of_its_answer(tokens: int, rate: float, more: float):
    request = make_decode(num_output=tokens, first_token=10.1 - 0.05 * tokens, max_output=200)
    expectation = Expectation({RequestClass.ONLINE: (100,) * 100}, online_rate=rate)
    snapshot = make_snapshot(cost=replace(COST, k2=1e-7), expectation=expectation, typical_prompt=100)
    part = OnlineStep((request,), (), ONLINE_ALONE, ONLINE_ALONE)

    assert prefill_limits(snapshot, part, 2)[0] == pytest.approx(0.1 + more)


@pytest.mark.parametrize(
    ("short", "answer", "tokens"),
    [
        pytest.param(8, 0.0, 8, id="lengths are unknown"),
        pytest.param(8, 100.0, 8, id="most are much longer"),
        pytest.param(8, 16.0, 4, id="alike and short: a quarter"),
        pytest.param(100, 100.0, 80, id="alike and long: all but one TTFT"),
    ],
)
def test_an_answer_catches_up_in_its_first_tokens(short: int, answer: float, tokens: int):
    """A TTFT is 20 TPOT. A decode catches up 40 ms with each token."""
    young = make_decode(num_output=1, first_token=10.0)
    expectation = Expectation(online_short=short, online_answer=answer)

    assert room(young, expectation=expectation) == pytest.approx(0.05 + (tokens - 1) * 0.04)
    step = OnlineStep((young,), (), ONLINE_ALONE, ONLINE_ALONE)
    assert prefill_limits(make_snapshot(expectation=expectation), step)[0] == pytest.approx(0.05), "without patience"


@pytest.mark.parametrize(
    ("busy", "expected"), [(0.0, 0.05 + 79 * 0.04), (0.4, 0.05 + 79 * 0.02), (0.9, 0.05 + 24 * 0.04)]
)
def test_answers_that_are_alike_catch_up_in_the_time_that_new_requests_leave(busy: float, expected: float):
    """New requests take the time for which `busy` stands, a TPOT is 50 ms, and the decodes alone take 10 ms."""
    young = make_decode(num_output=1, first_token=10.0)
    cost = replace(COST, k2=1e-7)
    rate = busy / (cost.prefill(0, 100) + 100 * cost.decode(100))
    alike = Expectation(online_short=100, online_answer=100.0, online_rate=rate)
    others = Expectation(online_short=8, online_answer=100.0, online_rate=rate)

    assert room(young, cost=cost, expectation=alike, typical_prompt=100) == pytest.approx(expected)
    assert room(young, cost=cost, expectation=others, typical_prompt=100) == pytest.approx(0.05 + 7 * 0.04)


def test_an_answer_beyond_its_first_tokens_loses_nothing_if_new_requests_take_the_time():
    busy = Expectation(online_short=100, online_answer=100.0, online_rate=0.9 / (0.01 + 100 * COST.decode(100)))
    request = make_decode(num_output=30, first_token=8.6)

    assert room(request, expectation=busy, typical_prompt=100) == pytest.approx(0.1)


def test_an_answer_that_catches_up_only_with_others_waits_no_longer_than_they_leave_time():
    young = make_decode(num_output=2, first_token=9.95)
    rate = 0.4 / (COST.prefill(0, 100) + 4 * COST.decode(100))
    alike = Expectation(online_short=4, online_answer=4.0, online_rate=rate)
    snapshot = make_snapshot(config=replace(CONFIG, ttft=0.05), expectation=alike, typical_prompt=100)

    found, _ = prefill_limits(snapshot, OnlineStep((young,), (), ONLINE_ALONE, ONLINE_ALONE), 1)

    assert found == pytest.approx(0.05 + (0.6 * 0.05 - ONLINE_ALONE))


def test_an_answer_does_not_catch_up_if_a_step_of_decodes_takes_longer_than_its_tpot():
    request = make_decode(num_output=30, first_token=8.6, max_output=100)
    snapshot = make_snapshot(expectation=Expectation(online_short=60, online_answer=100.0))

    assert prefill_limits(snapshot, OnlineStep((request,), (), 0.06, 0.06)) == pytest.approx((0.1, 0.09))


@pytest.mark.parametrize(("short", "tokens"), [(8, 7), (4, 3), (2, 1), (1, 1)])
def test_a_suspended_step_ends_before_the_second_token_of_a_short_answer_is_too_late(short: int, tokens: int):
    snapshot = make_snapshot(config=replace(CONFIG, can_suspend=True), expectation=Expectation(online_short=short))
    expected = replace(snapshot, expectation=replace(snapshot.expectation, online_until=11.0))

    assert idle_budget(snapshot, IDLE) == idle_budget(expected, IDLE) == pytest.approx(tokens * (0.05 - IDLE.fixed))


def test_with_a_cap_online_prefills_as_it_would_alone():
    young = make_decode(num_output=1, first_token=10.0)

    assert room(young, allowance=Allowance(share=0.1)) == room(young)


def test_online_prefill_gets_a_third_of_a_step_that_decodes_fill():
    step = OnlineStep((make_decode(num_output=8, first_token=9.6, max_output=100),), (), 0.045, 0.045)

    assert prefill_limits(make_snapshot(), step) == pytest.approx((0.0675, 0.0675))


def test_prefill_allows_for_the_error_of_the_cost_model():
    decodes = [make_decode(max_output=100, num_output=50, first_token=10.0 - 50 * 0.05 + 0.11)]
    exact, rough = (make_snapshot(cost=replace(COST, error=error)) for error in (0.0, 0.1))
    step = OnlineStep(decodes, (), ONLINE_ALONE, ONLINE_ALONE)

    assert prefill_limits(exact, step) == pytest.approx((0.11, 0.05))
    assert prefill_limits(rough, step) == pytest.approx((0.11 / 1.1, 0.05 / 1.1))


def test_online_prefill_gets_a_third_of_a_step_that_reads_the_missing_experts():
    """The decode beside it has read a twentieth of the experts."""
    step = OnlineStep((make_decode(num_output=8, first_token=9.6, max_output=100),), (), 0.045, 0.045)

    pace = prefill_limits(make_snapshot(cost=EXPERTS), step)[1]

    assert pace == pytest.approx(1.5 * (0.045 + 0.95 * 0.03 * (1 - 0.95**CONFIG.chunk_tokens)))


def test_a_request_that_computes_its_answer_again_is_due_with_its_next_token():
    again = make_newcomer(arrival=8.9, num_output=4)  # its fifth token is due at 8.9 + 1 + 4 * 0.05
    takes = ONLINE_ALONE + COST.k1 * 100

    found = step_budget(make_snapshot(), OnlineStep((), (again,), ONLINE_ALONE, ONLINE_ALONE))

    assert found == pytest.approx(ONLINE_ALONE + 0.5 * (0.1 - takes))


@pytest.mark.parametrize(("share", "expected"), [(0.1, 0.022), (0.05, 0.021), (0.0, 0.02)])
def test_a_cap_on_interference_bounds_the_step_by_what_online_alone_takes(share: float, expected: float):
    capped = make_snapshot(allowance=Allowance(share=share))

    found = step_budget(capped, OnlineStep((), (), 0.02, 0.02), alone=0.02)

    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("alone", "expected"), [(0.01, 0.022), (0.02, 0.022), (0.2, 0.2)])
def test_a_cap_fills_each_step_to_the_same_level(alone: float, expected: float):
    capped = make_snapshot(allowance=Allowance(share=0.1, typical=0.02))

    assert max(alone, step_budget(capped, OnlineStep((), (), alone, alone), alone)) == pytest.approx(expected)


EXPERTS = replace(COST, k5=0.03, missed=0.95)
"""Reading all experts takes 30 ms."""


def expert_budget(saved: float, **config) -> float:
    """Return the budget of a step whose decode has saved some seconds, in a model of experts."""
    request = make_decode(num_output=20, first_token=9.0 + saved, arrival=8.9 + saved, max_output=100)
    snapshot = make_snapshot(cost=EXPERTS, typical_prompt=20, config=replace(CONFIG, **config))
    part = OnlineStep((request,), (), ONLINE_ALONE, ONLINE_ALONE, experts=EXPERTS.experts(inf, 1))
    return step_budget(snapshot, part)


@pytest.mark.parametrize(
    ("saved", "lent"),
    [
        pytest.param(0.10, 0.0, id="too little for all experts"),
        pytest.param(-0.1, 0.0, id="nothing saved"),
        pytest.param(0.15, 0.5 * (0.14 + 0.05 * log(CONFIG.most_risk)), id="enough"),
        pytest.param(0.50, 0.05 + 0.03 - ONLINE_ALONE, id="at most one TPOT and the experts"),
    ],
)
def test_decodes_save_time_until_a_step_can_read_all_experts(saved: float, lent: float):
    assert expert_budget(saved) - ONLINE_ALONE == pytest.approx(lent)


def test_where_a_newcomer_never_allows_a_full_step_small_steps_are_lent():
    newcomer = {"ttft": 0.07, "can_suspend": False}

    assert expert_budget(0.15, **newcomer) == pytest.approx(0.07 - ONLINE_ALONE - EXPERTS.prefill(0, 20, 1))
    assert expert_budget(0.15, ttft=0.07) == pytest.approx(expert_budget(0.15))
    for saved in (0.07, 0.10):
        assert expert_budget(saved, ttft=0.07) == ONLINE_ALONE, "a newcomer suspends the step"


def test_a_newcomer_that_online_itself_makes_late_does_not_stop_lending():
    request = make_decode(num_output=20, first_token=9.5, arrival=9.4, max_output=100)
    snapshot = make_snapshot(cost=EXPERTS, typical_prompt=20, config=replace(CONFIG, ttft=0.07, can_suspend=False))
    part = OnlineStep((request,), (), seconds=0.06, fixed=ONLINE_ALONE)

    assert step_budget(snapshot, part) == pytest.approx(0.05 + 0.03)


IDLE = OnlineStep((), (), COST.k0, COST.k0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        pytest.param({"can_suspend": True, "ttft": 0.011, "tpot": 0.002}, 7 * (0.002 - COST.k0), id="it catches up"),
        pytest.param({"can_suspend": True, "ttft": 0.011, "tpot": 0.02}, 0.011, id="it suspends the step"),
        pytest.param({}, 1.0 - COST.k0 - 0.01, id="it has its first token in time"),
        pytest.param({"ttft": 0.011}, COST.k0 + 0.011, id="it is late in any case"),
        pytest.param({"ttft": 0.011, "tpot": 0.004}, COST.k0 + 0.004, id="it is late, and waits for one TPOT"),
        pytest.param({"ttft": 0.0001}, 2 * COST.k0, id="half of a step is work"),
        pytest.param({"ttft": inf, "tpot": inf}, inf, id="without an SLO"),
    ],
)
def test_an_idle_step_is_as_long_as_a_newcomer_can_wait(config: dict[str, float], expected: float):
    snapshot = make_snapshot(config=replace(CONFIG, **{"can_suspend": False} | config), typical_prompt=100)

    assert idle_budget(snapshot, IDLE) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        pytest.param({}, COST.k0 + 0.1 * 0.02 * 50, id="an answer spreads what is left of a suspended step"),
        pytest.param({"share": 0.05}, COST.k0 + 0.05 * 0.02 * 50, id="less of the cap"),
        pytest.param({"can_suspend": False, "share": 0.6}, 0.6 * (COST.k0 + 0.01505), id="no step can be suspended"),
        pytest.param({"share": 0.0}, 2 * COST.k0, id="nothing of the cap"),
        pytest.param({"until": 9.9}, 7 * (0.05 - COST.k0), id="no online request is expected"),
    ],
)
def test_a_cap_bounds_an_idle_step_while_online_is_expected(fields: dict, expected: float):
    fields = {"share": 0.1, "can_suspend": True, "until": 10.1, **fields}
    config, cost = replace(CONFIG, can_suspend=fields["can_suspend"]), replace(COST, k2=1e-6)
    allowance = Allowance(share=fields["share"], typical=0.02)
    expectation = Expectation(online_until=fields["until"], online_answer=50.0)
    learned = {"typical_prompt": 100, "allowance": allowance, "expectation": expectation}
    snapshot = make_snapshot(config=config, cost=cost, **learned)

    assert idle_budget(snapshot, IDLE) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("config", "num_decodes", "expected"),
    [
        pytest.param({}, 0, 8 * COST.k0, id="seven fixed costs beside its own"),
        pytest.param({}, 5, 8 * COST.k0 + 5 * COST.k3, id="and beside online decodes"),
        pytest.param({"tpot": 0.1}, 0, 0.1 / 4, id="a quarter of the TPOT is always short enough"),
        pytest.param({"can_suspend": True}, 0, 0.989, id="a newcomer suspends the step"),
        pytest.param({"is_encoder": True}, 0, 0.989, id="an encoder computes whole prompts"),
    ],
)
def test_a_step_that_cannot_be_suspended_is_short_enough_for_all_who_arrive_in_it(
    config: dict, num_decodes: int, expected: float
):
    config = replace(CONFIG, tpot_share=1.0, **{"can_suspend": False, "tpot": 0.02} | config)
    fixed = COST.k0 + num_decodes * COST.k3
    decodes = [make_decode(seq=seq, tpot=0.05) for seq in range(num_decodes)]
    snapshot = make_snapshot(config=config, typical_prompt=100, residents=())

    assert step_budget(snapshot, OnlineStep(decodes, (), fixed, fixed)) == pytest.approx(expected)


def test_a_step_of_online_prompts_is_no_longer_because_later_ones_may_suspend_it():
    """A prompt that exceeds a nested step waits for its end."""
    config = replace(CONFIG, tpot_share=1.0, can_suspend=True, tpot=0.02)
    snapshot = make_snapshot(config=config, typical_prompt=100, expectation=Expectation(online_until=10.1))
    prompts = OnlineStep((), (), COST.k0 + 0.005, COST.k0)

    assert step_budget(snapshot, prompts) == pytest.approx(8 * COST.k0)
    assert idle_budget(snapshot, prompts) > 8 * COST.k0, "these are of the reservation"


@pytest.mark.parametrize(("until", "expected"), [(10.1, 8 * COST.k0), (9.9, 0.989)], ids=["expected", "not expected"])
def test_an_idle_step_that_cannot_be_suspended_is_short_while_online_is_expected(until: float, expected: float):
    config = replace(CONFIG, can_suspend=False, tpot=0.02)
    expectation = Expectation(online_until=until)

    assert idle_budget(make_snapshot(config=config, typical_prompt=100, expectation=expectation), IDLE) == (
        pytest.approx(expected)
    )


@pytest.mark.parametrize("cost", [COST, CostModel(k0=0.0, k3=0.3, is_trusted=True), CostModel(k1=0.3, is_trusted=True)])
def test_an_idle_step_has_the_time_for_the_longest_next_token(cost: CostModel):
    config = replace(CONFIG, ttft=0.001, tpot=0.001)
    work = [make_decode(seq=seq, request_class=RequestClass.OFFLINE, num_tokens=9 + seq) for seq in (1, 2)]
    snapshot = make_snapshot(config=config, cost=cost, residents=work[:1], waiting=work[1:])

    found = idle_budget(snapshot, OnlineStep((), (), cost.k0, cost.k0))

    assert found == pytest.approx(max(2 * cost.k0, cost.k0 + max(cost.decode(11), cost.prefill(11, 1))))
    assert idle_budget(snapshot, OnlineStep((), (), 0.5, cost.k0)) == 0.5


def test_less_is_lent_beside_prefill_while_more_requests_miss_their_slo_than_may():
    half = make_snapshot(allowance=Allowance(lending_ratio=0.5))

    assert budget(make_decode(), snapshot=half, fixed=0.8 * ONLINE_ALONE) == pytest.approx((ONLINE_ALONE + 0.05) / 2)
    assert budget(make_decode(), snapshot=half) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("can_suspend", "until", "share"),
    [
        pytest.param(False, 10.1, 0.5, id="a newcomer waits for the end of the step"),
        pytest.param(False, 9.9, 1.0, id="no newcomer is expected"),
        pytest.param(True, 10.1, 1.0, id="a newcomer suspends the step"),
    ],
)
def test_the_lending_ratio_shortens_idle_steps_that_an_expected_newcomer_waits_for(
    can_suspend: bool, until: float, share: float
):
    expectation = Expectation(online_until=until)
    config = replace(CONFIG, can_suspend=can_suspend, ttft=8 * COST.k0)  # short enough to bound the step
    usual = make_snapshot(config=config, typical_prompt=10, expectation=expectation)
    backed_off = replace(usual, allowance=Allowance(lending_ratio=0.5))

    assert idle_budget(backed_off, IDLE) == pytest.approx(share * idle_budget(usual, IDLE))


def test_online_fills_four_chunks_in_a_step_of_known_time():
    assert most_prefill(CONFIG, COST) == 4 * CONFIG.chunk_tokens
    assert most_prefill(CONFIG, replace(COST, is_trusted=False)) == CONFIG.chunk_tokens
