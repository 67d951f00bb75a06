"""A tight but feasible deadline under bursty online: the forecast of the measured rates is right."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ballast_policy.jobs.deadline import JobWork, Rates, Verdict, feasible
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.simulation import Run, simulate
from ballast_sim.replay.traffic import Arrival

BURSTS = [Arrival(8.0 * burst + 0.02 * i, 60, 30) for burst in range(5) for i in range(30)]
"""Thirty conversations within 0.6 s, every 8 s, on eight slots."""
ITEM = Arrival(0.0, 80, 20)
DEADLINE = 14.0
NUM_TIGHT, NUM_OTHERS = 240, 240
ASKED_AT = 5.0


def make_jobs() -> list[SimulatedJob]:
    """Three jobs that came before the tight one; all are of one tenant."""
    others = [SimulatedJob.of(f"earlier {i}", [ITEM] * NUM_OTHERS, deadline=3600.0 * (i + 1)) for i in range(3)]
    return [*others, SimulatedJob.of("tight", [ITEM] * NUM_TIGHT, deadline=DEADLINE)]


@pytest.fixture
def run_jobs(make_scenario):
    def run_jobs(jobs: list[SimulatedJob], seconds: float) -> Run:
        return simulate(replace(make_scenario(online=BURSTS, seconds=seconds), offline=lambda: jobs))

    return run_jobs


def test_what_the_measured_rates_promise_is_kept(run_jobs):
    """Asked after a burst, from what all items did by then, as the heartbeats of workers would say."""
    result = run_jobs(make_jobs(), ASKED_AT)
    rates = Rates(items=sum(job.num_finished for job in result.jobs) / ASKED_AT)
    work = {
        job.name: JobWork(job.tenant, job.priority, job.deadline, int(job.num_items) - job.num_finished)
        for job in result.jobs
    }
    tight = work.pop("tight")

    promised = feasible(tight, work.values(), rates, now=ASKED_AT)
    assert promised.verdict is Verdict.YES
    beside = JobWork(tight.tenant, tight.priority, DEADLINE - 1, 3 * NUM_OTHERS)
    assert feasible(tight, [beside], rates, now=ASKED_AT).verdict is Verdict.AT_RISK
    assert feasible(tight, [], rates, now=DEADLINE - 1).verdict is Verdict.NO

    whole = run_jobs(make_jobs(), 40.0)
    (finished_at,) = (job.finished_at for job in whole.jobs if job.name == "tight")
    assert promised.seconds_needed is not None
    assert finished_at - ASKED_AT == pytest.approx(promised.seconds_needed, rel=0.3)


def test_a_tight_deadline_is_met_by_slack_and_missed_in_order_of_submission(run_jobs):
    untold = [replace(job, deadline=None) for job in make_jobs()]

    told, in_order = (run_jobs(jobs, 60.0).jobs[-1].finished_at for jobs in (make_jobs(), untold))

    assert told <= DEADLINE < in_order
