"""With `offline.batchWindowMilliseconds`, an idle EngineCore waits for the requests of one batch."""

from __future__ import annotations

import pytest
from bare_core import BareCore

from ballast_policy.learning.cost import CostModel
from ballast_vllm.scheduler import AsyncBallastScheduler, SyncBallastScheduler

POLICY = {"batch_window": 0.5, "chunk_tokens": 64}


class SyncAtRest(SyncBallastScheduler):
    """A scheduler whose time passes only if a test moves it."""

    now = 100.0

    def clock(self) -> float:
        return self.now


class AsyncAtRest(AsyncBallastScheduler):
    now = 100.0

    def clock(self) -> float:
        return self.now


@pytest.fixture(params=[SyncAtRest, AsyncAtRest], ids=["sync", "async"])
def core(request, tiny_model):
    return BareCore(tiny_model, scheduler=request.param, is_async=request.param.is_async, policy=POLICY)


def test_an_idle_core_waits_and_then_admits_all_requests_in_one_step(core):
    first = core.add("offline", prompt=5)
    assert core.step().num_scheduled_tokens == {}
    core.scheduler.now += 0.3
    second = core.add("online", prompt=7)
    assert core.step().num_scheduled_tokens == {}
    core.scheduler.now += 0.3

    begun = core.step().num_scheduled_tokens

    core.finish()
    step, *_ = core.scheduler.ballast_stats()["recent"]
    assert begun == {first: 5, second: 7}
    assert [admission.steps_waited for admission in step.admissions] == [0, 0]


def test_the_window_is_no_delay_by_offline_work(core):
    host = core.scheduler.driver.host
    host.fit, host.cost = None, CostModel(k0=0.001, k3=0.001, is_trusted=True)
    core.add("offline", prompt=5, output=3)
    core.scheduler.now += 1.0
    core.finish()
    core.add(prompt=5, output=1)
    core.step()
    core.scheduler.now += 1.0
    core.finish()

    [(_, ttft)] = host.interference.ttft
    assert ttft.alone == ttft.measured >= 1.0


def test_a_busy_core_takes_a_newcomer_into_the_next_step(core):
    core.add(prompt=5)
    core.scheduler.now += 1.0
    core.step()

    second = core.add("offline", prompt=7)

    assert core.step().num_scheduled_tokens[second] == 7
