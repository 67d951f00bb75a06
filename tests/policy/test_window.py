"""An idle engine waits for a batch, but never so long that a first token is late."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import pytest
from workloads import make_snapshot

from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel, attended
from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, ONLINE, Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan

COST = CostModel(0.001, 1e-5, 1e-6, 1e-4, 0, is_trusted=True)


def make_request(seq: int, arrival: float, request_class: RequestClass = ONLINE, **fields) -> Request:
    return Request(seq, request_class, arrival, 10, 10, **{"num_tokens": 10, **fields})


def look(now: float, *waiting: Request, residents: tuple[Request, ...] = (), cost: CostModel = COST) -> EngineSnapshot:
    config = PolicyConfig(slots=4, num_blocks=100, chunk_tokens=64, batch_window=0.015)
    return make_snapshot(Host(config, cost=cost), [*residents, *waiting], now=now, free_blocks=100)


def test_the_window_opens_with_the_first_arrival():
    offline, online = make_request(0, 1.0, OFFLINE), make_request(1, 1.009)
    decided = plan(look(1.010, offline, online))

    assert (decided.grants, decided.wait_until) == ((), pytest.approx(1.015))
    assert decided.because == ((online, Reason.BATCH_WINDOW), (offline, Reason.BATCH_WINDOW))


def test_when_it_closes_all_requests_start_online_first():
    online, offline = make_request(1, 1.009), make_request(0, 1.0, OFFLINE)
    decided = plan(look(1.015, offline, online))

    assert decided.wait_until == -inf
    assert set(decided.admit) == {online, offline}
    assert decided.because[0].request is offline, "its reservation is filled first"
    assert decided.because[1].reason is Reason.ONLINE_FIRST


@pytest.mark.parametrize(
    "waiting",
    [
        pytest.param([make_request(seq, 1.0) for seq in range(4)], id="every slot is taken"),
        pytest.param([make_request(0, 1.0, num_tokens=64)], id="the chunk is full"),
        pytest.param([make_request(0, 1.0, ttft=0.0115)], id="a first token would be late"),
        pytest.param([make_request(0, 0.5)], id="one waited before, preempted or held back"),
    ],
)
def test_it_does_not_wait_for_what_it_cannot_use_or_afford(waiting):
    assert plan(look(1.011, *waiting)).admit


def test_it_waits_as_long_as_the_first_token_allows():
    request = make_request(0, 1.0, ttft=0.010)
    waits = [plan(look(1.001, request, cost=cost)).wait_until for cost in (COST, replace(COST, is_trusted=False))]

    takes = 0.001 + 10 * 1e-5 + 1e-6 * attended(0, 10)
    assert waits == pytest.approx([1.005 - takes, 1.005]), "half of it, without the time of the step if it is known"


def test_cached_tokens_do_not_fill_a_chunk():
    assert plan(look(1.0, make_request(0, 1.0, num_tokens=80, num_cached=70))).wait_until == pytest.approx(1.015)


def test_a_busy_engine_does_not_wait():
    resident = make_request(
        0, 0.0, phase=Phase.RUNNING, num_tokens=12, num_computed=11, num_output=2, num_blocks=1, num_private_blocks=1
    )

    assert plan(look(1.0, make_request(1, 1.0), residents=(resident,))).admit
    assert plan(replace(look(1.0, make_request(1, 1.0)), num_leaving=1)).admit
