from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.backlog import Backlog
from ballast_policy.claim import Candidate, choose, in_submission_order, laxity
from ballast_policy.fairness import Ledger
from ballast_policy.request import Request, RequestClass


def make_candidate(job_id: str = "job", **fields) -> Candidate:
    usual = {"tenant": "default", "priority": 0, "laxity": inf, "prefix_group": 0, "seq": 0.0, "waiting": 1}
    return Candidate(job_id=job_id, **{**usual, **fields})


def test_a_job_without_items_to_give_is_not_chosen():
    assert choose([make_candidate(waiting=0)], Ledger()) is None
    assert choose([], Ledger()) is None


def test_the_least_served_tenant_s_most_urgent_job_goes_first():
    ledger = Ledger()
    ledger.charge("rich", 100)
    jobs = [
        make_candidate("rich and urgent", tenant="rich", laxity=-10.0),
        make_candidate("poor and relaxed", tenant="poor", laxity=1000.0, seq=1),
        make_candidate("poor and urgent", tenant="poor", laxity=5.0, seq=2),
        make_candidate("unimportant", tenant="poor", priority=-1, laxity=-99.0),
    ]

    assert choose(jobs, ledger).job_id == "poor and urgent"


def test_equal_jobs_go_by_submission_then_by_id():
    assert choose([make_candidate("a", seq=2), make_candidate("b", seq=1)], Ledger()).job_id == "b"
    assert choose([make_candidate("b"), make_candidate("a")], Ledger()).job_id == "a"


def test_jobs_of_a_prefix_group_stand_together_where_its_first_one_was_submitted():
    jobs = [
        make_candidate("alone, second", seq=2.0),
        make_candidate("group, third", prefix_group=7, seq=3.0),
        make_candidate("group, first", prefix_group=7, seq=1.0),
        make_candidate("small hash, last", prefix_group=1, seq=4.0),
        make_candidate("group of another tenant", tenant="other", prefix_group=7, seq=5.0),
    ]
    order = []
    while jobs:
        order.append(choose(in_submission_order(jobs), Ledger()))
        jobs = [job for job in jobs if job.job_id != order[-1].job_id]

    # Once the first job of the group is over, the group stands where its next one was submitted.
    names = [job.job_id for job in order]
    assert names == [
        "group, first",
        "alone, second",
        "group, third",
        "small hash, last",
        "group of another tenant",
    ]
    both = [
        make_candidate("b", prefix_group=7, seq=1.0),
        make_candidate("a", seq=2.0),
        make_candidate("c", prefix_group=7, seq=3.0),
    ]
    assert [job.prefix_group for job in in_submission_order(both)] == [1_000_000, 2_000_000, 1_000_000]


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
                seq, RequestClass.OFFLINE, 0.0, 1, 1, tenant=tenant, priority=priority, laxity=slack, prefix_group=group
            )
        )
    jobs = [
        make_candidate(str(seq), tenant=tenant, priority=priority, laxity=slack, prefix_group=group, seq=seq)
        for seq, (tenant, priority, slack, group) in enumerate(rows)
    ]

    (first,) = backlog.head(1, {RequestClass.OFFLINE: ledger})

    assert str(first.seq) == choose(jobs, ledger).job_id


@pytest.mark.parametrize(
    ("deadline", "rate", "expected"),
    [
        pytest.param(1000.0, 2.0, 850.0, id="what is left beside the work"),
        pytest.param(1000.0, 0.05, -1100.0, id="late already"),
        pytest.param(1000.0, None, 900.0, id="no rate measured yet"),
        pytest.param(1000.0, 0.0, 900.0, id="a rate of zero is no measurement"),
        pytest.param(None, 2.0, inf, id="no deadline"),
    ],
)
def test_laxity(deadline: float | None, rate: float | None, expected: float):
    assert expected == laxity(deadline, now=100.0, remaining_items=100, rate=rate)
