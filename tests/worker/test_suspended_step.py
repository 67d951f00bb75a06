from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

from queue_objects import WrappedRunner

from ballast_engine.build import build_engine
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_policy.request import RequestClass
from ballast_policy.step.planner import plan


class SlowRunner(WrappedRunner):
    """An executor; once it is armed, its next step takes until it is interrupted."""

    def __init__(self) -> None:
        self.is_armed = False
        self.is_begun = threading.Event()

    def run(self, batch, interrupt):
        if self.is_armed and not self.is_begun.is_set():
            self.is_begun.set()
            end = time.monotonic() + 60
            while not interrupt.is_raised_at(0):
                assert time.monotonic() < end, "nobody interrupted the step"
                time.sleep(0)
        return self.inner.run(batch, interrupt)


def decide(snapshot):
    """The policy's plan, with steps that may be suspended."""
    return replace(plan(snapshot), suspendable_seconds=10.0)


def test_an_http_request_suspends_the_offline_step_in_flight(serve, make_config) -> None:
    runner = SlowRunner()
    build = partial(build_engine, planner=decide, wrap=runner.around)
    with serve(make_config(), build=build) as serving, serving.client() as client:
        runner.is_armed = True
        serving.worker.loop.submit(
            GenerationRequest(
                request_id="item",
                prompt=tuple(range(5, 45)),
                sampling=SamplingParams(temperature=0.0, max_tokens=4),
                request_class=RequestClass.OFFLINE,
                stream=False,
            )
        )
        assert runner.is_begun.wait(60)
        body = {"model": serving.worker.served.name, "prompt": "Once upon a time", "max_tokens": 3}
        answer = client.post("/v1/completions", json=body)
        metrics = client.get("/metrics").text
        ended: list = []
        while not ended:
            assert serving.worker.loop.wait_as_feeder(60)
            ended = serving.worker.loop.take_ended()

    assert answer.status_code == 200
    assert answer.json()["usage"]["completion_tokens"] >= 1
    assert "\nballast_suspended_steps_total 1.0\n" in metrics
    assert 'ballast_reclaim_steps_bucket{le="0"} 1.0' in metrics
    assert [(one.output.request_id, one.output.num_output > 0) for one in ended] == [("item", True)]
