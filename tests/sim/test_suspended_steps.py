"""Steps that are suspended for newcomers, in virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.learning.cost import CostModel
from ballast_policy.plan import StepPlan
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.report import report
from ballast_sim.replay.simulated import SimulatedStep
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import BatchWork
from ballast_sim.replay.traffic import Arrival

COST = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)
POOL = [Arrival(0.0, 60 + 29 * i % 300, 40 + 11 * i % 50) for i in range(30)]
ONLINE = [Arrival(1.0 + 0.53 * i, 40 + 37 * i % 200, 10 + 7 * i % 40) for i in range(160)]
SCENARIO = Scenario(
    config=PolicyConfig(slots=64, num_blocks=2000, chunk_tokens=512, offline_share=0.0, ttft=0.5, tpot=0.05),
    model=COST,
    policy=Ballast,
    online=ONLINE,
    offline=lambda: [SimulatedJob.endless("offline", POOL)],
    seconds=90.0,
    warmup_seconds=30.0,
    cost=COST,
)


def make_step(**fields) -> SimulatedStep:
    usual = {"plan": StepPlan(), "items": [], "work": BatchWork(), "seconds": 0.4, "num_layers": 4}
    return SimulatedStep(**{**usual, **fields})


def test_a_step_is_suspended_at_the_end_of_a_layer_only():
    step = make_step(run_from=1.0)

    assert step.next_boundary(1.05) == pytest.approx(1.1)
    assert step.next_boundary(1.1) == pytest.approx(1.1)
    assert step.next_boundary(1.35) is None  # the last layer ends with the step

    step.suspend(1.1)

    assert step.seconds - step.done == pytest.approx(0.3)
    assert step.next_boundary(1.2) is None
    step.run_from = 2.0
    assert step.next_boundary(2.05) == pytest.approx(2.1)


def test_newcomers_have_their_first_token_sooner_and_nothing_is_computed_twice():
    suspended = simulate(SCENARIO)
    whole = simulate(replace(SCENARIO, config=replace(SCENARIO.config, can_suspend=False)))

    assert suspended.replicas[0].num_suspended > 10
    assert whole.replicas[0].num_suspended == 0
    assert report(suspended).ttft.p50 < 0.9 * report(whole).ttft.p50
    assert report(suspended).tpot_attainment == 1
    assert all(item.num_recomputed == 0 for item in suspended.online)
    (replica,) = suspended.replicas
    replica.kv.check()
