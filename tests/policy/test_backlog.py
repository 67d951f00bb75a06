from __future__ import annotations

import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ranking

from ballast_policy.backlog import LEAST, Backlog
from ballast_policy.fairness.ledger import Ledger
from ballast_policy.request import OFFLINE, ONLINE, Request, RequestClass


def make_request(seq: int, request_class: RequestClass = OFFLINE, *, tokens: int = 10, **fields) -> Request:
    return Request(seq, request_class, 0.0, tokens, 10, num_tokens=tokens, **fields)


def filled(*requests: Request) -> Backlog:
    backlog = Backlog()
    for request in requests:
        backlog.add(request)
    return backlog


def seqs(requests: list[Request]) -> list[int]:
    return [request.seq for request in requests]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param({"request_class": ONLINE}, {"priority": 5}, id="class before priority"),
        pytest.param({"priority": 1}, {"tenant": "poor"}, id="priority before tenant"),
        pytest.param({"tenant": "poor"}, {"tenant": "rich", "slack": -1.0}, id="tenant before slack"),
        pytest.param({"slack": 1.0, "prefix_seq": 9}, {"slack": 2.0}, id="slack before prefix group"),
        pytest.param({"prefix_seq": 0}, {"prefix_seq": 2}, id="prefix group before submission"),
    ],
)
def test_the_order_is_class_priority_tenant_slack_group_submission(first: dict, second: dict):
    ledger = Ledger()
    ledger.charge("rich", 1000)
    ledger.charge("default", 500)
    backlog = filled(make_request(1, **second), make_request(2, **first))

    assert seqs(backlog.head(10, {OFFLINE: ledger})) == [2, 1]


def test_a_preempted_request_comes_back_to_where_it_stood():
    requests = [make_request(seq) for seq in range(5)]
    backlog = filled(*requests)
    for request in requests[:2]:
        backlog.remove(request)
    for request in requests[:2]:
        backlog.add(request)
    assert seqs(backlog.head(10)) == [0, 1, 2, 3, 4]

    backlog.remove(requests[1])

    assert seqs(backlog.head(10)) == [0, 2, 3, 4]


def test_requests_that_left_are_not_kept():
    requests = [make_request(seq) for seq in range(100)]
    backlog = filled(*requests)
    kept = sum(map(sys.getrefcount, requests))
    for request in requests[:90]:
        backlog.remove(request)

    assert kept - sum(map(sys.getrefcount, requests)) >= 80


def test_tenants_take_turns_by_what_each_admission_would_cost():
    backlog = filled(
        *(make_request(seq, tenant="big", tokens=100) for seq in range(3)),
        *(make_request(seq, tenant="small", tokens=25) for seq in range(3, 9)),
    )

    assert seqs(backlog.head(10)) == [0, 3, 4, 5, 6, 1, 7, 8, 2]
    assert seqs(backlog.head(10, {OFFLINE: Ledger({"big": 4.0})})) == [0, 3, 1, 4, 2, 5, 6, 7, 8]


def test_a_capped_tenant_lists_one_request_more_than_it_may_start_and_leaves_the_slots_to_others():
    backlog = filled(
        *(make_request(seq, tenant="capped") for seq in range(50)), *(make_request(seq) for seq in range(50, 60))
    )

    head = backlog.head(4, free_slots={"capped": 1})

    assert seqs(head) == [0, 50, 1, 51, 52]
    alone = filled(*(make_request(seq, tenant="capped") for seq in range(50)))
    assert seqs(alone.head(4, free_slots={"capped": 1})) == [0, 1]


@pytest.mark.parametrize("tenants", ["a", "ab"])
def test_listing_ends_behind_a_chunk_of_tokens(tenants: str):
    fields = {"tokens": 150, "num_cached": 50}
    backlog = filled(*(make_request(seq, tenant=tenants[seq % len(tenants)], **fields) for seq in range(200)))

    found = [len(backlog.head(200, num_tokens=tokens)) for tokens in (150, 5000, 5001)]

    assert found == [LEAST, 50, 51]


