"""The simulator's replicas claim items in the order in which workers do."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from ballast_policy.jobs.choice import LEAST_AHEAD
from ballast_policy.snapshot import TenantShare
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.simulation import Run, simulate
from ballast_sim.replay.traffic import Arrival

ITEMS = [Arrival(0.0, 40, 10)] * 60
SLOTS = 8


@pytest.fixture
def serve(make_scenario):
    def serve(*jobs: SimulatedJob, seconds: float = 60.0, replicas: int = 1, **config) -> Run:
        scenario = make_scenario(seconds=seconds, replicas=replicas, config={"slots": SLOTS, **config})
        return simulate(replace(scenario, offline=lambda: list(jobs)))

    return serve


def names_of(run: Run) -> list[str]:
    """The jobs of the items in the order of their claims."""
    return [item.job for item in run.offline]


def test_a_higher_priority_is_claimed_first(serve):
    low, high = SimulatedJob.of("low", ITEMS), SimulatedJob.of("high", ITEMS)
    high.priority = 1

    assert names_of(serve(low, high)) == ["high"] * 60 + ["low"] * 60


def test_within_a_tenant_the_least_slack_is_claimed_first(serve):
    jobs = [
        SimulatedJob.of("none", ITEMS),
        SimulatedJob.of("late", ITEMS, deadline=900.0),
        SimulatedJob.of("soon", ITEMS, deadline=100.0),
    ]

    assert names_of(serve(*jobs)) == ["soon"] * 60 + ["late"] * 60 + ["none"] * 60


def test_more_work_is_less_slack_once_rates_are_measured(serve):
    """Due a moment later, and ten times the work: at first the deadline alone decides, then the work does."""
    small, large = SimulatedJob.of("small", ITEMS, deadline=100.0), SimulatedJob.of("large", ITEMS * 10, deadline=101.0)
    names = names_of(serve(small, large))

    assert names[:SLOTS] == ["small"] * SLOTS
    switch = names.index("large")
    assert switch < 60
    assert Counter(names[switch : switch + 60])["large"] > 50


def test_a_tenant_at_its_cap_leaves_the_slots_to_the_others(serve):
    run = serve(
        SimulatedJob.of("a", ITEMS, tenant="a"),
        SimulatedJob.of("b", ITEMS, tenant="b"),
        tenants={"a": TenantShare(max_slots=1)},
    )

    assert Counter(names_of(run)[: SLOTS + 2]) == {"a": 1 + LEAST_AHEAD, "b": SLOTS - 1}
    assert all(job.num_finished == 60 for job in run.jobs)


def test_replicas_claim_from_the_same_jobs_and_from_each_job_once(serve):
    run = serve(SimulatedJob.of("job", ITEMS), replicas=3)

    assert len({item.request.seq for item in run.offline}) == len(run.offline) == 60
    assert [job.num_finished for job in run.jobs] == [60]
