"""Which requests enter a server of vLLM, and how many of them wait, over an app without a model."""

from __future__ import annotations

import asyncio
import json
from contextlib import nullcontext
from functools import partial
from math import inf

import pytest
from served_vllm import BODY, Posts, accept, as_item, before_app, leave, reported, running, submit, wait_until

from ballast_policy.request import RequestClass
from ballast_queue.job import Claimed
from ballast_vllm.items import HttpReader
from ballast_worker.errors import Refused

pytestmark = pytest.mark.anyio


async def test_a_full_queue_answers_429_with_a_time(variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running() as found:
        posts = [asyncio.create_task(found.client.post("/v1/completions", json=BODY)) for _ in range(3)]
        for number in (1, 2, 3):
            await found.sent(f"r{number}")
        refused = await found.client.post("/v1/completions", json=BODY)
        for number in (1, 2, 3):
            found.engine.give(f"r{number}", 5, reason="length")
        statuses = [(await post).status_code for post in posts]

    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert refused.json()["error"]["message"].startswith("The waiting queue is full: 1 online request waits")
    assert statuses == [200, 200, 200]


async def test_a_tenant_that_fills_the_queue_leaves_the_others_their_share(variables, tmp_path):
    (tmp_path / "keys.yaml").write_text("a: a\nb: b\n")
    variables("BALLAST_RUNTIME_API_KEYS_FILE", str(tmp_path / "keys.yaml"))
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "2")
    async with running() as found:
        a, b = (Posts(found, key=key) for key in "ab")
        accepted = [await posts.is_accepted() for posts in (a, a, a, a, a, b, b)]
        for posts in (a, b):
            await posts.end()

    assert accepted == [True] * 4 + [False, True, False], "two slots, two requests of a that wait, and one of b"
    assert not any(found.server.tap.by_tenant.values())


async def test_a_request_that_computes_its_prompt_in_a_slot_does_not_wait(variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "0")
    async with running() as found:
        posts = Posts(found)
        first = await posts.is_accepted()
        await reported(found, RequestClass.ONLINE, 1)
        others = [await posts.is_accepted() for _ in range(2)]
        await posts.end()

        assert (first, others) == (True, [True, False])


async def test_requests_with_an_output_that_are_preempted_wait(variables):
    async with running() as found:
        posts = Posts(found)
        for number in (1, 2, 3):
            await posts.is_accepted()
            found.engine.give(f"r{number}", 5)
        await reported(found, RequestClass.ONLINE, 1)
        online = found.server.engine.stats().online
        await posts.end()

    assert (online.running, online.waiting) == (1, 2)


@pytest.mark.parametrize("num_reported", [0, 1, 2])
async def test_a_burst_between_two_reports_fills_the_slots_and_the_queue_and_not_more(variables, num_reported):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "3")
    async with running() as found:
        posts = Posts(found)
        await reported(found, RequestClass.ONLINE, num_reported)
        accepted = [await posts.is_accepted() for _ in range(9)]
        await posts.end()

        assert accepted.count(True) == 2 + 3


@pytest.mark.parametrize(("number", "status"), [(3, 200), (4, 400)])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/batch",
        "/v1/chat/completions",
        "/v1/responses",
        "/generative_scoring",
        "/v1/systemone",
        "/inference/v1/generate",
    ],
)
async def test_a_call_fills_the_slots_and_the_queue_and_not_more(variables, path, number, status):
    """Several conversations are counted before vLLM renders them, and several choices (`n`) by vLLM.

    Routes without a beam search ignore its field.
    """
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    body, is_batch = {"messages": [[{"role": "user", "content": "Hi"}]] * number}, path.endswith("batch")
    if path != "/v1/chat/completions":
        body["use_beam_search"] = True

    async def app(scope, receive, send):
        found.engine.check_admission(1 if is_batch else number)
        await accept(scope, receive, send)

    async with running() as found, before_app(found.server, app) as client:
        response = await client.post(path, json=body)

    assert response.status_code == status
    assert not found.server.recorder.outcomes["online", "stop"], "EngineCore got no request"


