"""Items of jobs through vLLM's own routes."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import httpx
import pytest

pytestmark = pytest.mark.timeout(900)

DOCS = Path(__file__).parents[3] / "docs"
MISSING = {"ballast_model_flops_utilization", "ballast_model_bandwidth_utilization"}
"""Series of a worker with the native engine that a worker with vLLM does not have."""

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Bonn", "Ulm"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SCHEMA = {"name": "unit", "strict": True, "schema": {"type": "string", "enum": ["celsius", "kelvin"]}}
ASK = [{"role": "user", "content": "How warm is it?"}]
BODIES = {
    "completion": ("/v1/completions", {"prompt": "Once", "max_tokens": 24, "logprobs": 3}),
    "two prompts": ("/v1/completions", {"prompt": ["Once", "Twice"], "max_tokens": 12}),
    "token ids": ("/v1/completions", {"prompt": [72, 73, 74], "max_tokens": 12, "return_token_ids": True}),
    "several choices": ("/v1/completions", {"prompt": "Once", "max_tokens": 6, "n": 2, "temperature": 0.9, "seed": 7}),
    "chat with logprobs": (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 16, "logprobs": True, "top_logprobs": 2},
    ),
    "chat with a tool": (
        "/v1/chat/completions",
        {
            "messages": ASK,
            "max_tokens": 400,
            "tools": [WEATHER],
            "tool_choice": {"type": "function", "function": {"name": "weather"}},
        },
    ),
    "chat with a schema": (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 32, "response_format": {"type": "json_schema", "json_schema": SCHEMA}},
    ),
    "chat with a grammar": (
        "/v1/chat/completions",
        {
            "messages": ASK,
            "max_tokens": 8,
            "structured_outputs": {"grammar": "root ::= (s | t)*\ns ::= [a-z]* [a-z]* [a-z]*\nt ::= s s\n"},
        },
    ),
    "chat with penalties": (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 16, "presence_penalty": 0.5, "stop": ["z"], "min_tokens": 2},
    ),
    "response": ("/v1/responses", {"input": "Say it.", "max_output_tokens": 16}),
}
INVALID = {
    "chat": ("/v1/chat/completions", {"messages": ASK, "temperature": "hot"}, "temperature"),
    "prompt": ("/v1/completions", {"prompt": {"a": 1}}, "prompt"),
    "input": ("/v1/responses", {"input": 5}, "input"),
}
"""Items that vLLM's validation of their fields refuses, with a part of its sentence."""


