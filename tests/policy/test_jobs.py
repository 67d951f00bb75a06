from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.backlog import Backlog
from ballast_policy.fairness.ledger import Ledger
from ballast_policy.fairness.tenant_slots import TenantSlots
from ballast_policy.jobs.choice import Candidate, in_submission_order, job_slack, share_out
from ballast_policy.jobs.deadline import JobWork, Rates
from ballast_policy.request import Request, RequestClass


def make_candidate(job_id: str = "job", **fields) -> Candidate:
    usual = {"tenant": "default", "priority": 0, "slack": inf, "prefix_key": None, "seq": 0.0, "waiting": 100}
    return Candidate(job_id=job_id, **{**usual, **fields})


def first_of(candidates, services=None) -> str:
    (job_id,) = share_out(candidates, services or {}, {}, count=1, cost=1)
    return job_id


A, B = make_candidate("a", tenant="a"), make_candidate("b", tenant="b")
HIGH = make_candidate("high", tenant="a", priority=1, waiting=3)
CLAIMS = {
    "no job": ([], {}, {}),
    "a job without waiting items": ([make_candidate(waiting=0)], {}, {}),
    "tenants take turns, not jobs": ([A, B, make_candidate("b2", tenant="b")], {}, {"a": 4, "b": 4}),
    "tenants have weights": ([A, B], {"weights": {"a": 3.0, "b": 1.0}}, {"a": 6, "b": 2}),
    "past service counts": ([A, B], {"services": {"a": 1000.0}}, {"b": 8}),
    "a tenant at its cap leaves the claim to the others": (
        [A, replace(HIGH, waiting=100), B],
        {"services": {"b": 1e9}, "free_slots": {"a": 2}},
        {"high": 2, "b": 6},
    ),
    "only a tenant above its cap": ([A, HIGH], {"free_slots": {"a": -1}}, {}),
    "a higher priority goes first, whatever was served": ([B, HIGH], {"services": {"a": 1e9}}, {"high": 3, "b": 5}),
    "within a tenant, the nearest deadline goes first": (
        [make_candidate("later", slack=50.0), make_candidate("sooner", slack=5.0, seq=9.0, waiting=2)],
        {},
        {"sooner": 2, "later": 6},
    ),
    "a tenant below its reservation goes first until it is not": (
        [A, B, replace(HIGH, waiting=2)],
        {"services": {"b": 1e9}, "count": 9, "cost": 1, "slots": TenantSlots({"b": 0.5}, {"a": 3, "b": 1})},
        {"high": 2, "b": 6, "a": 1},
    ),
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_claim_is_shared_out_among_jobs(name: str):
    candidates, asked, expected = CLAIMS[name]

    assert share_out(candidates, **{"services": {}, "weights": {}, "count": 8, "cost": 100, **asked}) == expected


def test_the_least_served_tenant_s_most_urgent_job_goes_first():
    jobs = [
        make_candidate("rich and urgent", tenant="rich", slack=-10.0),
        make_candidate("poor and relaxed", tenant="poor", slack=1000.0, seq=1),
        make_candidate("poor and urgent", tenant="poor", slack=5.0, seq=2),
        make_candidate("unimportant", tenant="poor", priority=-1, slack=-99.0),
    ]

    assert first_of(jobs, {"rich": 100.0}) == "poor and urgent"


def test_equal_jobs_go_by_submission_then_by_id():
    assert first_of([make_candidate("a", seq=2), make_candidate("b", seq=1)]) == "b"
    assert first_of([make_candidate("b"), make_candidate("a")]) == "a"


@given(
    waiting=st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(0, 9)), max_size=12),
    count=st.integers(0, 40),
)
def test_as_much_is_shared_out_as_there_is(waiting, count):
    candidates = [
        make_candidate(f"j{i}", tenant=tenant, priority=priority, waiting=n)
        for i, (tenant, priority, n) in enumerate(waiting)
    ]

    taken = share_out(candidates, {}, {}, count=count, cost=10)

    assert sum(taken.values()) == min(count, sum(n for _, _, n in waiting))
    assert all(0 < n <= next(c.waiting for c in candidates if c.job_id == job) for job, n in taken.items())


def test_jobs_without_a_prefix_key_are_no_group():
    jobs = [make_candidate("first", seq=1.0), make_candidate("second", seq=2.0)]

    assert [job.prefix_seq for job in in_submission_order(jobs)] == [1_000_000, 2_000_000]


def test_jobs_of_a_prefix_key_stand_together_where_its_first_one_was_submitted():
    jobs = [
        make_candidate("alone, second", seq=2.0),
        make_candidate("group, third", prefix_key=7, seq=3.0),
        make_candidate("group, first", prefix_key=7, seq=1.0),
        make_candidate("small hash, last", prefix_key=1, seq=4.0),
        make_candidate("group of another tenant", tenant="other", prefix_key=7, seq=5.0),
    ]
    order = []
    while jobs:
        order.append(first_of(in_submission_order(jobs)))
        jobs = [job for job in jobs if job.job_id != order[-1]]

    # Once the first job of the group is over, the group stands where its next one was submitted.
    assert order == [
        "group, first",
        "alone, second",
        "group, third",
        "small hash, last",
        "group of another tenant",
    ]
    both = [
        make_candidate("b", prefix_key=7, seq=1.0),
        make_candidate("a", seq=2.0),
        make_candidate("c", prefix_key=7, seq=3.0),
    ]
    assert [job.prefix_seq for job in in_submission_order(both)] == [1_000_000, 2_000_000, 1_000_000]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(-1, 1), st.sampled_from([inf, 0.0, 9.0]), st.integers(0, 1)),
        min_size=1,
        max_size=12,
    ),
    st.floats(0, 100),
)
def test_jobs_are_chosen_in_the_order_in_which_their_requests_would_wait(rows, served: float):
    ledger = Ledger()
    ledger.charge("a", served)
    backlog = Backlog()
    for seq, (tenant, priority, slack, group) in enumerate(rows):
        backlog.add(
            Request(
                seq, RequestClass.OFFLINE, 0.0, 1, 1, tenant=tenant, priority=priority, slack=slack, prefix_seq=group
            )
        )
    jobs = [
        make_candidate(str(seq), tenant=tenant, priority=priority, slack=slack, prefix_seq=group, seq=seq)
        for seq, (tenant, priority, slack, group) in enumerate(rows)
    ]

    (first,) = backlog.head(1, {RequestClass.OFFLINE: ledger})

    assert str(first.seq) == first_of(jobs, ledger.services)


@pytest.mark.parametrize(
    ("work", "rates", "expected"),
    [
        pytest.param({}, Rates(items=2.0), 850.0, id="by items"),
        pytest.param({"output_tokens": 3000}, Rates(2.0, 10.0), 600.0, id="by tokens where they are known"),
        pytest.param({"output_tokens": 3000}, Rates(items=2.0), 850.0, id="by items where no rate of tokens is"),
        pytest.param({}, Rates(items=0.05), -1100.0, id="late already"),
        pytest.param({}, Rates(), 900.0, id="no rate measured yet"),
        pytest.param({"items": 0, "output_tokens": 0}, Rates(items=2.0), 900.0, id="nothing left"),
        pytest.param({"deadline": None}, Rates(items=2.0), inf, id="no deadline"),
    ],
)
def test_slack_is_the_time_left_beyond_the_work(work: dict, rates: Rates, expected: float):
    left = JobWork(**{"tenant": "a", "priority": 0, "deadline": 1000.0, "items": 100} | work)

    assert expected == job_slack(left, rates, now=100.0)
