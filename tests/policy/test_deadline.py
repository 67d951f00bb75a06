"""What a job is told of its deadline, held against a queue that is served as the policy promises."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.jobs.deadline import JobWork, Rates, Verdict, feasible, seconds_of

TEN_A_SECOND = Rates(items=10.0, output_tokens=1000.0)


def make_work(items: int = 100, **fields) -> JobWork:
    usual = {"tenant": "a", "priority": 0, "deadline": 100.0}
    return JobWork(items=items, **{**usual, **fields})


@pytest.mark.parametrize(
    ("job", "others", "needed", "verdict"),
    [
        pytest.param(make_work(), [], 10, Verdict.YES, id="alone"),
        pytest.param(make_work(deadline=9.0), [], 10, Verdict.NO, id="alone too late"),
        pytest.param(make_work(output_tokens=5000), [], 5, Verdict.YES, id="tokens are known better than items"),
        pytest.param(make_work(), [make_work(priority=1, items=50)], 15, Verdict.YES, id="a higher priority"),
        pytest.param(make_work(), [make_work(priority=-1)], 10, Verdict.YES, id="a lower priority"),
        pytest.param(make_work(), [make_work(tenant="b", items=900)], 20, Verdict.YES, id="half of the time"),
        pytest.param(make_work(), [make_work(tenant="b", items=20)], 12, Verdict.YES, id="a small one beside it"),
        pytest.param(make_work(deadline=15.0), [make_work(tenant="b")], 20, Verdict.AT_RISK, id="beside another"),
        pytest.param(make_work(), [make_work(deadline=90.0)], 20, Verdict.YES, id="an earlier one of the tenant"),
        pytest.param(make_work(), [make_work(deadline=None)], 10, Verdict.YES, id="one of the tenant without deadline"),
        pytest.param(make_work(), [make_work(deadline=120.0)], 10, Verdict.YES, id="a later one of the tenant"),
        pytest.param(make_work(), [make_work(500, deadline=120.0)], 60, Verdict.YES, id="a later one with less slack"),
        pytest.param(make_work(deadline=None), [make_work(50)], 15, Verdict.YES, id="no deadline"),
        pytest.param(make_work(0, deadline=1.0), [], 0, Verdict.YES, id="nothing left to do"),
        pytest.param(make_work(0, deadline=1.5), [make_work(priority=1)], 10, Verdict.AT_RISK, id="only others work"),
        pytest.param(make_work(deadline=11.0), [], 10, Verdict.YES, id="just in time"),
        pytest.param(make_work(deadline=11.0), [make_work(tenant="b")], 20, Verdict.AT_RISK, id="just in time alone"),
        pytest.param(make_work(), [make_work(deadline=100.5)], 10, Verdict.YES, id="an equal one due just after it"),
    ],
)
def test_a_job_needs_the_time_of_what_goes_before_it_and_beside_it(job, others, needed, verdict):
    answer = feasible(job, others, TEN_A_SECOND, now=1.0)

    assert (answer.seconds_needed, answer.verdict) == (needed, verdict)
    assert answer.seconds_left == (inf if job.deadline is None else job.deadline - 1.0)


def test_weights_divide_the_time_between_tenants():
    others = [make_work(9000, tenant="b")]
    answer = feasible(make_work(), others, TEN_A_SECOND, 0.0, {"a": 4.0, "b": 1.0})

    assert answer.seconds_needed == pytest.approx(12.5)
    assert answer.seconds_ahead == pytest.approx(2.5)


@pytest.mark.parametrize(
    ("job", "others", "rates"),
    [
        (make_work(), [], Rates()),
        (make_work(), [], Rates(output_tokens=100.0)),
        (make_work(output_tokens=9), [make_work()], Rates(output_tokens=100.0)),
    ],
)
def test_without_a_rate_for_the_work_nothing_is_known(job, others, rates):
    answer = feasible(job, others, rates, now=0.0)

    assert (answer.verdict, answer.seconds_needed, answer.seconds_left) == (Verdict.UNKNOWN, None, 100.0)


def test_work_takes_the_time_of_its_tokens_or_of_its_items_without_a_rate_of_tokens():
    work = make_work(10, output_tokens=10)

    assert [seconds_of(work, rates) for rates in (Rates(0.5, 0.25), Rates(0.5), Rates())] == [40.0, 20.0, None]


def test_a_bound_of_tokens_refuses_no_job_that_is_in_time_by_its_items():
    """Answers are usually shorter than `max_tokens`: a bound can only warn."""
    answer = feasible(make_work(deadline=11.0, output_tokens=50_000), [], TEN_A_SECOND, now=0.0)

    assert (answer.seconds_needed, answer.verdict) == (50, Verdict.AT_RISK)


works = st.builds(
    JobWork,
    tenant=st.sampled_from("abc"),
    priority=st.integers(0, 2),
    deadline=st.none() | st.integers(1, 60).map(float),
    items=st.integers(0, 100),
)


@given(works, st.lists(works, max_size=6), works)
def test_more_work_or_less_capacity_never_makes_a_deadline_safer(job, others, another):
    rates = Rates(items=10.0)
    answer = feasible(job, others, rates, now=0.0)
    crowded = feasible(job, [*others, another], rates, now=0.0)
    slower = feasible(job, others, Rates(items=5.0), now=0.0)

    assert crowded.seconds_needed >= answer.seconds_needed - 1e-9
    assert slower.seconds_needed >= answer.seconds_needed - 1e-9


@given(
    works,
    st.lists(works, max_size=6),
    st.fixed_dictionaries({tenant: st.sampled_from([0.5, 1.0, 3.0]) for tenant in "abc"}),
)
def test_a_job_is_done_within_the_predicted_time(job, others, weights):
    answer = feasible(job, others, Rates(items=10.0), 0.0, weights)

    assert finished_at(job, others, 10.0, weights) <= answer.seconds_needed + 1e-6


def finished_at(job: JobWork, others: list[JobWork], rate: float, weights: dict[str, float]) -> float:
    """Serve the queue as a fluid: bands in order, tenants by weight, their jobs by deadline, the asked one last."""
    queues: dict[tuple[int, str], list[list[float]]] = {}
    order = sorted([*others, job], key=lambda work: (work.deadline or inf, work is job))
    for work in order:
        queues.setdefault((-work.priority, work.tenant), []).append([float(work.items), work is job])
    now = 0.0
    while True:
        queues = {key: left for key, jobs in queues.items() if (left := [entry for entry in jobs if entry[0] > 1e-9])}
        if not any(entry[1] for jobs in queues.values() for entry in jobs):
            return now
        band = min(priority for priority, _ in queues)
        served = {key[1]: jobs[0] for key, jobs in queues.items() if key[0] == band}
        total = sum(weights[tenant] for tenant in served)
        speeds = {tenant: rate * weights[tenant] / total for tenant in served}
        step = min(entry[0] / speeds[tenant] for tenant, entry in served.items())
        for tenant, entry in served.items():
            entry[0] -= speeds[tenant] * step
        now += step


def test_the_fluid_would_see_a_share_that_is_promised_too_large():
    job, others = make_work(), [make_work(9000, tenant="b")]

    assert finished_at(job, others, 10.0, {"a": 1.0, "b": 1.0}) == pytest.approx(20)
    assert finished_at(replace(job, priority=1), others, 10.0, {"a": 1.0, "b": 1.0}) == pytest.approx(10)
