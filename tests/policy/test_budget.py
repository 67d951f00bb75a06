from __future__ import annotations

from dataclasses import replace
from math import inf, log

import pytest

from ballast_policy.admission import Expectation
from ballast_policy.budget import OnlineStep, most_prefill, prefill_room, step_budget
from ballast_policy.cost import CostModel
from ballast_policy.interference import UNCHECKED, Allowance
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, Snapshot

COST = CostModel(k0=0.001, k1=0.0001, k3=0.0005, is_trusted=True)
CONFIG = PolicyConfig(slots=16, num_blocks=1000, ttft=1.0, tpot=0.05)
ONLINE_ALONE = 0.01


def make_snapshot(**fields) -> Snapshot:
    usual = {"now": 10.0, "residents": (), "waiting": (), "free_blocks": 1000, "config": CONFIG, "cost": COST}
    return Snapshot(reservation=CONFIG.reservation(), **{**usual, **fields})


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


def budget(*decodes: Request, snapshot: Snapshot | None = None) -> float:
    return step_budget(snapshot or make_snapshot(), OnlineStep(decodes, (), ONLINE_ALONE, ONLINE_ALONE))


def test_a_step_beside_online_decodes_takes_at_most_a_share_of_their_tpot():
    assert budget(make_decode()) == pytest.approx(CONFIG.tpot_share * 0.05)


@pytest.mark.parametrize(
    ("tokens", "taken", "lent"),
    [
        (1, 0.0, 0.0),
        (5, 0.25, 0.0),
        (5, 0.16, 0.0),
        (8, 0.2, 0.25 * (0.19 + 0.05 * log(CONFIG.most_risk))),
        (8, 0.1, 0.04),
        (2, 0.3, 0),
    ],
    ids=["first token just came", "exactly on pace", "a bit faster", "twice as fast", "a lot faster", "catches up"],
)
def test_decodes_save_slack_for_their_mean_time_per_token(tokens: int, taken: float, lent: float):
    request = make_decode(num_output=tokens, first_token=10.0 - taken, arrival=9.5, max_output=100)

    assert budget(request) - ONLINE_ALONE == pytest.approx(lent)


def test_one_young_answer_among_old_ones_does_not_stop_lending():
    old = [make_decode(num_output=40, first_token=9.0, arrival=8.5, max_output=100) for _ in range(20)]
    young = [make_decode(num_output=1, first_token=10.0, arrival=9.5, max_output=100) for _ in range(20)]

    assert ONLINE_ALONE < budget(*old, young[0]) < budget(*old)
    assert budget(*old, *young) == budget(*young) == ONLINE_ALONE


def test_the_slack_that_is_kept_grows_with_the_prefill_that_comes_meanwhile():
    request = make_decode(num_output=20, first_token=9.3, arrival=9.0, max_output=100)
    heavy = Expectation(online_rate=10.0, online_answer=100.0)
    snapshot = make_snapshot(typical_prompt=250, expectation=heavy)

    assert budget(request) == pytest.approx(CONFIG.tpot_share * 0.05)
    assert budget(request, snapshot=snapshot) == ONLINE_ALONE  # 10 / s * 5 s * 25 ms of prefill, 0.2 s of it at once


def test_where_harvest_backs_off_less_risk_is_taken_and_less_of_the_time():
    request = make_decode(num_output=8, first_token=9.8, arrival=9.5, max_output=100)
    risk = 0.5 * CONFIG.most_risk

    backed_off = budget(request, snapshot=make_snapshot(allowance=Allowance(harvest=0.5)))
    none = budget(request, snapshot=make_snapshot(allowance=Allowance(harvest=0.0)))

    assert backed_off - ONLINE_ALONE == pytest.approx(0.5 * 0.25 * (0.19 + 0.05 * log(risk)))
    assert none == ONLINE_ALONE


def test_a_late_decode_that_can_catch_up_gets_all_the_time_there_is():
    late = make_decode(num_output=2, first_token=9.7, arrival=9.5, max_output=100)

    assert budget(late) == ONLINE_ALONE


def test_a_mean_that_cannot_be_kept_any_more_does_not_freeze_the_batch():
    request = make_decode(num_output=7, first_token=8.0, arrival=9.5, max_output=8)

    assert budget(request) == pytest.approx(CONFIG.tpot_share * 0.05)


def room(*decodes: Request, **snapshot) -> float:
    return prefill_room(make_snapshot(**snapshot), OnlineStep(decodes, (), ONLINE_ALONE, ONLINE_ALONE))[0]


@pytest.mark.parametrize(
    ("prompt", "lent"), [(100, True), (9_900, False), (50_000, True)], ids=["in time", "just", "late"]
)
def test_prompts_that_are_late_in_any_case_do_not_stop_lending(prompt: int, lent: bool):
    """A token of prefill takes 0.1 ms, a step 1 ms more, and the TTFT is a second."""
    snapshot = make_snapshot(typical_prompt=prompt, residents=())

    found = step_budget(snapshot, OnlineStep((), (), COST.k0, COST.k0))

    assert COST.k0 < found < inf
    assert (found > COST.k0 + 0.01) is lent


def make_newcomer(**fields) -> Request:
    usual = {"num_prompt": 100, "num_tokens": 100, "num_computed": 0, "num_output": 0, "phase": Phase.WAITING}
    return make_decode(**{**usual, **fields})


def test_online_prefill_takes_what_the_decodes_beside_it_can_wait():
    early = make_decode(num_output=8, first_token=9.9)

    assert room(early) == pytest.approx(0.3)
    assert room(early, make_decode(num_output=8, first_token=9.6, max_output=100)) == pytest.approx(0.05)
    assert room(make_decode()) == inf  # its first token is not known, so neither is its pace


