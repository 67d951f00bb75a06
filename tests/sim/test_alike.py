"""Traffic unlike the traces: answers of one length, which catch up early or never; prompts that are late anyway."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.arrivals import bursts, generate
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import REFIT_A100, profile
from ballast_sim.replay.traffic import Arrival

CONFIG = PolicyConfig(slots=256, num_blocks=27_500, ttft=1.0, tpot=0.05, offline_share=0.0, objective=0.99)
PROMPTS = (200, 700, 1100, 1900, 2600)


def in_bursts(num_output: int) -> list[Arrival]:
    lengths = [Arrival(0.0, num_prompt, num_output) for num_prompt in PROMPTS]
    return generate(6.0, share=bursts(0.5, every=60.0, lasting=6.0), seconds=120.0, lengths=lengths, seed=3)


def run(online: Sequence[Arrival], *, is_alone: bool, cap: float | None = None):
    config = replace(CONFIG, max_interference=cap)
    jobs = [] if is_alone else [SimulatedJob.endless("offline", [Arrival(0.0, 3000, 100)])]
    scenario = Scenario(
        config=config,
        model=REFIT_A100,
        policy=Ballast,
        online=online,
        offline=lambda: list(jobs),
        seconds=120.0,
        cost=profile(REFIT_A100),
    )
    return report(simulate(scenario), config)


@pytest.mark.parametrize("num_output", [20, 40])
def test_prompts_of_online_leave_answers_that_are_all_alike_their_pace(num_output: int):
    alone = run(in_bursts(num_output), is_alone=True)

    assert alone.tpot_attainment >= 0.95


@pytest.mark.parametrize("cap", [None, 0.5], ids=["no cap", "a cap of 50 %"])
def test_offline_work_goes_on_whatever_online_loses(cap: float | None):
    beside = run(in_bursts(20), is_alone=False, cap=cap)

    assert beside.offline.total > 0
    assert beside.tpot_attainment >= 0.95


def test_offline_work_goes_on_beside_prompts_that_cannot_be_in_time():
    """Twelve thousand tokens take more than the second that a first token may take."""
    beside = run([Arrival(10.0 * index, 12_000, 20) for index in range(12)], is_alone=False)

    assert beside.ttft_attainment == 0
    assert beside.offline.total > 0
