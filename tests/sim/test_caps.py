"""A cap on interference holds for the median and the 99th percentile, with a cost model that is fitted on the way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.report import Run
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import REFIT_A100
from ballast_sim.replay.traffic import Arrival

CONFIG = PolicyConfig(slots=64, num_blocks=27_500, ttft=1.0, tpot=0.05, offline_share=0.0)
SECONDS, LEARNS = 200.0, 60.0
"""Length of a run, and the time at its start in which the feedback learns."""


@cache
def traffic() -> Sequence[Arrival]:
    def drawn() -> Iterator[Arrival]:
        random = Random(2)
        at = random.expovariate(3.0)
        while at < SECONDS - 30.0:
            num_prompt, num_output = random.lognormvariate(6.5, 0.8), random.lognormvariate(4.5, 0.7)
            yield Arrival(at, int(min(4000, num_prompt)), int(min(500, max(2, num_output))))
            at += random.expovariate(3.0)

    return list(drawn())


def run(cap: float | None, *, can_suspend: bool) -> Run:
    jobs = [] if cap is None else [SimulatedJob.endless("offline", [Arrival(0.0, 3000, 100)])]
    config = replace(CONFIG, max_interference=cap, can_suspend=can_suspend)
    # A step can be suspended between two layers.
    layers = 32 if can_suspend else 1
    scenario = Scenario(
        config, REFIT_A100, Ballast, online=traffic(), offline=lambda: list(jobs), seconds=SECONDS, num_layers=layers
    )
    return simulate(scenario)


def latencies(found: Run) -> list[float]:
    """The median and the 99th percentile of TTFT, and of TPOT."""
    late = [item for item in found.online if item.request.arrival > LEARNS]
    ttft = sorted(item.first_token - item.request.arrival for item in late)
    tpot = sorted((item.last_token - item.first_token) / (item.num_output - 1) for item in late if item.num_output > 1)
    return [values[int(share * len(values))] for values in (ttft, tpot) for share in (0.5, 0.99)]


@cache
def alone(*, can_suspend: bool) -> list[float]:
    return latencies(run(None, can_suspend=can_suspend))


@pytest.mark.parametrize("can_suspend", [True, False], ids=["suspends steps", "no suspension"])
@pytest.mark.parametrize("cap", [0.10, 0.25])
def test_a_cap_holds_for_each_latency_and_is_used(cap: float, *, can_suspend: bool):
    beside = run(cap, can_suspend=can_suspend)

    added = [
        found / before - 1 for found, before in zip(latencies(beside), alone(can_suspend=can_suspend), strict=True)
    ]
    assert max(added) <= cap
    assert added[2] >= cap / 2, "the median of TPOT leaves half of the cap"
    assert sum(item.num_output for item in beside.offline) > 0
