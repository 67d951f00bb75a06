"""Items on their way to vLLM, without vLLM; `tests/vllm/server/test_items.py` sends them to a real one."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_vllm import FakeEngine

from ballast_engine.request import FinishReason
from ballast_policy.request import ONLINE
from ballast_queue.job import Claimed
from ballast_vllm.calls import CALL, Call
from ballast_vllm.engine_client import EngineTap
from ballast_vllm.items import HttpReader
from ballast_worker.errors import Refused
from ballast_worker.openai import Caller
from ballast_worker.requests import Recorder, RequestTiming


@pytest.mark.parametrize("field", ["chat_template_kwargs", "prompt"])
def test_a_body_that_is_nested_too_deeply_is_refused(field):
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    body = {"model": "m", "prompt": "Once", field: {"a": nested}}
    url = "/v1/completions"
    claimed = Claimed(job_id="j", index=0, custom_id="a", url=url, body=body, tenant="t", token=1, seed=1)
    reader = HttpReader("revision", [url], lambda: ["m"], lambda _: None)

    with pytest.raises(Refused, match="nested too deeply") as caught:
        reader.prepare("r", claimed, 0.0)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


@pytest.mark.anyio
async def test_the_tpot_of_a_call_is_that_of_its_slowest_answer():
    engine, times, recorder = FakeEngine(), iter(range(6)), Recorder()
    EngineTap(engine, lambda: next(times))
    call = Call(Caller("lab", ONLINE, 0), RequestTiming(ONLINE, 0.0))
    token = CALL.set(call)
    answers = [asyncio.create_task(engine.generate(number, {})) for number in (1, 2)]
    CALL.reset(token)
    await asyncio.sleep(0)
    for request_id in ("r1", "r2"):
        for reason in (None, None, "stop"):
            engine.give(request_id, 5, reason=reason)
    await asyncio.gather(*answers)
    recorder.ended(call.timing, FinishReason.STOP, 6, call.num_output, 5.0, slowest=call.slowest)

    assert [tpot for _, _, tpot, _ in recorder.recent] == [1.0]
