"""Drafts are off while they make tokens slower."""

from __future__ import annotations

import pytest

from ballast_policy.learning.cost import CostModel, StepWork
from ballast_vllm.drafts import PAUSE, WINDOW, DraftGain

DECODES, DRAFTS = 10, 30
MEMORY_BOUND = CostModel(k0=20e-3, k3=0.05e-3, is_trusted=True)
COMPUTE_BOUND = CostModel(k0=1e-3, k3=2e-3, is_trusted=True)


def run(gain: DraftGain, steps: int, cost: CostModel, *, accepted: int) -> None:
    for _ in range(steps):
        num_drafts = DRAFTS if gain.is_on else 0
        work = StepWork(num_decode=DECODES + num_drafts, decode_context=1000)
        gain.note(work, num_drafts=num_drafts, num_accepted=accepted if num_drafts else 0, cost=cost)


@pytest.mark.parametrize(
    ("cost", "accepted", "is_on"),
    [
        pytest.param(MEMORY_BOUND, 15, True, id="cheap and often accepted"),
        pytest.param(MEMORY_BOUND, 0, False, id="never accepted"),
        pytest.param(COMPUTE_BOUND, 15, False, id="dear"),
        pytest.param(COMPUTE_BOUND, 30, True, id="dear and always accepted"),
        pytest.param(CostModel(k0=1e-3, k3=2e-3), 0, True, id="unknown cost"),
    ],
)
def test_drafts_stay_on_only_while_they_pay(cost, accepted, is_on):
    gain = DraftGain()

    run(gain, WINDOW, cost, accepted=accepted)

    assert gain.is_on is is_on
    assert gain.per_decode == (3.0 if is_on else 0.0)


def test_drafts_are_tried_again_after_a_pause():
    gain = DraftGain()
    run(gain, WINDOW + PAUSE - 1, MEMORY_BOUND, accepted=0)
    assert not gain.is_on

    run(gain, 1, MEMORY_BOUND, accepted=0)
    assert gain.is_on
    run(gain, WINDOW, MEMORY_BOUND, accepted=20)
    assert gain.is_on


def test_a_plan_expects_the_usual_drafts():
    gain = DraftGain()
    run(gain, WINDOW, MEMORY_BOUND, accepted=20)

    assert gain.expected(MEMORY_BOUND).k3 == pytest.approx(4 * MEMORY_BOUND.k3)
