"""The simulator against vLLM with Ballast's scheduler: by one clock they compute the same steps."""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import pytest

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.traffic import excerpt, read, read_lengths
from ballast_sim.validation.engine_replay import ReplayClock
from ballast_sim.validation.validator import noise
from ballast_vllm.engine_replay import VllmUnderTest

COST = CostModel(4e-3, 6e-5, 2.5e-8, 1e-4, 2e-7, is_trusted=True)
CONFIG = PolicyConfig(slots=8, num_blocks=1, chunk_tokens=64, ttft=0.15, tpot=0.03)


def shortened(lengths):
    return [replace(a, num_prompt=ceil(a.num_prompt / 32), num_output=ceil(a.num_output / 32)) for a in lengths]


@pytest.mark.timeout(900)
def test_by_one_clock_simulator_and_vllm_compute_the_same_steps(tiny_model, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    online = excerpt(shortened(read(ONLINE_TRACE)), wanted=500.0, seconds=3.0)
    offline = shortened(read_lengths(OFFLINE_TRACE))
    longest = max(arrival.num_tokens for arrival in (*online, *offline))
    engine = VllmUnderTest(tiny_model, CONFIG, longest=longest)

    replays = [engine.replay(online, offline, ReplayClock("model", COST)) for _ in range(2)]
    scenario = Scenario(
        config=replace(engine.config, can_suspend=False),
        model=COST,
        policy=Ballast,
        online=online,
        offline=lambda: [SimulatedJob.endless("offline", offline)],
        seconds=online[-1].seconds + 5.0,
        cost=COST,
    )
    waits = [item.first_token - item.request.arrival for item in simulate(scenario).online]

    assert engine.config.block_tokens == 32
    assert engine.config.chunk_tokens == CONFIG.chunk_tokens
    assert noise(replays, "cpu") > 0
    assert {step.work.num_decode > 0 and step.work.num_prefill > 0 for step in replays[0].steps} == {True, False}
    assert len(waits) == len(replays[0].waits) == len(online)
    assert sum(waits) == pytest.approx(sum(replays[0].waits), rel=0.05)
