"""G1-G5 and G8 over random workloads: every plan of every run is held against every law."""

from __future__ import annotations

import pytest
from fake_engine import FakeEngine
from hypothesis import given, settings
from laws import lawful, the_reservation_is_what_residents_and_backlog_say
from workloads import EXACT, Workload, costs, snapshots, workloads

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel, StepWork, attended
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import EngineSnapshot

pytestmark = pytest.mark.timeout(7200)  # HYPOTHESIS_PROFILE=thorough runs for half an hour or more

EXAMPLES = settings().max_examples
"""100 by default; HYPOTHESIS_PROFILE=thorough asks for many more."""


def run(workload: Workload, host: Host) -> None:
    engine = FakeEngine(host, workload.arrivals)
    while engine.has_work:
        assert engine.num_steps < workload.max_steps, "requests did not end"
        dispatch = engine.begin()
        the_reservation_is_what_residents_and_backlog_say(engine.host, dispatch)
        engine.compute(dispatch)
    nothing_is_left(engine)


def nothing_is_left(engine: FakeEngine) -> None:
    """G8: whatever came and went, the pool is whole and nobody is counted any more."""
    host = engine.host
    assert engine.kv.num_free == host.config.num_blocks, "blocks are missing"
    engine.kv.check()
    assert not host.residents
    assert not len(host.backlog)
    assert host.reservation.is_met
    assert not host.reservation.in_use
    assert not any(host.count(request_class) for request_class in RequestClass)


@settings(max_examples=3 * EXAMPLES)
@given(workloads())
def test_every_plan_obeys_every_law_and_everything_finishes(workload: Workload):
    run(workload, workload.host(lawful, EXACT))


@settings(max_examples=EXAMPLES)
@given(workloads(), costs)
def test_a_cost_model_that_is_wrong_or_untrusted_keeps_every_law(workload: Workload, cost: CostModel):
    run(workload, workload.host(lawful, cost))


@settings(max_examples=EXAMPLES)
@given(workloads())
def test_a_cost_model_that_is_fitted_on_the_way_keeps_every_law(workload: Workload):
    host = workload.host(lawful, None)
    for size in range(1, 13):  # hardly too few to be trusted
        for work in (StepWork(size, attended(0, size)), StepWork(0, 0.0, size, 20 * size)):
            host.observed(work, EXACT.predict(work))

    run(workload, host)


@settings(max_examples=6 * EXAMPLES)
@given(snapshots())
def test_a_plan_for_any_state_obeys_every_law(snapshot: EngineSnapshot):
    lawful(snapshot)