def test_removing_what_does_not_wait_is_an_error():
    backlog = filled(make_request(1))

    with pytest.raises(KeyError, match="request 2 does not wait"):
        backlog.remove(make_request(2))
    with pytest.raises(KeyError, match="request 1 does not wait"):
        backlog.remove(make_request(1, tenant="other"))

    assert len(backlog) == 1


requests = st.builds(
    make_request,
    seq=st.integers(0, 10**6),
    request_class=st.sampled_from(RequestClass),
    tenant=st.sampled_from("ab"),
    priority=st.integers(-1, 1),
    slack=st.sampled_from([float("inf"), 0.0, 5.0]),
    prefix_seq=st.integers(0, 1),
)


@settings(max_examples=200)
@given(st.lists(requests, max_size=40, unique_by=lambda request: request.seq), st.data())
def test_coming_and_going_in_any_order_leaves_what_a_sorted_list_would(items: list[Request], data):
    ledger = Ledger()
    ledger.charge("a", 1e9)  # so much that no turn of `b` makes up for it: the order is that of a sort
    backlog, model = Backlog(), []
    for request in items:
        backlog.add(request)
        model.append(request)
        if data.draw(st.booleans()):
            backlog.remove(gone := model.pop(data.draw(st.integers(0, len(model) - 1))))
            assert gone not in list(backlog)

    order = ranking(ledger)
    model.sort(key=lambda request: (request.request_class is OFFLINE, order(request)))

    assert model == backlog.head(100, {ONLINE: ledger, OFFLINE: ledger})
    assert len(model) == len(backlog) == len(list(backlog))
    for request_class in RequestClass:
        of_class = [request for request in model if request.request_class is request_class]
        assert backlog.count(request_class) == len(of_class)
        assert backlog.tenants(request_class) == {request.tenant for request in of_class}


class TestOverdue:
    def make(self, seq: int, arrival: float, **fields) -> Request:
        return Request(seq, ONLINE, arrival, 10, 10, ttft=1.0, num_tokens=10, **fields)

    def test_an_overdue_request_waits_behind_those_in_time(self):
        backlog = filled(*(self.make(seq, 0.1 * seq) for seq in range(4)))

        backlog.defer(1.0)
        assert seqs(backlog.head(10)) == [0, 1, 2, 3], "the first is due now"
        backlog.defer(1.15)

        assert seqs(backlog.head(10)) == [2, 3, 0, 1]
        backlog.defer(5.0)
        assert seqs(backlog.head(10)) == [0, 1, 2, 3], "in order among themselves"

    def test_it_can_still_be_taken_out_and_comes_back_in_time(self):
        first = self.make(1, 0.0)
        backlog = filled(first, self.make(2, 1.0))
        backlog.defer(1.5)

        backlog.remove(first)
        assert seqs(backlog.head(10)) == [2]
        first.num_output = 1  # its first token is there, then it was preempted
        backlog.add(first)
        backlog.defer(1.6)
        assert seqs(backlog.head(10)) == [1, 2]
        assert first.slack == 0

    def test_priorities_and_tenants_keep_their_turns(self):
        backlog = filled(
            self.make(1, 0.0, priority=1), self.make(2, 2.0), self.make(3, 0.0, tenant="b"), self.make(4, 2.0)
        )

        backlog.defer(2.0)

        assert seqs(backlog.head(10))[0] == 1
        assert set(seqs(backlog.head(3))[1:]) == {2, 3}

    def test_offline_is_never_overdue(self):
        job = make_request(1)
        backlog = filled(job, self.make(2, 0.0))

        backlog.defer(100.0)

        assert seqs(backlog.head(10)) == [2, 1]
        assert [request.seq for request in backlog] == [2, 1]
