"""What offline work costs online, measured by a clock of delay; and what is allowed it for that."""

from __future__ import annotations

from math import inf

import pytest

from ballast_policy.interference import Interference
from ballast_policy.plan import Plan
from ballast_policy.request import Request, RequestClass

ALONE, STEP = 0.02, 0.03
"""A step takes half as long again as online alone would need."""


def make_request(seq: int, arrival: float, *, ttft: float = inf, tpot: float = inf) -> Request:
    return Request(seq, RequestClass.ONLINE, arrival, num_prompt=8, max_output=8, ttft=ttft, tpot=tpot)


def serve(state: Interference, number: int, *, alone: float = ALONE, step: float = STEP, **slo: float) -> None:
    """One request after the other, each with a step of prefill and ten of decoding."""
    for seq in range(number):
        now = seq * 11 * step
        request = make_request(seq, now, **slo)
        state.arrived(request, now)
        for index in range(11):
            state.began(Plan(predicted_seconds=step, online_seconds=alone), now)
            now += step
            state.ended(now)
            request.num_output = index + 1
            if index == 0:
                request.first_token = now
                state.answered(request, now)
        state.finished(request, now)


def test_the_clock_of_delay_knows_what_online_alone_would_have_taken():
    state = Interference()
    state.configure(0.1, 0.0)

    serve(state, 40)

    assert state.inflation == pytest.approx(0.5)
    assert state.allowance.crowding == pytest.approx(0.5)


def test_who_comes_in_the_middle_of_an_offline_step_waits_for_its_rest():
    state = Interference()
    state.configure(0.1, 0.0)
    state.began(Plan(predicted_seconds=0.1, online_seconds=0.0), 0.0)
    request = make_request(0, 0.075)
    state.arrived(request, 0.075)
    state.began(Plan(predicted_seconds=0.02, online_seconds=0.02), 0.1)
    request.num_output, request.first_token = 1, 0.12
    state.answered(request, 0.12)

    measured, alone = state._ttft[0]

    assert (measured, alone) == (pytest.approx(0.045), pytest.approx(0.02))


def test_the_allowance_shrinks_above_the_cap_and_grows_below_it():
    above, below = Interference(), Interference()
    for state, alone in ((above, 0.02), (below, 0.0299)):
        state.configure(0.1, 0.0)
        begun = state.allowance.share
        serve(state, 64, alone=alone)
        assert begun is not None
        assert state.allowance.share is not None
        assert (state.allowance.share < begun) is (state is above)


def test_another_cap_begins_anew_and_no_cap_has_no_share():
    state = Interference()
    state.configure(0.1, 0.0)
    first = state.allowance.share
    state.configure(0.2, 0.0)

    assert first == pytest.approx(0.097)
    assert state.allowance.share == pytest.approx(0.194)
    state.configure(None, 0.0)
    assert state.allowance.share is None


def test_harvest_backs_off_while_offline_makes_requests_miss_their_slo_and_recovers():
    state = Interference()
    state.configure(None, 0.99)
    serve(state, 40, tpot=0.025)
    backed_off = state.allowance.harvest
    serve(state, 400, tpot=0.05)

    assert backed_off == pytest.approx(0.6)
    assert backed_off < state.allowance.harvest <= 1


@pytest.mark.parametrize(
    ("num_lost", "backs_off"), [(2, False), (3, True)], ids=["chance", "more than one of a hundred"]
)
def test_a_few_that_are_lost_among_few_are_chance(num_lost: int, backs_off: bool):
    state = Interference()
    state.configure(None, 0.99)
    serve(state, num_lost, tpot=0.025)
    serve(state, 40 - num_lost, tpot=0.05)

    assert (state.allowance.harvest < 1) is backs_off


@pytest.mark.parametrize(
    ("cap", "share"), [(None, 0.0), (0.1, 0.2), (0.5, 1.0), (2.0, 1.0)], ids=["no cap", "small", "wide", "wider"]
)
def test_a_cap_gives_leeway_by_its_width_while_answers_keep_their_pace(cap: float | None, share: float):
    state = Interference()
    state.configure(cap, 0.99)
    earned = []
    for tpot in (0.05, 0.015, 0.05):  # kept, missed by online alone as well, kept
        serve(state, 160, tpot=tpot)
        earned.append(state.allowance.leeway)

    assert (0.0 < earned[1] < earned[0]) is (share > 0)
    assert earned[2] >= earned[1]
    assert earned[0] == pytest.approx(share * 17 * 0.01)  # a look for each 8, from the 32nd on


def test_another_cap_has_its_leeway_and_its_inflation_from_the_next_look_on():
    state = Interference()
    state.configure(0.5, 0.99)
    serve(state, 160, tpot=0.05)
    measured = state.inflation
    state.configure(None, 0.99)

    assert measured == pytest.approx(0.5)
    assert state.allowance.leeway == state.inflation == 0


def test_what_online_alone_would_miss_as_well_costs_offline_nothing():
    state = Interference()
    state.configure(None, 0.99)

    serve(state, 80, tpot=0.015)

    assert state.allowance.harvest == 1


def test_a_request_that_leaves_without_an_answer_leaves_nothing_behind():
    state = Interference()
    request = make_request(0, 0.0)
    state.arrived(request, 0.0)
    state.finished(request, 1.0)
    state.finished(request, 1.0)

    assert not state._open
    assert not state._tpot


def test_the_typical_step_of_online_is_the_middle_one_of_all_it_had_a_part_in():
    state = Interference()
    state.configure(0.1, 0.0)

    for index in range(4000):
        alone = 0.2 if index % 5 == 0 else 0.02  # every fifth prefills
        state.began(Plan(predicted_seconds=0.3, online_seconds=alone), float(index))
        state.began(Plan(predicted_seconds=0.3, online_seconds=0.0), index + 0.5)
    serve(state, 40)

    assert state.allowance.typical == pytest.approx(0.02, rel=0.05)


def test_another_cap_is_judged_by_what_came_under_it():
    state = Interference()
    state.configure(0.6, 0.0)
    serve(state, 40)
    assert state.inflation == pytest.approx(0.5)
    state.configure(0.1, 0.0)
    begun = state.allowance.share

    serve(state, 64, alone=STEP)

    assert state.inflation == pytest.approx(0.0)
    assert begun is not None
    assert state.allowance.share is not None
    assert state.allowance.share > begun


def test_answers_of_one_token_make_harvest_back_off_too():
    state = Interference()
    state.configure(None, 0.99)
    for seq in range(64):
        request = make_request(seq, float(seq), ttft=0.025)
        state.arrived(request, seq)
        state.began(Plan(predicted_seconds=STEP, online_seconds=ALONE), seq)
        request.num_output, request.first_token = 1, seq + STEP
        state.answered(request, seq + STEP)
        state.ended(seq + STEP)
        state.finished(request, seq + STEP)

    assert state.allowance.harvest < 1


def test_the_typical_step_follows_a_load_that_falls():
    state = Interference()
    state.configure(0.1, 0.0)
    for index in range(20_000):
        state.began(Plan(predicted_seconds=0.05, online_seconds=0.04), float(index))
    for index in range(20_000, 32_000):
        state.began(Plan(predicted_seconds=0.05, online_seconds=0.02), float(index))
    serve(state, 40)

    assert state.allowance.typical == pytest.approx(0.02, rel=0.01)
