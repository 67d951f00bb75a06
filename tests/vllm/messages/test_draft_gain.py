"""Drafts are off while they make tokens slower."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.learning.cost import CostModel, StepWork
from ballast_vllm.drafts import PERIOD, WINDOW, DecodeStep, DraftGain

DECODES, DRAFTS = 10, 30
COST = CostModel(k0=20e-3, k3=0.1e-3, is_trusted=True)
UNKNOWN = replace(COST, is_trusted=False)
TRIAL = WINDOW + 1


def run(gain: DraftGain, steps: int, *, length: float = 1.0, accepted: int = 0, cost: CostModel = COST) -> list[bool]:
    """Run steps that take `length` times as long with drafts; return whether each had drafts."""
    modes = []
    for index in range(steps):
        is_on = gain.is_on
        work = StepWork(num_decode=DECODES + index % 3, decode_context=1000)
        seconds = cost.predict(work) * 1.1 * (length if is_on else 1.0)
        drafts = {"num_drafts": 3 * work.num_decode, "num_accepted": accepted} if is_on else {}
        gain.note(DecodeStep(work, seconds, is_on, **drafts), cost)
        modes.append(is_on)
    return modes


@pytest.mark.parametrize(
    ("length", "accepted", "is_on"),
    [
        pytest.param(1.1, 15, True, id="cheap and often accepted"),
        pytest.param(1.1, 0, False, id="never accepted"),
        pytest.param(3.0, 15, False, id="dear"),
        pytest.param(3.0, 30, True, id="dear and always accepted"),
    ],
)
def test_drafts_stay_on_only_while_they_pay(length, accepted, is_on):
    gain = DraftGain()

    modes = run(gain, WINDOW + TRIAL + PERIOD, length=length, accepted=accepted)

    assert modes == [True] * WINDOW + [False] * TRIAL + [is_on] * PERIOD
    assert gain.is_usual is is_on


@pytest.mark.parametrize("is_on", [True, False])
def test_the_other_mode_is_tried_after_a_period(is_on):
    gain = DraftGain()
    run(gain, WINDOW + TRIAL + PERIOD, accepted=15 if is_on else 0, length=1.2)
    assert gain.is_usual is is_on

    modes = run(gain, TRIAL + 1, accepted=15, length=1.2)

    assert modes == [not is_on] * TRIAL + [True]


def test_drafts_are_on_without_trials_until_the_cost_model_is_trusted():
    gain = DraftGain()

    assert all(run(gain, 10 * WINDOW, cost=UNKNOWN, length=3.0))
    run(gain, 1)
    assert not gain.is_on


def test_a_long_pause_in_a_trial_decides_nothing():
    gain = DraftGain()
    run(gain, WINDOW + 10, length=1.2, accepted=0)
    gain.note(DecodeStep(StepWork(num_decode=DECODES), 100.0, with_drafts=False), COST)

    run(gain, TRIAL - 11, length=1.2, accepted=0)

    assert gain.is_usual is False


def test_a_step_that_began_before_a_switch_and_a_step_without_decodes_do_not_count():
    gain = DraftGain()
    run(gain, WINDOW, accepted=15)
    for step in (
        DecodeStep(StepWork(num_decode=DECODES), 1.0, with_drafts=True, num_drafts=DRAFTS),
        DecodeStep(StepWork(num_prefill=64), 1.0, with_drafts=False),
    ):
        gain.note(step, COST)

    assert run(gain, TRIAL + 1, accepted=15) == [False] * TRIAL + [True]


def test_a_plan_expects_the_usual_drafts():
    gain = DraftGain()
    run(gain, WINDOW - 1, accepted=20)
    assert gain.expected(COST).k3 == pytest.approx(4 * COST.k3)

    run(gain, 1, accepted=20)
    assert not gain.is_on
    assert gain.expected(COST) == COST
