"""G1-G5 and G8 over random workloads: every plan of every run is held against every law."""

from __future__ import annotations

from hypothesis import given, settings
from laws import LAWS
from replay import Replay
from workloads import Workload, snapshots, workloads

from ballast_policy.cost import CostModel
from ballast_policy.plan import Reason
from ballast_policy.planner import plan
from ballast_policy.snapshot import Snapshot

EXAMPLES = settings().max_examples
"""100 by default; HYPOTHESIS_PROFILE=thorough asks for many more."""


@settings(max_examples=3 * EXAMPLES)
@given(workloads())
def test_every_plan_obeys_every_law_and_everything_finishes(workload: Workload):
    replay = Replay(
        workload.config,
        workload.arrivals,
        laws=LAWS,
        expectation=workload.expectation,
        allowance=workload.allowance,
    )

    replay.run(workload.max_steps)


@settings(max_examples=EXAMPLES)
@given(workloads())
def test_an_untrusted_cost_model_keeps_every_other_law(workload: Workload):
    replay = Replay(
        workload.config,
        workload.arrivals,
        cost=CostModel(0.005, 5e-5, 0, 2e-4, 0),
        laws=LAWS,
        expectation=workload.expectation,
        allowance=workload.allowance,
    )

    replay.run(workload.max_steps)


class Still:
    """Stands in for a run in which nothing happens."""

    planner = staticmethod(plan)


@settings(max_examples=6 * EXAMPLES)
@given(snapshots())
def test_a_plan_for_any_state_obeys_every_law_and_moves(snapshot: Snapshot):
    decided = plan(snapshot)

    for law in LAWS:
        law(Still, snapshot, decided)
    reasons = {because.reason for because in decided.because}
    assert decided.grants or decided.preempt or reasons <= {Reason.STEP_BUDGET, Reason.TENANT_CAP}
