"""G1-G5 and G8 over random workloads: every plan of every run is held against every law."""

from __future__ import annotations

from hypothesis import given, settings
from laws import LAWS
from replay import Replay
from workloads import Workload, workloads

from ballast_policy.cost import CostModel


@settings(max_examples=400)
@given(workloads())
def test_every_plan_obeys_every_law_and_everything_finishes(workload: Workload):
    replay = Replay(workload.config, workload.arrivals, laws=LAWS)

    replay.run(workload.max_steps)


@settings(max_examples=150)
@given(workloads())
def test_an_untrusted_cost_model_keeps_every_other_law(workload: Workload):
    replay = Replay(workload.config, workload.arrivals, cost=CostModel(0.005, 5e-5, 0, 2e-4, 0), laws=LAWS)

    replay.run(workload.max_steps)
