"""The online requests that are deferred if not all can have their first token in time."""

from __future__ import annotations

from itertools import combinations
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.step.triage import Pace, all_in_time, find_late, in_time_first

ONLINE = RequestClass.ONLINE
COST = CostModel(k0=0.0, k1=1.0, is_trusted=True)
"""One second for each token."""


def make(seq: int, tokens: int, due: float, **fields) -> Request:
    return Request(seq, ONLINE, 0.0, tokens, 8, ttft=due, num_tokens=tokens, **fields)


def ends_in_time(order: list[Request]) -> bool:
    clock = 0.0
    for request in order:
        clock += request.num_tokens
        if clock > request.ttft:
            return False
    return True


LATER = {"soon": 2.0, "start": 2.0}
CASES = {
    "the longest prompt, if it would make others late": ([(8, 10.0), (2, 10.0), (2, 11.0)], {}, {0}),
    "none if all are in time": ([(2, 10.0), (2, 10.0), (2, 11.0)], {}, set()),
    "a prompt that is too long for its own TTFT": ([(8, 5.0), (2, 5.0)], {}, {0}),
    "an overdue request takes no time from the others": (
        [(4, 1.0), (4, 6.0), (4, 6.0)],
        LATER,
        {0, 2},
    ),
    "an overdue request, whatever time was saved up": ([(2, 5.0)], {"soon": 6.0}, {0}),
    "a single token takes no time and is never deferred": ([(1, 0.5), (8, 5.0)], {}, {1}),
    "enough time beside decodes": ([(3, 6.0), (2, 6.0)], {}, set()),
    "decodes make prefill slower": ([(3, 6.0), (2, 6.0)], {"speed": 0.5}, {0}),
    "the time that decodes can wait is for prefill": ([(3, 6.0), (2, 6.0)], {"speed": 0.5, "start": -4.0}, set()),
    "prefill takes its time however long decodes can wait": ([(3, 4.0), (2, 4.0)], {"start": -9.0}, {0}),
    "only the rest of a prompt takes time": ([(8, 2.0, {"phase": Phase.RUNNING, "num_computed": 6})], {}, set()),
    "a deferred prompt leaves its time to later ones": ([(8, 10.0), (3, 3.0), (6, 9.0)], {}, {0}),
    "an answer that has begun takes its time": ([(4, 1.0, {"num_output": 2}), (2, 5.0)], {}, {1}),
    "requests without an SLO are never deferred": ([(4, inf), (2, 7.0)], {}, set()),
    "a request that is due before earlier ones, if no other can be": ([(3, 9.0), (3, 9.0), (2, 1.0)], {}, {2}),
    "another tenant makes no room": ([(6, 9.0, {"tenant": "a"}), (4, 9.0, {"tenant": "b"})], {}, {1}),
    "another priority makes no room": ([(6, 9.0, {"priority": 1}), (4, 9.0)], {}, {1}),
    "the own tenant makes room": ([(6, 9.0, {"tenant": "a"}), (4, 9.0, {"tenant": "a"})], {}, {0}),
}
"""Tokens, seconds until the request is due, and other fields of requests in order; the pace; and which are deferred."""


@pytest.mark.parametrize("name", CASES)
def test_requests_that_cannot_all_be_in_time_are_deferred(name: str):
    drawn, pace, deferred = CASES[name]
    order = [make(seq, tokens, due, **dict(*fields)) for seq, (tokens, due, *fields) in enumerate(drawn)]
    late = find_late(order, COST, Pace(**{"soon": 0.0, "start": 0.0, "speed": 1.0, **pace}))

    assert {request.seq for request in late} == deferred


