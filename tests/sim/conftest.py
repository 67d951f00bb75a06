"""What the simulator's tests build from."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.traffic import Arrival

# In importlib mode pytest leaves sys.path alone, and the laws of the policy are held against plans here, too.
sys.path.insert(0, str(Path(__file__).parents[1] / "policy"))

COST = CostModel(0.010, 1e-4, 1e-8, 2e-4, 1e-7, is_trusted=True)
"""A small engine: 10 ms a step, 0.1 ms a prefill token."""


@pytest.fixture
def make_scenario():
    def make(
        *, online: Iterable[Arrival] = (), offline: Iterable[Arrival] = (), config: dict | None = None, **fields
    ) -> Scenario:
        online, offline = list(online), list(offline)
        settings = {"slots": 8, "num_blocks": 400, "chunk_tokens": 128, "ttft": 1.0, "tpot": 0.05, **(config or {})}
        usual = {
            "config": PolicyConfig(**settings),
            "model": COST,
            "policy": Ballast,
            "online": online,
            "offline": lambda: [SimulatedJob.of("job", offline)] if offline else [],
            "cost": COST,
        }
        return Scenario(**{**usual, **fields})

    return make


@pytest.fixture
def run(make_scenario):
    def run(**fields) -> Run:
        return simulate(make_scenario(**fields))

    return run