@pytest.mark.parametrize(
    ("crowding", "tokens"), [(0.0, 8), (0.5, 6), (1.0, 4), (3.0, 4)], ids=["alone", "beside some", "as much", "more"]
)
def test_a_young_answer_may_fall_behind_as_long_as_it_can_catch_up_early(crowding: float, tokens: int):
    """What nearly all answers come to is eight tokens here, and one of them takes 10 ms alone."""
    young = make_decode(num_output=1, first_token=10.0)

    assert room(young, allowance=Allowance(crowding=crowding)) == pytest.approx(0.05 + (tokens - 1) * 0.04)


@pytest.mark.parametrize(("answer", "tokens"), [(0.0, 8), (100.0, 8), (16.0, 4)], ids=["unknown", "long", "all alike"])
def test_where_answers_are_alike_they_catch_up_in_a_quarter_of_one(answer: float, tokens: int):
    young = make_decode(num_output=1, first_token=10.0)
    expectation = Expectation(online_short=8, online_answer=answer)

    assert room(young, expectation=expectation) == pytest.approx(0.05 + (tokens - 1) * 0.04)


def test_with_a_cap_online_prefills_as_it_would_alone():
    young = make_decode(num_output=1, first_token=10.0)

    assert room(young, config=replace(CONFIG, max_interference=0.1)) == room(young)


@pytest.mark.parametrize(("leeway", "tokens"), [(0.0, 4), (0.5, 10), (1.0, 16)], ids=["none", "half", "all"])
def test_with_leeway_online_prefill_puts_young_answers_behind_further(leeway: float, tokens: int):
    young = make_decode(num_output=1, first_token=10.0, max_output=100)
    step = OnlineStep((young,), (), ONLINE_ALONE, ONLINE_ALONE, leeway=leeway)
    snapshot = make_snapshot(allowance=Allowance(crowding=1.0))

    assert prefill_room(snapshot, step)[0] == pytest.approx(0.05 + (tokens - 1) * 0.04)


@pytest.mark.parametrize(("leeway", "waits_for"), [(0.0, 0.06), (0.5, 0.06), (1.0, 0.3)], ids=["none", "half", "all"])
def test_with_all_leeway_online_prefill_waits_for_all_decodes_but_one_of_ten(leeway: float, waits_for: float):
    old = [make_decode(num_output=60, first_token=7.3, max_output=100) for _ in range(9)]
    tight = make_decode(num_output=60, first_token=7.06, max_output=100)
    step = OnlineStep((*old, tight), (), ONLINE_ALONE, ONLINE_ALONE, leeway=leeway)

    assert prefill_room(make_snapshot(), step)[0] == pytest.approx(waits_for)


def test_online_prefill_gets_a_third_of_a_step_that_decodes_fill():
    step = OnlineStep((make_decode(num_output=8, first_token=9.6, max_output=100),), (), 0.045, 0.045)

    assert prefill_room(make_snapshot(), step) == pytest.approx((0.0675, 0.0675))


def test_an_online_request_about_to_miss_its_token_lends_a_share_of_the_time_that_it_has():
    due = make_decode(arrival=10.0 - 1.0 - 0.05 + 0.02)  # in 20 ms, of which online alone takes 10

    assert budget(due) == pytest.approx(ONLINE_ALONE + CONFIG.slack_safety * 0.01)


def test_an_overdue_request_does_not_freeze_the_batch():
    assert budget(make_decode(arrival=0.0)) == pytest.approx(CONFIG.tpot_share * 0.05)


def test_without_an_slo_nothing_bounds_a_step():
    free = make_snapshot(config=replace(CONFIG, ttft=inf, tpot=inf))

    assert budget(make_decode(ttft=inf, tpot=inf), snapshot=free) == inf


@pytest.mark.parametrize(
    ("alone", "allowance", "expected"),
    [
        (0.02, UNCHECKED, 0.022),
        (0.02, Allowance(share=0.05), 0.021),
        (0.0, UNCHECKED, 0.0255),
        (0.0, Allowance(share=0.05), 0.01325),
        (0.0, Allowance(share=0.0), 0.00345),
    ],
    ids=["the cap", "less of it", "no online at hand", "none, and less of the cap", "none, and nothing of the cap"],
)
def test_a_cap_on_interference_bounds_the_step_by_what_online_alone_takes(alone, allowance, expected):
    capped = make_snapshot(config=replace(CONFIG, max_interference=0.1), allowance=allowance)

    found = step_budget(capped, OnlineStep((), (), alone, alone, alone=alone))

    assert found == pytest.approx(expected)


@pytest.mark.parametrize(("alone", "expected"), [(0.01, 0.022), (0.02, 0.022), (0.2, 0.2)])
def test_a_cap_fills_each_step_to_the_same_level(alone: float, expected: float):
    config = replace(CONFIG, max_interference=0.1)
    capped = make_snapshot(config=config, allowance=Allowance(typical=0.02))

    assert max(alone, step_budget(capped, OnlineStep((), (), alone, alone, alone=alone))) == pytest.approx(expected)


def test_less_is_lent_while_more_requests_miss_their_slo_than_may():
    half = make_snapshot(allowance=Allowance(harvest=0.5))

    assert budget(make_decode(), snapshot=half) == pytest.approx((ONLINE_ALONE + 0.05) / 2)


def test_a_cap_leaves_online_as_many_chunks_in_a_step_as_it_has_alone():
    capped = replace(CONFIG, max_interference=0.1)

    assert most_prefill(capped, COST) == most_prefill(CONFIG, COST) == 4 * CONFIG.chunk_tokens