def test_prompts_pay_once_for_experts_and_not_for_those_that_decodes_touch():
    cost = CostModel(k1=0.25, k5=2.0, missed=0.5, is_trusted=True)  # two seconds for eight tokens, and two for experts
    order = {due: [make(1, 8, due), make(2, 8, due)] for due in (4.5, 5.5, 6.5)}

    assert all_in_time(order[6.5], cost, Pace(0.0, 0.0, 1.0))
    assert not all_in_time(order[5.5], cost, Pace(0.0, 0.0, 1.0))
    assert all_in_time(order[4.5], cost, Pace(0.0, 0.0, 1.0, beside=10))
    assert not find_late(order[6.5], cost, Pace(0.0, 0.0, 1.0))
    assert len(find_late(order[5.5], cost, Pace(0.0, 0.0, 1.0))) == 1
    assert not find_late(order[4.5], cost, Pace(0.0, 0.0, 1.0, beside=10))
    assert len(find_late([make(3, 8, 0.1), make(4, 8, 2.5)], cost, Pace(0.0, 0.0, 1.0))) == 2, "none reads them"
    assert all_in_time([make(1, 8, 6.75), make(2, 2, 6.75), make(3, 8, 6.75)], cost, Pace(0.0, 0.0, 1.0))
    assert not find_late([make(1, 8, 6.5, num_output=2), make(2, 8, 6.5)], cost, Pace(0.0, 0.0, 1.0))


def test_deferred_requests_change_places_within_their_tenant_and_priority():
    a1, b1, a2, b2 = (make(i, 1, 1.0, tenant=tenant) for i, tenant in enumerate("abab"))

    assert in_time_first([a1, b1, a2, b2], {a1}) == [a2, b1, a1, b2]
    assert in_time_first([a1, b1, a2, b2], {a2, b2}) == [a1, b1, a2, b2]


jobs = st.lists(st.tuples(st.integers(2, 9), st.integers(1, 30)), min_size=1, max_size=7)


@given(jobs)
def test_no_choice_puts_fewer_off_where_requests_come_in_the_order_they_are_due(drawn: list[tuple[int, int]]):
    order = [make(i, tokens, due) for i, (tokens, due) in enumerate(sorted(drawn, key=lambda job: job[1]))]
    off = find_late(order, COST, Pace(0.0, 0.0, 1.0))

    kept = [request for request in order if request not in off]
    assert ends_in_time(kept)
    more = combinations(order, len(kept) + 1)
    assert not any(ends_in_time(list(some)) for some in more), "one more could have been in time"


@given(jobs, st.lists(st.sampled_from(["a", "b"]), min_size=7, max_size=7))
def test_requests_that_are_kept_are_in_time_in_any_order(drawn: list[tuple[int, int]], tenants: list[str]):
    order = [make(i, *job, tenant=tenants[i]) for i, job in enumerate(drawn)]
    off = find_late(order, COST, Pace(0.0, 0.0, 1.0))

    assert ends_in_time([request for request in order if request not in off])
    assert sorted(r.seq for r in in_time_first(order, off)) == [r.seq for r in order]
    assert [r.tenant for r in in_time_first(order, off)] == [r.tenant for r in order], "tenants keep their turns"


@given(jobs, st.integers(0, 9), st.integers(0, 9))
def test_requests_that_are_all_in_time_are_deferred_in_no_order(drawn: list[tuple[int, int]], now: int, saved: int):
    order = [make(i, *job) for i, job in enumerate(drawn)]
    start = float(now - saved)

    if all_in_time(order, COST, Pace(now, start, 1.0)):
        assert not find_late(order, COST, Pace(now, start, 1.0))
        assert not find_late(order[::-1], COST, Pace(now, start, 1.0))


def test_all_are_in_time_up_to_the_moment_the_first_is_due():
    assert all_in_time([make(1, 2, 5.0), make(2, 3, 9.0)], COST, Pace(0.0, 0.0, 1.0))
    assert not all_in_time([make(1, 2, 5.0), make(2, 4, 9.0)], COST, Pace(0.0, 0.0, 1.0))
    assert not all_in_time([make(1, 2, 5.0)], COST, Pace(6.0, 0.0, 1.0)), "overdue, whatever time was saved up"
    assert not all_in_time([make(1, 3, 4.0), make(2, 2, 4.0)], COST, Pace(0.0, -9.0, 1.0)), "prefill takes its time"
    assert all_in_time([make(1, 8, 2.0, phase=Phase.RUNNING, num_computed=6)], COST, Pace(0.0, 0.0, 1.0))
