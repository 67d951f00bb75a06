"""Two workers, one after the other: the second counts as wasted what the first had computed."""

from __future__ import annotations

import json
import threading
from functools import partial

import pytest
import redis
from queue_objects import WrappedRunner, make_line

from ballast_engine.build import build_engine
from ballast_queue.redis_store import Queue

OUTPUT = 1200
LONG = make_line(0, prompt="Once upon a time there was", max_tokens=OUTPUT, ignore_eos=True)


@pytest.fixture
def start(serve, make_config, valkey, queue_name):
    """A worker of the test's queue, with little prefill in a step and leases that a busy machine keeps."""

    def start(worker_id: str, *, revision: str = "r1", lease_seconds: int = 30, **options):
        config = make_config(
            model={"revision": revision},
            engine={"prefillChunkTokens": 16},
            offline={"queue": queue_name, "leaseSeconds": lease_seconds},
            runtime={"redisUrl": valkey.url, "workerId": worker_id},
        )
        return serve(config, **options)

    return start


class PausingRunner(WrappedRunner):
    """An executor that pauses before one of its batches until it may go on."""

    def __init__(self, before: int) -> None:
        self.num_left: int | None = None
        self.is_paused, self.goes_on = threading.Event(), threading.Event()
        self._before = before

    def arm(self) -> None:
        """Count from the next batch on: those of the warm-up are over."""
        self.num_left = self._before

    def run(self, batch, interrupt):
        if self.num_left == 0:
            self.is_paused.set()
            assert self.goes_on.wait(60)
        if self.num_left is not None:
            self.num_left -= 1
        return self.inner.run(batch, interrupt)


def finish(queue: Queue, job_id: str, serving, eventually):
    """Wait for the answer; return its usage and the counters of offline work."""
    eventually(lambda: queue.jobs.get(job_id).state.is_over, "the job to be over")
    [result] = queue.results.read(job_id)
    return result.body["usage"], serving.worker.engine.stats().offline


def drain(serving) -> None:
    serving.worker.feeder.drain()
    assert serving.worker.feeder.drained.wait(60)


def test_an_item_given_back_in_prefill_is_wasted_work(start, queue, eventually) -> None:
    runner = PausingRunner(before=3)
    with start("w1", build=partial(build_engine, wrap=runner.around)) as first:
        runner.arm()
        job_id = queue.submissions.submit([make_line(0, prompt="word " * 1500, max_tokens=4, ignore_eos=True)]).job_id
        assert runner.is_paused.wait(60)
        threading.Timer(0.2, runner.goes_on.set).start()
        drain(first)
        before = first.worker.engine.stats().offline
    with start("w2") as second, second.client() as client:
        usage, after = finish(queue, job_id, second, eventually)
        metrics = client.get("/metrics").text

    assert before.prefill_tokens >= 3 * 16
    assert before.decode_tokens == 0
    assert after.wasted_tokens == before.prefill_tokens
    assert after.prefill_tokens == usage["prompt_tokens"] - before.prefill_tokens
    assert f'ballast_wasted_tokens_total{{class="offline"}} {after.wasted_tokens}.0' in metrics


def test_a_prefix_of_other_weights_is_wasted_work(start, queue, eventually) -> None:
    with start("w1", revision="r1") as first:
        job_id = queue.submissions.submit([LONG]).job_id
        eventually(lambda: first.worker.engine.stats().offline.decode_tokens > 20, "some tokens")
        drain(first)
        before = first.worker.engine.stats().offline
    with start("w2", revision="r2") as second:
        usage, after = finish(queue, job_id, second, eventually)
        service = sum(second.worker.engine.stats().service.values())

    assert usage["completion_tokens"] == OUTPUT
    assert after.wasted_tokens == before.prefill_tokens + before.decode_tokens - 1, (
        "the last token was not computed yet"
    )
    assert (after.prefill_tokens, after.decode_tokens) == (0, OUTPUT - before.decode_tokens)
    assert service == 2 * after.decode_tokens, "the tenant pays for a token once"


def test_an_expired_lease_leaves_wasted_work(start, queue, queue_name, valkey, eventually) -> None:
    runner = PausingRunner(before=40)
    with redis.Redis.from_url(valkey.url) as raw:
        with start("w1", lease_seconds=1, build=partial(build_engine, wrap=runner.around)):
            runner.arm()
            job_id = queue.submissions.submit([LONG]).job_id
            prefixes = f"ballast:{{{queue_name}}}:job:{job_id}:prefixes"
            assert runner.is_paused.wait(60)
            eventually(lambda: raw.hget(prefixes, "0"), "a heartbeat with the progress")
            threading.Timer(0.2, runner.goes_on.set).start()
        reported = json.loads(raw.hget(prefixes, "0"))["num_computed"]
    with start("w2") as second:
        usage, after = finish(queue, job_id, second, eventually)

    num_redrawn = reported - usage["prompt_tokens"] + 1
    assert num_redrawn > 0
    assert after.wasted_tokens == reported
    assert (after.prefill_tokens, after.decode_tokens) == (0, OUTPUT - num_redrawn)