@pytest.fixture(scope="module")
def serving(start, wandering_model, valkey):
    variables = {
        "BALLAST_RUNTIME_REDIS_URL": valkey.url,
        "BALLAST_OFFLINE_QUEUE": "test/items",
        "BALLAST_OFFLINE_LEASE_SECONDS": "5",
    }
    with start(wandering_model, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", **variables) as found:
        yield found


@pytest.fixture
def items(serving, run_job):
    """`items(lines)` runs a job on the server, and returns its results by custom_id."""
    return partial(run_job, "test/items")


CHANGING = {"id", "created", "created_at", "completed_at", "metadata"}


def same_parts(found: object) -> object:
    """A response without ids and times, which differ for every request."""
    if isinstance(found, dict):
        return {key: same_parts(value) for key, value in found.items() if key not in CHANGING}
    return [same_parts(value) for value in found] if isinstance(found, list) else found


def test_an_item_has_the_answer_of_the_same_online_request(serving, items, as_line):
    bodies = {name: (url, {"temperature": 0, **body}) for name, (url, body) in BODIES.items()}
    with serving.client() as client:
        online = {name: client.post(url, json={"model": "m", **body}).json() for name, (url, body) in bodies.items()}

    results = items([as_line(name, url, **body) for name, (url, body) in bodies.items()])

    assert results.keys() == bodies.keys()
    for name, result in results.items():
        assert (result.status_code, result.error) == (200, None), name
        assert same_parts(result.body) == same_parts(online[name]), name
        assert result.tokens_in > 0, name
        assert result.tokens_out > 0, name
    call = results["chat with a tool"].body["choices"][0]["message"]["tool_calls"][0]["function"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"])["city"] in {"Bonn", "Ulm"}


def test_an_item_that_vllm_refuses_is_a_dead_letter_with_the_sentence_of_vllm(serving, items, as_line):
    wrong = as_line("long", "/v1/completions", prompt="Once", max_tokens=5000)
    unknown = json.dumps({"custom_id": "x", "url": "/v1/embeddings", "body": {"model": "m", "input": "a"}})

    many = {"max_tokens": 1000, "n": 40, "temperature": 1}
    logprobs = as_line("logprobs", "/v1/completions", prompt="Once", logprobs=20, **many)
    beams = as_line("beams", "/v1/completions", prompt="Once", use_beam_search=True, **many)

    names = {f"a{number}": {"items": {"$ref": f"#/$defs/a{number + 1}"}} for number in range(8_000)}
    deep = {"$defs": {**names, "a8000": {}}, "$ref": "#/$defs/a0"}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}
    schema = as_line("schema", "/v1/chat/completions", messages=ASK, max_tokens=8, response_format=form)
    good = as_line("good", "/v1/completions", prompt="Once", max_tokens=2)
    invalid = [as_line(name, url, **body) for name, (url, body, _) in INVALID.items()]
    results = items([schema, wrong, unknown, logprobs, beams, good, *invalid])

    assert results["good"].status_code == 200
    assert [results[name].status_code for name in ("logprobs", "beams")] == [400, 400]
    assert results["schema"].status_code == 400
    assert "The check of the format needs more than" in results["schema"].error["message"]
    assert "Set max_tokens to at most 780," in results["logprobs"].error["message"]
    assert "The beam searches of the call may keep" in results["beams"].error["message"]
    assert results["long"].status_code == 400
    assert "5000" in results["long"].error["message"]
    assert "expected /v1/chat/completions, /v1/completions or /v1/responses" in results["x"].error["message"]
    for name, (_, _, said) in INVALID.items():
        assert results[name].status_code == 400
        assert said in results[name].error["message"]


def test_the_series_of_a_worker_are_beside_those_of_vllm(serving, items, as_line):
    before = serving.series()
    with serving.client() as client:
        body = {"model": "m", "prompt": "Once", "max_tokens": 5, "temperature": 0}
        assert client.post("/v1/completions", json=body).status_code == 200
        assert client.post("/v1/completions", json=body, headers={"x-ballast-class": "offline"}).status_code == 200
    body = {"prompt": "Once", "max_tokens": 5, "ignore_eos": True}
    items([as_line(f"i{n}", "/v1/completions", **body) for n in range(3)], tenant="lab")

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    after = serving.series()
    assert gained('ballast_requests_total{class="online",outcome="length"}') == 1
    assert gained('ballast_requests_total{class="offline",outcome="length"}') == 4
    assert gained('ballast_time_to_first_token_seconds_count{class="online"}') == 1
    assert after["ballast_redis_up"] == 1
    assert after["ballast_engine_healthy"] == 1
    assert after['vllm:num_requests_waiting{engine="0",model_name="m"}'] == 0
    assert after["process_resident_memory_bytes"] > 0


def test_all_series_of_a_native_worker_are_there_but_those_that_the_guide_names(serving, eventually):
    """The reference is made from the series of a native worker. `/metrics` of either engine names no tenants."""
    native = set(re.findall(r"^\| `(ballast_\w+)`", (DOCS / "reference" / "metrics.md").read_text(), re.MULTILINE))
    guide = (DOCS / "how-to" / "vllm.md").read_text()

    def found() -> set[str]:
        text = httpx.get(f"{serving.url}/metrics", timeout=600).text
        return set(re.findall(r"^# TYPE (ballast_\w+)", text, re.MULTILINE))

    eventually(lambda: "ballast_queue_items" in found(), "the queue to be known")
    assert found() == native - MISSING - {"ballast_tenant_service_total"}
    assert {name for name in native if f"`{name}`" in guide} >= MISSING
