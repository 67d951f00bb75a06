"""Keys, tenants, limits and hot changes in front of vLLM's routes."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest
import yaml
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from ballast_vllm.engine_client import OVERFLOW
from ballast_vllm.middleware import BACKGROUND, STREAMED_INPUT

pytestmark = pytest.mark.timeout(900)

LAB, WEB = {"authorization": "Bearer lab-key"}, {"authorization": "Bearer web-key"}
BODY = {"model": "m", "prompt": "Once", "max_tokens": 4, "temperature": 0}
CONFIG = {
    "slots": 2,
    "limits": {"maxQueuedRequests": 2, "maxBodyKibibytes": 16},
    "offline": {"tenants": [{"name": "lab", "maxPriority": 3}, {"name": "web"}]},
    "runtime": {"generation": 1, "created": 1},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("configuration")


@pytest.fixture(scope="module")
def serving(start, wandering_model, folder):
    keys = folder / "keys.yaml"
    keys.write_text("lab-key: lab\nweb-key: web\n")
    write(folder, CONFIG)
    variables = {"BALLAST_CONFIG": str(folder / "worker.yaml"), "BALLAST_RUNTIME_API_KEYS_FILE": str(keys)}
    with start(wandering_model, **variables) as found:
        yield found


def write(folder, config) -> None:
    fresh = folder / "fresh"
    fresh.write_text(yaml.safe_dump(config))
    fresh.rename(folder / "worker.yaml")


@pytest.fixture
def change(serving, folder, eventually):
    """`change(generation, limits)` puts limits into force until the end of the test; tests share the server."""

    def changed(generation: int, limits: Mapping[str, int]) -> None:
        write(folder, CONFIG | {"limits": limits, "runtime": {"generation": generation, "created": 1}})
        eventually(lambda: serving.series()["ballast_config_generation"] == generation, "the change")

    yield changed
    changed(1, CONFIG["limits"])


@pytest.mark.parametrize("headers", [LAB, {}], ids=["with a key", "without"])
def test_streamed_input_is_refused_with_a_sentence(serving, headers):
    url = serving.url.replace("http", "ws", 1)

    with pytest.raises(InvalidStatus) as refused:
        connect(f"{url}/v1/realtime", additional_headers=headers)

    answer = refused.value.response
    assert (answer.status_code, json.loads(answer.body)["error"]["message"]) == (400, STREAMED_INPUT)


def test_a_client_that_offers_http_2_is_answered_in_http_1_1(serving):
    """Java's HTTP client does so in the first request of each connection."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAARAAAAAAAIAAAAA"}

    with serving.client(headers=LAB) as client:
        answers = [client.post("/v1/completions", json=BODY, headers=headers) for headers in (offer, {})]

    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json()["choices"] == answers[1].json()["choices"]


def test_connections_have_the_limits_of_a_worker(serving):
    """`tests/worker/test_hostile_clients.py` tests each limit."""
    address = httpx.URL(serving.url)

    def closed(reason: str) -> float:
        return serving.series()[f'ballast_http_closed_total{{reason="{reason}"}}']

    before = closed("head_too_slow")
    with socket.create_connection((address.host, address.port), timeout=60) as silent:
        with serving.client() as client:
            large = client.get("/health", headers={"x": "a" * 70_000})
        assert silent.recv(1) == b""

    assert (large.status_code, large.json()["error"]["code"]) == (431, "headers_too_large")
    assert large.headers["x-request-id"]
    assert closed("head_too_large") == 1
    assert closed("head_too_slow") == before + 1
    assert serving.series()['ballast_http_connections{waits_for="answer"}'] == 1


@pytest.mark.parametrize("background", [True, "true", 1])
def test_a_response_in_the_background_is_refused_with_a_sentence(serving, background):
    with serving.client(headers=LAB) as client:
        refused = client.post("/v1/responses", json={"model": "m", "input": "Go", "background": background})
        passed = client.post("/v1/responses", json={"model": "m", "input": "Go", "background": False})

    assert (refused.status_code, refused.json()["error"]["message"]) == (400, BACKGROUND)
    assert passed.status_code == 200