def escaped(body):
    return body.replace("beam", "b\\u0065am").encode()


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"n": 3}, 200),
        ({"n": 4}, 400),
        ({"n": "4"}, 400),
        ({"n": inf}, 200),
        ({"n": 2, "prompt": ["Once", "Twice"]}, 400),
        ({"n": 4, "use_beam_search": 1}, 400),
        ({"n": "4.0", "use_beam_search": "yes"}, 400),
        ({"n": 4, "use_beam_search": "maybe"}, 200),
        ({"n": 4, "use_beam_search": False}, 200),
    ],
)
@pytest.mark.parametrize("written", [str.encode, escaped, partial(str.encode, encoding="utf-16")])
async def test_a_beam_search_is_refused_before_it_begins_or_not_at_all(variables, fields, status, written):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running() as found, before_app(found.server, accept) as client:
        body = json.dumps({**BODY, "use_beam_search": True, **fields})
        response = await client.post("/v1/completions", content=written(body))

    assert response.status_code == status


LONG = "a" * 90_000
SCORED = {"model": "m", "query": [1] * 30_000}
IMAGE = {"content": [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{LONG}"}}]}
AUDIO = {"content": [{"type": "input_audio", "input_audio": {"data": LONG, "format": "wav"}}]}


def described(state):
    return "/v1/systemone", {"state": state, "questions": {f"{n}": {} for n in range(240)}}


def conversations(value):
    return "/v1/chat/completions/batch", {"messages": [[]] * 240, "chat_template_kwargs": {"a": value}}


@pytest.mark.parametrize(
    ("path", "fields", "refused"),
    [
        pytest.param("/generative_scoring", {"query": LONG, "items": ["b"] * 180}, None, id="scored texts"),
        pytest.param("/generative_scoring", {"query": LONG, "items": ["b"] * 240}, 240, id="too many texts"),
        pytest.param("/generative_scoring", {**SCORED, "items": [[1]] * 500}, None, id="scored tokens"),
        pytest.param("/generative_scoring", {**SCORED, "items": [[1]] * 4000}, 4000, id="too many tokens"),
        pytest.param(*described(LONG), 240, id="state"),
        pytest.param(*described({LONG: 1}), 240, id="a key"),
        pytest.param(*described([[]] * 90_000), 240, id="empty lists"),
        pytest.param(*described([10**4000] * 30), 240, id="long integers"),
        pytest.param(*described({"url": f"data:{LONG}"}), 240, id="a state that looks like an image"),
        pytest.param(*described([1] * 80_000), None, id="numbers"),
        pytest.param(*conversations(LONG), 240, id="chats"),
        pytest.param(*conversations([{}] * 90_000), 240, id="chats with empty objects"),
        pytest.param("/v1/completions", {"suffix": LONG, "prompt": ["a"] * 240}, None, id="no copies"),
        pytest.param("/v1/rerank", {"query": LONG, "documents": ["b"] * 180}, None, id="documents"),
        pytest.param("/v1/rerank", {"query": LONG, "documents": ["b"] * 240}, 240, id="too many documents"),
        pytest.param("/v1/rerank", {"query": IMAGE, "documents": ["b"] * 240}, None, id="documents and an image"),
        pytest.param("/v1/rerank", {"query": AUDIO, "documents": ["b"] * 240}, None, id="documents and audio"),
        pytest.param("/v1/score", {"text_1": [LONG], "text_2": ["b"] * 240}, 240, id="a list of one text"),
        pytest.param("/v1/score", {"text_1": [LONG] * 20, "text_2": [LONG] * 20}, None, id="pairs"),
        pytest.param("/v1/embeddings", {"input": [[1, 2]] * 2048}, None, id="inputs"),
    ],
)
async def test_a_small_body_that_becomes_large_prompts_is_refused_before_vllm_makes_them(path, fields, refused):
    is_encoder = path in {"/v1/rerank", "/v1/score", "/v1/embeddings"}
    body = {"model": "m"} | fields
    runner = {"runner_type": "pooling" if is_encoder else "generate"}
    async with running(model_config=runner, slots=9999) as found, before_app(found.server, accept) as client:
        response = await client.post(path, json=body)

    assert response.status_code == (200 if refused is None else 400)
    said = f"Each of the {refused} inputs gets the rest of the body"
    if refused is not None:
        assert response.json()["error"]["message"].startswith(said)
    if is_encoder:
        claimed = Claimed(job_id="j", index=0, custom_id="a", url=path, body=body, tenant="t", token=1, seed=1)
        reader = HttpReader("", [path], lambda: ["m"], lambda _: None, is_encoder=True)
        with nullcontext() if refused is None else pytest.raises(Refused, match=said):
            reader.prepare("r", claimed, 0.0)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_a_call_ends_when_vllm_keeps_too_many_logprobs_for_its_answer(is_streamed):
    """The answer of a model is seldom as long as its context, so the logprobs are counted as they come."""
    body = BODY | {"prompt": ["Once", "Twice"][: 2 - is_streamed], "stream": is_streamed, "sampling": {"logprobs": -1}}
    async with running() as found:
        post = asyncio.create_task(found.client.post("/v1/completions", json=body))
        for request_id in ("r1", "r2")[: 2 - is_streamed]:
            await found.sent(request_id)
        for _ in range(3):
            for request_id in list(found.engine.answers):
                found.engine.give(request_id, 5, 6)
        if is_streamed:
            found.engine.give("r1", reason="stop")
        response = await post
        outcomes = found.server.recorder.outcomes

    assert response.status_code == (200 if is_streamed else 400)
    if not is_streamed:
        error = response.json()["error"]
        assert (error["param"], found.engine.aborted) == ("logprobs", ["r1", "r2"])
        assert "has more than 655360 logprobs" in error["message"]
        assert "or stream the answer" in error["message"]
        assert {key: count for key, count in outcomes.items() if count} == {("online", "invalid"): 1}


async def test_items_that_run_leave_the_limit_of_other_offline_requests_as_it_is(vllm_queue, variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running() as found:
        await submit(vllm_queue, [as_item("a"), as_item("b")])
        for request_id in ("r1", "r2"):
            await found.sent(request_id)
            found.engine.give(request_id, 11)
        await reported(found, RequestClass.OFFLINE, 2)
        posts = Posts(found, "offline")
        accepted = [await posts.is_accepted() for _ in range(2)]
        await posts.end()
        await leave(found)

        assert accepted == [True, False]


async def test_the_prompts_of_an_item_do_not_fill_the_queue_of_other_offline_requests(vllm_queue, variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "2")
    async with running() as found:
        await submit(vllm_queue, [as_item("a", prompt=["Once"] * 40)])
        await found.sent("r40")
        posts = Posts(found, "offline")
        accepted = await posts.is_accepted()
        await posts.end()
        await leave(found)

        assert accepted


async def test_an_encoder_counts_a_call_with_several_inputs_once(variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "4")
    async with running(model_config={"runner_type": "pooling"}) as found:
        posts = Posts(found)
        many = await posts.is_accepted(prompt=["Once"] * 50)
        others = [await posts.is_accepted() for _ in range(6)]
        found.engine.give("r1", 5, reason="stop")
        after_an_output = [await posts.is_accepted() for _ in range(2)]
        await posts.end()
        tap = found.server.tap

    assert many
    assert others == [True] * 5 + [False], "two slots, and four requests that wait"
    assert after_an_output == [True, False]
    assert set(tap.num_entering.values()) == set(tap.num_unanswered.values()) == {0}
    assert tap.num_answered["online"] == tap.num_online == 7


async def test_the_requests_of_the_last_step_of_an_encoder_are_shown_in_slots_and_fill_no_queue(variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running(slots=4, model_config={"runner_type": "pooling"}) as found:
        posts = Posts(found)
        found.engine.counters.in_step = {RequestClass.ONLINE: 3}
        accepted = [await posts.is_accepted() for _ in range(6)]
        await wait_until(lambda: found.server.engine.in_step)
        busy = found.server.status().online
        later = await posts.is_accepted()
        await posts.end()
        idle = found.server.status().online

    assert (accepted, later) == ([True] * 5 + [False], False)
    assert (busy.running, busy.waiting) == (3, 2)
    assert (idle.running, idle.waiting) == (0, 0)


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"input": ["a"] * 2049}, 400),
        ({"texts": ["a"] * 2049}, 400),
        ({"input": ["a"] * 2048}, 200),
        ({"input": [1] * 5000}, 200),
        ({"input": "," * 5000}, 200),
    ],
)
async def test_an_encoder_gets_calls_with_a_limited_number_of_inputs(variables, fields, status):
    async with (
        running(model_config={"runner_type": "pooling"}) as found,
        before_app(found.server, accept) as client,
    ):
        response = await client.post("/v1/embeddings", json=fields)

    assert response.status_code == status
    assert status == 200 or "has 2049 inputs, the limit is 2048" in response.json()["error"]["message"]
