from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from queue_objects import make_status

from ballast_policy.jobs.choice import job_slack
from ballast_queue.job import MOST_ACTIVE, Job, JobHead, JobState, Outlook, RequestCounts
from ballast_worker.forecast import Forecast, duration, rates_of, work_of


def make_worker(*, items: float = 0.0, tokens: float = 0.0, **fields: bool):
    return make_status(offline_items_per_second=items, offline_tokens_per_second=tokens, **fields)


def make_job(job_id: str = "j", *, items: int = 10, output: int = 1000, deadline: float | None = 100, **given) -> Job:
    counts = RequestCounts(total=items, waiting=items)
    fields = {"tenant": "a", "state": JobState.IN_PROGRESS, "created": 0.0}
    return Job(id=job_id, deadline=deadline, output_left=output, counts=counts, **(fields | given))


def outlook(job: Job, *others: Job, workers=None, now: float = 0, weights=None):
    workers = [make_worker(items=1, tokens=100)] if workers is None else workers
    return Forecast([job, *others], workers, now, weights or {}).of(job)


def test_without_a_measured_rate_the_outlook_is_unknown():
    none, silent = (outlook(make_job(), workers=workers) for workers in ([], [make_worker(), make_worker()]))

    assert none == (Outlook.UNKNOWN, "no ready worker has published its rates to this queue")
    because = "no rate is known yet: no item of 2 workers has ended while others waited for slots"
    assert silent == (Outlook.UNKNOWN, because)


def test_workers_that_drain_or_are_not_ready_do_not_count():
    workers = [make_worker(items=1, tokens=10, is_draining=True), make_worker(items=1, tokens=10, is_ready=False)]

    assert rates_of(workers).items == 0


def test_a_worker_that_measured_nothing_yet_counts_as_the_others():
    rates = rates_of([make_worker(items=1, tokens=60), make_worker(items=2, tokens=40), make_worker()])
    only_tokens = rates_of([make_worker(tokens=60), make_worker(items=2, tokens=40)])

    assert (rates.items, rates.output_tokens) == (4.5, 150)
    assert (only_tokens.items, only_tokens.output_tokens) == (4, 100)


def test_the_rate_of_tokens_needs_no_rate_of_items():
    workers = [make_worker(tokens=0.4)]

    assert outlook(make_job(deadline=10_000), workers=workers) == (
        Outlook.YES,
        "it needs 41m40s at 0.4 output tokens/s of 1 worker, and 2h46m remain",
    )
    assert outlook(make_job(output=0), workers=workers)[0] is Outlook.UNKNOWN


@pytest.mark.parametrize(
    ("deadline", "wanted"), [(10, Outlook.YES), (9.9, Outlook.NO)], ids=["just in time", "a moment too late"]
)
def test_a_job_alone_takes_its_tokens_at_the_measured_rate(deadline, wanted):
    assert outlook(make_job(deadline=deadline))[0] is wanted


def test_the_sentence_has_the_figures():
    ahead = make_job("first", output=9000, priority=1)

    assert outlook(make_job(deadline=60), ahead) == (
        Outlook.AT_RISK,
        "it needs 10s at 100 output tokens/s of 1 worker after 1m30s of work before it, and 1m remain",
    )


def test_the_sentence_states_that_not_all_jobs_are_known():
    others = [make_job(f"o{i}") for i in range(MOST_ACTIVE - 1)]

    assert outlook(make_job(), *others)[1].endswith("; only the 2,000 jobs with the nearest deadlines count")
    assert "; only" not in outlook(make_job(), *others[1:])[1]


def test_output_that_nobody_knows_is_counted_in_items():
    found, because = outlook(make_job(output=0, items=30), make_job("twin", output=0, items=10, deadline=50))

    assert found is Outlook.YES
    assert because == "it needs 30s at 1 item/s of 1 worker after 10s of work before it, and 1m40s remain"


@pytest.mark.parametrize("state", [JobState.PAUSED, JobState.CANCELLING, JobState.FINALIZING])
def test_who_claims_nothing_stands_before_nobody(state):
    assert outlook(make_job(deadline=11), make_job("held", priority=1, output=10**6, state=state))[0] is Outlook.YES


def test_a_paused_job_is_judged_as_if_it_went_on():
    assert outlook(make_job(deadline=5, state=JobState.PAUSED))[0] is Outlook.NO


def test_a_tenant_with_its_weight_gets_its_share():
    other = make_job("b", tenant="b", output=10**6, deadline=None)

    assert outlook(make_job(deadline=19), other)[0] is Outlook.AT_RISK
    assert outlook(make_job(deadline=21), other)[0] is Outlook.YES
    assert outlook(make_job(deadline=19), other, weights={"a": 3.0})[0] is Outlook.YES


@given(
    others=st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(0, 50), st.sampled_from([0, 500])), max_size=8
    ),
    deadline=st.integers(1, 200),
)
def test_more_time_and_less_work_before_it_never_make_it_worse(others, deadline):
    jobs = [
        make_job(f"o{i}", tenant=tenant, priority=priority, items=items, output=output, deadline=None)
        for i, (tenant, priority, items, output) in enumerate(others)
    ]
    badness = [Outlook.YES, Outlook.AT_RISK, Outlook.NO]
    tight = badness.index(outlook(make_job(deadline=deadline), *jobs)[0])

    assert badness.index(outlook(make_job(deadline=deadline + 10), *jobs)[0]) <= tight
    assert badness.index(outlook(make_job(deadline=deadline), *jobs[1:])[0]) <= tight


def test_a_job_and_its_head_state_the_same_work():
    job = make_job()
    head = JobHead("j", "a", 0, created=0, deadline=100, waiting=10, remaining=10, output_left=1000)

    assert work_of(job) == work_of(head)
    assert job_slack(work_of(head), rates_of([make_worker(items=1, tokens=100)]), 20) == 70


def test_spans_are_said_in_their_two_largest_units():
    assert [duration(seconds) for seconds in (0.2, 59, 60, 90, 3600, 90061)] == [
        "0s",
        "59s",
        "1m",
        "1m30s",
        "1h",
        "1d1h",
    ]