def test_a_request_that_enginecore_cannot_get_is_refused_and_does_not_wait(serving):
    invalid = 'ballast_requests_total{class="online",outcome="invalid"}'
    before = serving.series().get(invalid, 0.0)

    with serving.client(headers=LAB) as client:
        response = client.post("/v1/completions", json={**BODY, "temperature": 1, "top_k": 2**64})
        other = client.post("/nothing", json=BODY)

    series = serving.series()
    assert (response.status_code, response.json()["error"]["message"]) == (400, OVERFLOW)
    assert other.status_code == 404
    assert series[invalid] == before + 1, "only the request to the model"
    assert series['ballast_requests_waiting{class="online"}'] == 0


def test_each_route_refuses_a_chat_with_a_long_token_that_the_template_could_repeat(serving):
    messages = [{"role": "user", "content": "Hi"}]
    calls = {
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": "Hi", "max_output_tokens": 1},
        "/tokenize": {"messages": messages},
    }

    def post(client, path, token):
        return client.post(path, json={"model": "m", "chat_template_kwargs": {"eos_token": token}} | calls[path])

    with serving.client(headers=LAB) as client:
        for path in calls:
            refused, passed = post(client, path, "x" * 65), post(client, path, "x" * 64)

            assert (refused.status_code, passed.status_code) == (400, 200), path
            assert "chat_template_kwargs.eos_token: found the string" in refused.json()["error"]["message"]


@pytest.mark.parametrize("more", [{}, {"prompt": ["a", "b"], "n": 2, "temperature": 1}], ids=["one", "four answers"])
def test_a_client_that_leaves_before_the_answer_frees_its_requests(serving, eventually, more):
    text = json.dumps({**BODY, "max_tokens": 900, "ignore_eos": True, **more}).encode()
    aborted = 'ballast_requests_total{class="online",outcome="aborted"}'
    before = serving.series().get(aborted, 0.0)

    with socket.create_connection((httpx.URL(serving.url).host, httpx.URL(serving.url).port)) as raw:
        raw.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer lab-key\r\n"
            b"content-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text)
        )
        eventually(lambda: serving.series()['ballast_slots{class="online",state="running"}'] >= 1, "a request to run")

    eventually(lambda: serving.series().get(aborted, 0.0) == before + 1, "the call to be aborted")
    eventually(lambda: serving.series()['ballast_slots{class="online",state="running"}'] == 0, "its slots to be free")


def test_the_openai_package_gets_streams_with_usage(serving):
    client = openai.OpenAI(base_url=f"{serving.url}/v1", api_key="web-key")
    ask = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 9, "temperature": 0}

    whole = client.chat.completions.create(**ask)
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 9


def test_wrong_headers_are_refused_with_a_sentence(serving):
    with serving.client(headers=LAB) as client:
        found = [
            client.post("/v1/completions", json=BODY, headers={name: value}).json()["error"]["code"]
            for name, value in (
                ("x-ballast-class", "batch"),
                ("x-ballast-priority", "high"),
                ("x-llm-d-slo-ttft-ms", "-1"),
            )
        ]

    assert found == ["invalid_class", "invalid_priority", "invalid_slo"]


def test_a_body_above_the_limit_is_refused_before_vllm_reads_it(serving):
    long = json.dumps({**BODY, "prompt": "a" * 20_000}).encode()

    def late():
        yield b""
        time.sleep(0.3)  # the server has the head, and refuses the request before the body arrives
        yield long

    with serving.client(headers={**LAB, "content-type": "application/json"}) as client:
        announced = client.post("/v1/completions", content=long)
    with serving.client(headers={**LAB, "content-length": str(len(long))}) as client:
        delayed = client.post("/v1/completions", content=late())

    assert (announced.status_code, delayed.status_code) == (413, 413)
    assert "limits.maxBodyKibibytes" in announced.json()["error"]["message"]


