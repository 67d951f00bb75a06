"""Items on their way to vLLM, without vLLM; `tests/vllm/server/test_items.py` sends them to a real one."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import pytest
from fake_vllm import FakeEngine, FakeVllm
from queue_objects import make_claimed
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ballast_engine.request import FinishReason
from ballast_policy.request import OFFLINE, ONLINE, RequestClass
from ballast_queue.job import Result
from ballast_queue.leases import json_of
from ballast_vllm.calls import CALL, Call, EngineRequest
from ballast_vllm.counters import Counters
from ballast_vllm.engine_client import EngineTap
from ballast_vllm.engine_view import VllmEngine
from ballast_vllm.item_loop import HttpItemLoop
from ballast_vllm.items import HttpItem, HttpReader
from ballast_vllm.media import Media, MediaPlaces
from ballast_vllm.online_first import MOST_SECONDS, OnlineFirst
from ballast_vllm.served_app import item_scope
from ballast_worker.errors import Refused
from ballast_worker.in_flight import InFlightItem, InFlightItems
from ballast_worker.items import NO_PLACE
from ballast_worker.loop import Ended
from ballast_worker.openai import Caller
from ballast_worker.requests import Recorder, RequestTiming


@pytest.mark.parametrize("field", ["chat_template_kwargs", "prompt"])
def test_a_body_that_is_nested_too_deeply_is_refused(field):
    nested: list[Any] = []
    for _ in range(200_000):
        nested = [nested]
    body = {"model": "m", "prompt": "Once", field: {"a": nested}}
    claimed = make_claimed(body=body)
    reader = HttpReader("revision", [claimed.url], lambda: ["m"], lambda _: None)

    with pytest.raises(Refused, match="nested too deeply") as caught:
        reader.prepare("r", claimed, 0.0)

    assert (caught.value.status, caught.value.code) == (400, "invalid_json")


def test_vllm_neither_streams_nor_keeps_the_answer_of_an_item():
    url, body = "/v1/responses", {"model": "m", "input": "Once", "store": True, "stream": True}
    claimed = make_claimed(url=url, body=body)
    item = HttpReader("revision", [url], lambda: ["m"], lambda _: None).prepare("r", claimed, 0.0)

    assert json.loads(item.body) == body | {"store": False, "stream": False}


def test_items_of_an_adapter_that_are_held_up_keep_further_ones_in_the_queue():
    fake, url = FakeEngine(), "/v1/completions"
    tap = EngineTap(fake, lambda: 0.0)
    stats = Counters().tokens.stats(fake.host, kv_used=0, kv_cached=0, kv_free=100, kv_waste_ratio=0.0)
    engine = VllmEngine(tap, stats, fake.host.config)
    reader = HttpReader("revision", [url], lambda: ["m", "a"], lambda _: None, crowded=lambda: engine.crowded)

    def prepare(number: int, model: str) -> HttpItem:
        claimed = make_claimed(index=number, body={"model": model, "prompt": "Once"})
        item = engine.items[f"r{number}"] = reader.prepare(f"r{number}", claimed, 0.0)
        record = tap.live[f"r{number}"] = EngineRequest(f"r{number}", item.call, 3, can_continue=False)
        item.call.requests.append(record)
        return item

    items = [prepare(number, "a") for number in range(3)]
    changed = [engine.note_held_up(ids) for ids in ([], ["r0", "r1"], ["r1", "r0"])]
    counts = [item.num_held_up for item in items]

    assert changed == [False, True, False]
    assert counts == [1, 1, 0]
    with pytest.raises(Refused, match="hold all places") as caught:
        prepare(3, "a")
    assert (caught.value.code, reader.crowded()) == (NO_PLACE, {"a"}), "the item waits for any worker"
    assert prepare(4, "m").num_held_up == 0
    assert engine.note_held_up(["r0"])
    assert prepare(5, "a").num_held_up == 0


async def run_item(
    app: ASGIApp, url: str = "/v1/completions", fields: Mapping[str, Any] | None = None, **options: Any
) -> tuple[InFlightItems, Ended]:
    """Send an item through the app. Return what the worker reports of it, and its end."""
    engine = SimpleNamespace(items={}, num_computed=lambda _: 0)
    loop = HttpItemLoop(app, {"type": "http", "method": "POST", "headers": []}, engine)
    body = {"model": "m", "prompt": "Once"} | dict(fields or {})
    claimed = make_claimed(url=url, body=body)
    in_flight = InFlightItems("w1", "revision")
    item = HttpReader("revision", [url], lambda: ["m"], loop.start, **options).prepare("r", claimed, 0.0)
    in_flight.held["r"] = InFlightItem(claimed, item.call.timing, item)
    item.submit()
    while not (ended := loop.take_ended()):  # noqa: ASYNC110 - it sets no event of this loop
        await asyncio.sleep(0)
    in_flight.settle(ended[0].output, num_cached=0)
    return in_flight, ended[0]


ANSWERS = {
    "an embedding": (b'{"data":[{"embedding":[0.10,-1e-05]}],"usage":{"prompt_tokens":3,"total_tokens":3}}', (3, 0)),
    "a reranking": (b'{"usage": {"total_tokens": 9}, "results": [{"document": {"text": "\\"usage\\":{}"}}]}', (9, 0)),
    "a text": (
        b'{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5,"prompt_tokens_details":{"a":1}}}',
        (3, 5),
    ),
    "a response": (b'{"usage":{"input_tokens":3,"output_tokens":5},"tools":[{"usage":{"type":"object"}}]}', (3, 5)),
    "a schema with a usage": (
        b'{"usage":{"input_tokens":3,"output_tokens":5},"a":{"default":{"usage":{"input_tokens":99}}},"user":null}',
        (3, 5),
    ),
    "many usages": (b'{"usage":{"input_tokens":3},"a":' + b'{"usage":' * 100 + b"1" + b"}" * 101, (0, 0)),
    "no usage": (b'{"data":[]}', (0, 0)),
}


@pytest.mark.anyio
@pytest.mark.parametrize("name", ANSWERS)
async def test_the_answer_of_an_item_is_stored_as_vllm_wrote_it(name):
    """An answer with thousands of vectors would take seconds to decode and to encode again, and stop all threads."""
    text, tokens = ANSWERS[name]
    in_flight, ended = await run_item(Response(text, media_type="application/json"), "/v1/embeddings", is_encoder=True)
    [(_, result)] = in_flight.results

    assert ended.is_whole
    assert text in json_of(result)
    assert Result.model_validate_json(json_of(result)).body == json.loads(text)
    assert (result.tokens_in, result.tokens_out) == tokens


@pytest.mark.anyio
@pytest.mark.parametrize("status", [0, HTTPStatus.BAD_REQUEST, 404, 408, 409, 422, 425, 429, 500, 503])
async def test_an_item_is_tried_again_unless_each_attempt_would_be_refused(status: int):
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if not status:
            raise RuntimeError("a defect of a route")
        await Response(b'{"error":{"message":"no"}}', status)(scope, receive, send)

    in_flight, _ = await run_item(app)
    [failure] = in_flight.failures

    assert failure.is_retryable == (status not in {400, 404, 422})
    assert repr(failure.status_code) == str(int(status or 500))


@pytest.mark.anyio
async def test_an_item_whose_answer_is_no_json_is_refused_with_what_to_change():
    in_flight, _ = await run_item(Response(b"\x00\x01", media_type="application/octet-stream"))
    [failure] = in_flight.failures

    assert (failure.status_code, failure.code, failure.is_retryable) == (400, "unsupported_encoding", False)
    assert "set it to base64" in failure.message


@pytest.mark.anyio
@pytest.mark.parametrize(("status", "is_returned"), [(200, True), (0, True), (500, False)])
async def test_an_item_that_enginecore_gives_up_is_returned_unless_vllm_answers_with_an_error(status, is_returned):
    """An item that is returned spends no attempt."""
    engine = FakeEngine()
    EngineTap(engine, lambda: 0.0)
    app = FakeVllm(engine)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if not status:
                raise RuntimeError("a defect of a route")
            await send(message | ({"status": status} if "status" in message else {}))

        asyncio.get_running_loop().call_later(0, give_up)
        await app(scope, receive, answer)

    def give_up() -> None:
        if "r1" in engine.sent:
            engine.give("r1", 5, reason="abort")
        else:
            asyncio.get_running_loop().call_later(0, give_up)

    in_flight, _ = await run_item(route)

    assert (in_flight.results, len(in_flight.failures)) == ([], not is_returned)
    assert [claimed.custom_id for claimed, _ in in_flight.returns] == ["a"] * is_returned


@pytest.mark.anyio
@pytest.mark.parametrize(("num_tokens", "is_ended"), [(5, False), (6, True)])
async def test_an_item_ends_when_its_answer_has_too_many_logprobs(num_tokens: int, is_ended: bool):
    engine = FakeEngine()
    EngineTap(engine, lambda: 0.0)
    app = FakeVllm(engine)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(app(scope, receive, send))
        while "r1" not in engine.sent:  # noqa: ASYNC110 - it sets no event of this loop
            await asyncio.sleep(0)
        engine.give("r1", *[5] * num_tokens)
        while not is_ended and engine.answers:
            engine.give("r1", reason="stop")
        await work

    in_flight, _ = await run_item(route, fields={"sampling": {"logprobs": -1}})

    assert ([failure.status_code for failure in in_flight.failures], engine.aborted) == (
        ([400], ["r1"]) if is_ended else ([], [])
    )
    for failure in in_flight.failures:
        assert not failure.is_retryable
        assert "has more than 655360 logprobs" in failure.message
        assert "stream" not in failure.message


@pytest.mark.anyio
async def test_some_calls_have_decoded_media_at_a_time_and_every_place_returns():
    places, media = MediaPlaces(2), [Media() for _ in range(9)]
    takes = [asyncio.create_task(places.take(found)) for found in media[:6]]

    async def holders() -> list[int]:
        for _ in range(9):
            await asyncio.sleep(0)
        return [number for number, found in enumerate(media) if found.has_place]

    seen = [await holders()]
    takes[2].cancel()  # the client of a call that waits left
    places.leave(media[3])  # and this call ended otherwise
    places.leave(media[0])
    seen.append(await holders())
    places.leave(media[1])
    takes[5].cancel()  # it has its place, and does not know it yet
    places.leave(media[4])
    places.leave(media[4])
    seen.append(await holders())
    takes = [asyncio.create_task(places.take(found)) for found in media[6:]]
    seen.append(await holders())
    takes[2].cancel()
    await asyncio.gather(*takes, return_exceptions=True)

    assert seen == [[0, 1], [1, 4], [], [6, 7]]


@pytest.mark.anyio
async def test_an_item_gives_its_place_back_when_enginecore_has_it_and_when_it_ends():
    engine = FakeEngine()
    EngineTap(engine, lambda: 0.0)
    vllm, has_place = FakeVllm(engine), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        call = CALL.get()
        await call.take_media()
        has_place.append(call.media.has_place)
        if len(has_place) > 4:
            asyncio.get_running_loop().call_later(0, look, call)
            await vllm(scope, receive, send)
        else:
            await Response(b"no", 400)(scope, receive, send)

    def look(call: Call) -> None:
        if "r1" in engine.sent:
            has_place.append(call.media.has_place)
            engine.give("r1", 5, reason="stop")
        else:
            asyncio.get_running_loop().call_later(0, look, call)

    for _ in range(5):  # more than the places of offline calls
        await run_item(app)

    assert has_place == [True] * 5 + [False]


def test_an_item_has_the_api_key_of_vllm():
    def authorization(**arguments: Any) -> list[bytes]:
        headers = item_scope(FakeVllm(FakeEngine(), **arguments))["headers"]
        return [value for name, value in headers if name == b"authorization"]

    assert authorization() == []
    assert authorization(api_key=["first", "second"]) == [b"Bearer first"]


@pytest.mark.anyio
async def test_threads_of_vllm_work_for_online_calls_before_items():
    engine, order, is_free = FakeEngine(), [], threading.Event()
    with ThreadPoolExecutor(1) as threads:
        vars(engine.renderer)["_executor"] = threads
        EngineTap(engine, lambda: 0.0)
        threads.submit(is_free.wait)

        for request_class in (OFFLINE, ONLINE):
            for number in range(11):
                in_call(request_class, threads.submit, order.append, (request_class, number))
        is_free.set()

    online, offline = ([(c, number) for number in range(11)] for c in (ONLINE, OFFLINE))
    assert order == [*online[:9], offline[0], *online[9:], *offline[1:]]


@pytest.mark.parametrize("request_class", [ONLINE, OFFLINE])
def test_tenants_take_turns_on_the_threads_of_vllm(request_class: RequestClass):
    order, turns = [], []
    submit = OnlineFirst(turns.append, lambda: 0.0)
    for tenant, number in (("a", 4), ("b", 1), ("c", 2)):
        for place in range(number):
            in_call(request_class, submit, order.append, f"{tenant}{place}", tenant=tenant)
    for turn in turns:
        turn()

    assert order == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]


def in_call(
    request_class: RequestClass, submit: Callable[..., Future[Any]], *work: Any, tenant: str = "lab"
) -> Future[Any]:
    """Submit work in the context of a call of the class."""
    context = copy_context()
    context.run(CALL.set, Call(Caller(tenant, request_class, 0), RequestTiming(request_class, 0.0)))
    return context.run(submit, *work)


def test_work_is_done_after_vllm_replaced_threads_that_a_chat_template_does_not_leave():
    """vLLM gives up the threads, and the turns that wait in them, but no work that was not cancelled."""
    is_over = threading.Event()
    with ThreadPoolExecutor(1) as stuck, ThreadPoolExecutor(1) as other:
        swappable = SimpleNamespace(threads=stuck)

        def submit_turn(turn: Callable[[], None]) -> None:
            swappable.threads.submit(turn)

        submit = OnlineFirst(submit_turn, lambda: 0.0)
        first = submit(is_over.wait)
        while not first.running():
            time.sleep(0)
        late, offline = submit(str, "late"), in_call(OFFLINE, submit, str, "offline")
        waits = submit(str, "waits")
        late.cancel()
        swappable.threads = other
        try:
            found = [submit(str, "after").result(5), waits.result(5), offline.result(5), submit(str, "last").result(5)]
        finally:
            is_over.set()

    assert found == ["after", "waits", "offline", "last"]
    assert first.result()


def test_offline_work_that_has_waited_for_some_seconds_takes_turns_with_online_work():
    """A large call has many pieces that are due at once, and neither online work nor others wait for all."""
    order, turns, now = [], [], [0.0]
    submit = OnlineFirst(turns.append, lambda: now[0])
    for number in range(4):
        in_call(OFFLINE, submit, order.append, f"large {number}", tenant="large")
    now[0] = MOST_SECONDS
    in_call(OFFLINE, submit, order.append, "other", tenant="other")
    for number in range(3):
        in_call(ONLINE, submit, order.append, f"online {number}")
    for turn in turns:
        turn()

    assert order == ["large 0", "online 0", "other", "online 1", "large 1", "online 2", "large 2", "large 3"]


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