def test_requests_beyond_the_slots_and_the_queue_are_refused_with_a_time(serving):
    with serving.client(headers=WEB) as client, ThreadPoolExecutor(16) as threads:

        def ask(number: int) -> httpx.Response:
            body = BODY | {"prompt": f"{number}", "max_tokens": 1000, "ignore_eos": True}
            return client.post("/v1/completions", json=body)

        found = list(threads.map(ask, range(16)))

    served = [response for response in found if response.status_code == 200]
    refused = [response for response in found if response.status_code == 429]
    assert len(served) + len(refused) == 16
    assert served
    assert refused
    assert all(int(response.headers["retry-after"]) >= 1 for response in refused)
    assert "limits.maxQueuedRequests" in refused[0].json()["error"]["message"]
    assert serving.series()['ballast_requests_total{class="online",outcome="queue_full"}'] >= len(refused)


def test_a_call_with_more_requests_than_slots_and_queue_is_refused(serving, eventually):
    eventually(lambda: serving.series()['ballast_slots{class="online",state="running"}'] == 0, "the slots to be free")
    body = {**BODY, "temperature": 0.5}
    several = {"many prompts": {"prompt": ["a"] * 20}, "many answers": {"n": 20}, "a stream": {"n": 20, "stream": True}}

    with serving.client(headers=WEB) as client:
        few = client.post("/v1/completions", json=body | {"prompt": ["a"] * 2, "n": 2})
        found = {name: client.post("/v1/completions", json=body | fields) for name, fields in several.items()}

    assert {name: response.status_code for name, response in found.items()} == dict.fromkeys(several, 400)
    assert {response.json()["error"]["code"] for response in found.values()} == {"too_many_requests"}
    assert (few.status_code, len(few.json()["choices"])) == (200, 4)


@pytest.mark.parametrize(
    ("headers", "tier", "expected"),
    [({}, None, "online"), ({"x-ballast-class": "offline"}, None, "offline"), ({}, "flex", "offline"),
     ({"x-ballast-class": "online"}, "flex", "online")],
)  # fmt: skip
def test_header_and_service_tier_state_the_class(serving, eventually, headers, tier, expected):
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    name = f'ballast_tokens_total{{class="{expected}",phase="decode"}}'
    before = serving.series()[name]

    with serving.client(headers={**LAB, **headers}) as client:
        response = client.post("/v1/chat/completions", json=body | ({"service_tier": tier} if tier else {}))

    assert response.status_code == 200
    eventually(lambda: serving.series()[name] >= before + 2, "the tokens of the class")


def test_a_changed_file_is_in_force_without_a_restart(serving, change):
    change(2, {"maxBodyKibibytes": 1024})

    with serving.client(headers=LAB) as client:
        found = client.post("/tokenize", json={"model": "m", "prompt": "a" * 20_000})
        status = client.get("/ballast/status").json()

    assert found.status_code == 200
    assert (status["generation"], status["model"], status["slots"]) == (2, "m", 2)


def test_an_online_request_that_would_wait_too_long_is_refused(serving, change):
    change(3, {"maxQueueMilliseconds": 1})
    found = []

    with serving.client(headers=WEB) as client, ThreadPoolExecutor(12) as threads:

        def ask(_: int) -> None:
            while not any("maxQueueMilliseconds" in response.text for response in found):
                found.append(client.post("/v1/completions", json=BODY | {"max_tokens": 400, "ignore_eos": True}))

        list(threads.map(ask, range(12)))

    assert {response.status_code for response in found} == {200, 429}


def test_a_tenant_is_charged_for_its_requests_and_only_metrics_behind_a_key_name_it(serving, eventually):
    with serving.client(headers=LAB) as client:
        assert client.post("/v1/completions", json=BODY).status_code == 200
    charged = 'ballast_tenant_service_total{class="online",tenant="lab"}'

    eventually(lambda: serving.series("/ballast/metrics", LAB).get(charged, 0.0) > 0, "the service of the tenant")
    assert httpx.get(f"{serving.url}/ballast/metrics").status_code == 401
    assert not [name for name in serving.series() if "lab" in name]
