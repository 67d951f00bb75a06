"""Ballast's middleware of vLLM over an app without a model; `tests/vllm/server` has the same over a real vLLM."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import httpx
import pytest
from files import swap
from prometheus_client import REGISTRY, Gauge, make_asgi_app
from served_vllm import BODY, accept, before_app, running, wait_until
from starlette.responses import Response

from ballast_engine.stats import StepKind, StepRecord
from ballast_policy.request import RequestClass
from ballast_vllm.calls import CALL, Call, EngineRequest
from ballast_vllm.middleware import BallastMiddleware
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming

pytestmark = pytest.mark.anyio


async def test_a_request_reaches_enginecore_with_its_place_and_an_unchanged_body(variables):
    variables("BALLAST_OFFLINE_TENANTS", "[{name: lab, maxPriority: 3}]")
    async with running() as found:
        headers = {"x-llm-d-inference-fairness-id": "lab"}
        body = BODY | {"service_tier": "flex", "priority": -7}
        forged = {"sampling": {"extra_args": {"ballast": {"class": "online"}, "mine": 1}}}
        answer = asyncio.create_task(found.client.post("/v1/completions", json=body | forged, headers=headers))
        request = await found.sent("r1")
        found.engine.give("r1", 5)
        found.engine.give("r1", 6, reason="length")
        answer, recorder = (await answer).json(), found.server.recorder

    assert request.sampling_params.extra_args == {
        "ballast": {"class": "offline", "tenant": "lab", "priority": 3},
        "mine": 1,
    }
    assert request.priority == 0
    assert answer["tokens"] == [5, 6]
    assert recorder.outcomes["offline", "length"] == 1
    assert sum(recorder.ttft["offline"].counts) == 1


@pytest.mark.parametrize(("path", "expected"), [("/v1/audio/transcriptions", True), ("/v1/completions", False)])
async def test_only_answers_of_speech_routes_hide_their_logprobs(path, expected):
    found = []

    async def app(scope, receive, send):
        found.append(CALL.get().asked.hides_logprobs)
        await accept(scope, receive, send)

    async with running() as served, before_app(served.server, app) as client:
        await client.post(path, json=BODY)

    assert found == [expected]


async def test_a_request_arrives_with_the_end_of_its_body(variables):
    async with running() as found:
        raw, ends = json.dumps(BODY).encode(), []

        async def parts():
            yield raw[:5]
            ends.append(time.monotonic())
            yield raw[5:]

        post = asyncio.create_task(found.client.post("/v1/completions", content=parts()))
        await found.sent("r1")
        (call,) = found.server.calls
        found.engine.give("r1", 5, reason="length")
        await post

    assert ends[0] <= call.timing.arrival


async def test_a_step_is_counted_once_however_often_the_scheduler_is_asked(variables):
    async with running() as found:
        found.engine.counters.note_step(StepRecord(StepKind.DECODE, 0.1, 0.0, 0, 1))
        for _ in range(3):
            await found.server._poll()  # noqa: SLF001 -- the server does it four times a second
        text = (await found.client.get("/metrics")).text

    assert 'ballast_step_seconds_count{kind="decode"} 1.0' in text


async def test_a_web_page_can_read_a_refusal(variables):
    variables("BALLAST_LIMITS_MAX_BODY_KIBIBYTES", "1")
    given = {"allowed_origins": ["http://page"], "allowed_methods": ["*"], "allowed_headers": ["*"]}
    async with running(**given, allow_credentials=False) as found:
        body = BODY | {"prompt": "a" * 2000}
        refused = await found.client.post("/v1/completions", json=body, headers={"origin": "http://page"})
        other = await found.client.post("/v1/completions", json=body, headers={"origin": "http://other"})

    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (413, "http://page")
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("slo", ["latency", "ttft"])
async def test_the_latency_of_an_encoder_ends_with_the_answer_that_vllm_builds_of_the_vectors(variables, capsys, slo):
    variables(f"BALLAST_SLO_{slo.upper()}_MILLISECONDS", "60000")
    built = []

    async def app(scope, receive, send):
        await receive()
        computed = asyncio.ensure_future(found.engine.generate(1, {}))
        await found.sent("r1")
        found.engine.give("r1", reason="stop")
        await computed
        built.append(time.monotonic())
        await accept(scope, receive, send)

    async with running(model_config={"runner_type": "pooling"}) as found, before_app(found.server, app) as client:
        await client.post("/v1/embeddings", json=BODY)
        recorder, status = found.server.recorder, found.server.status()
        [(ended, ttft, _, latency)] = recorder.recent

    assert ended >= built[0]
    assert ttft == latency == status.latency_p99_seconds
    assert {name: number for name, number in recorder.slo.items() if number} == {("online", slo, True): 1}
    assert ("the TTFT of 60000 ms is promised for the whole answer" in capsys.readouterr().err) == (slo == "ttft")


async def test_a_call_to_an_encoder_that_a_client_gives_up_too_late_misses_the_slo_although_a_vector_is_there(
    variables,
):
    variables("BALLAST_SLO_LATENCY_MILLISECONDS", "60")
    async with running(model_config={"runner_type": "pooling"}) as found:
        arrival = time.monotonic() - 1
        call = Call(Caller("lab", RequestClass.ONLINE, 0), RequestTiming(RequestClass.ONLINE, arrival))
        call.requests.append(EngineRequest("r1", call, 3, can_continue=False))
        call.timing.first_at = call.last_at = arrival + 0.01
        found.server.admission.begin(call, is_queued=True)
        found.server.admission.end(call, None, is_complete=False)
        recorder = found.server.recorder

    assert {name: number for name, number in recorder.slo.items() if number} == {("online", "latency", False): 1}


async def test_a_web_socket_that_a_proxy_of_ray_serve_passes_on_is_closed(variables):
    async with running() as found:
        received, sent = asyncio.Queue(), asyncio.Queue()
        received.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "query_string": b""}
        await found.app(scope, received.get, sent.put)

        assert [sent.get_nowait()["type"] for _ in range(sent.qsize())] == ["websocket.close"]


@pytest.mark.parametrize("path", ["/scale_elastic_ep", "/is_scaling_elastic_ep", "/v1/../scale_elastic_ep"])
async def test_a_client_cannot_change_the_number_of_engines(path):
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["path"])
        await accept(scope, receive, send)

    async with running() as found, before_app(found.server, app) as client:
        answer = await client.post(path, json={"new_data_parallel_size": 2})

    assert (answer.status_code, seen) == (400, [])
    assert answer.json()["error"]["code"] == "unsupported_scaling"


async def test_a_request_that_does_not_reach_enginecore_is_forgotten(variables):
    async with running() as found:
        found.engine.error = ValueError("not to be sent")
        with pytest.raises(ValueError, match="not to be sent"):
            await found.client.post("/v1/completions", json=BODY)

        assert (found.engine.answers, found.server.tap.live, sum(found.server.tap.num_unanswered.values())) == (
            {},
            {},
            0,
        )


async def test_a_request_that_vllm_gives_up_after_the_end_of_its_call_is_forgotten_then(variables):
    async def app(scope, receive, send):
        left.append(asyncio.ensure_future(found.engine.generate(1, {})))
        await found.sent("r1")
        await accept(scope, receive, send)

    left = []
    async with running() as found, before_app(found.server, app) as client:
        await client.post("/v1/completions", json=BODY)
        before = found.server.engine.stats().online.waiting
        left[0].cancel()
        await wait_until(lambda: not found.server.tap.live)
        after = found.server.engine.stats().online.waiting

    assert (before, after, found.server.tap.by_tenant["online"]) == (1, 0, {})


async def test_a_client_that_leaves_in_the_middle_of_a_stream_frees_its_request(variables):
    async with running() as found:
        received, answered = asyncio.Queue(), asyncio.Queue()
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
            "client": ("10.0.0.1", 1),
        }
        received.put_nowait({"type": "http.request", "body": json.dumps(BODY | {"stream": True}).encode()})
        call = asyncio.create_task(found.app(scope, received.get, answered.put))
        await found.sent("r1")
        found.engine.give("r1", 5)
        parts = [await answered.get() for _ in range(2)]
        received.put_nowait({"type": "http.disconnect"})
        await call
        part, aborted, server = parts[1]["body"], found.engine.aborted, found.server

    assert part == b"5"
    assert aborted == ["r1"]
    assert server.tap.live == {}
    assert set(server.tap.num_live.values()) == set(server.tap.num_begun.values()) == {0}
    assert server.recorder.outcomes["online", "aborted"] == 1


@pytest.mark.parametrize("isolates", [False, True], ids=["shared", "isolated"])
async def test_a_salt_of_a_client_reaches_the_prefix_cache_of_another_tenant_only_if_it_is_shared(variables, isolates):
    variables("BALLAST_ENGINE_ISOLATE_TENANTS", str(isolates).lower())
    salts = (None, "x", "a", "b", "a\n", "b\n", "\na", "\nb", "a\nx", "b\nx")
    seen = {"a": [], "b": []}
    async with running() as found:
        for i, (tenant, salt) in enumerate([(tenant, salt) for tenant in seen for salt in salts], 1):
            headers = {"x-llm-d-inference-fairness-id": tenant}
            body = BODY | {"cache_salt": salt}
            post = asyncio.create_task(found.client.post("/v1/completions", json=body, headers=headers))
            seen[tenant].append((await found.sent(f"r{i}")).cache_salt)
            found.engine.give(f"r{i}", 5, reason="stop")
            await post

    if isolates:
        assert not set(seen["a"]) & set(seen["b"])
        assert [len(set(of)) for of in seen.values()] == [len(salts)] * 2
    else:
        assert seen == {"a": list(salts), "b": list(salts)}


async def test_keys_are_needed_for_everything_but_probes(variables, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("k: lab\n")
    variables("BALLAST_RUNTIME_API_KEYS_FILE", str(keys))
    async with running() as found:
        paths = ("/v1/models", "/docs", "/health", "/ready", "/metrics")
        seen = [(await found.client.get(path)).status_code for path in paths]
        known = await found.client.get("/v1/models", headers={"authorization": "Bearer k"})

        assert (seen, known.status_code) == ([401, 401, 200, 200, 200], 200)


async def test_a_key_that_is_revoked_is_unknown_without_a_restart_and_without_a_configuration_file(variables, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("k: lab\nother: lab\n")
    variables("BALLAST_RUNTIME_API_KEYS_FILE", str(keys))
    async with running() as found:

        async def status(key):
            headers = {"authorization": f"Bearer {key}"}
            return (await found.client.get("/v1/models", headers=headers)).status_code

        before = await status("k"), await status("other")
        swap(keys, "other: lab\n")
        async with asyncio.timeout(60):
            while await status("k") == 200:  # noqa: ASYNC110 - other threads set no event
                await asyncio.sleep(0.005)

        assert before == (200, 200)
        assert (await status("k"), await status("other")) == (401, 200)

        for text, is_invalid in (("other: [", "1.0"), ("{}", "0.0")):
            swap(keys, text)
            shown = f"ballast_config_invalid {is_invalid}".encode()
            await wait_until(lambda: shown in found.server.metrics.render())  # noqa: B023

            assert found.server.status().has_invalid_file == (is_invalid == "1.0")

        assert await status("other") == 401


async def test_requests_that_ballast_refuses_are_counted(variables, tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("k: lab\nother: undeclared\n")
    variables("BALLAST_RUNTIME_API_KEYS_FILE", str(keys))
    variables("BALLAST_OFFLINE_TENANTS", "[{name: lab}]")
    known = {"authorization": "Bearer k"}
    refused = [
        ({}, 401),
        ({"authorization": "Bearer other"}, 403),
        (known | {"x-ballast-class": "batch"}, 400),
        (known | {"x-ballast-class": "offline", "x-ballast-priority": "urgent"}, 400),
        (known | {"x-llm-d-slo-ttft-ms": "0"}, 400),
    ]
    async with running() as found:
        for headers, status in refused:
            assert (await found.client.post("/v1/completions", json=BODY, headers=headers)).status_code == status
        invalid = await found.client.post("/v1/completions", json=BODY | {"max_tokens": 0}, headers=known)
        for path in ("/tokenize", "/nothing", "/v1/models"):
            others = [await found.client.post(path, json=BODY, headers=headers) for headers in ({}, known)]
            assert [other.status_code for other in others] == [401, 405 if path == "/v1/models" else 404]
        outcomes = found.server.recorder.outcomes

    assert invalid.status_code == 400
    assert {key: count for key, count in outcomes.items() if count} == {("online", "invalid"): len(refused) + 1}
    assert found.engine.sent == {}
    assert found.server.tap.num_online == 0, "the load of the server"


async def test_a_body_above_the_limit_never_reaches_vllm(variables):
    variables("BALLAST_LIMITS_MAX_BODY_KIBIBYTES", "1")

    async def parts():
        for _ in range(3):
            yield b"a" * 500

    async with running() as found:
        chunked = await found.client.post("/v1/completions", content=parts())

        assert (chunked.status_code, found.engine.sent) == (413, {})


async def test_a_call_gives_its_place_for_media_back_when_it_ends_without_a_request(variables):
    has_place = []

    async def app(scope, receive, send):
        await CALL.get().take_media()
        has_place.append(CALL.get().media.has_place)
        await accept(scope, receive, send)

    async with running() as found, before_app(found.server, app) as client:
        for _ in range(7):  # more than there are places
            await client.post("/v1/completions", json=BODY)

    assert has_place == [True] * 7


async def test_a_large_response_of_vllm_waits_for_its_client_between_parts(variables):
    sizes, content = [], bytes(range(256)) * 600

    async def app(scope, receive, send):
        async def seen(message):
            sizes.append(len(message.get("body", b"")))
            await send(message)

        middleware = BallastMiddleware(Response(content))
        middleware.server = found.server
        await middleware(scope, receive, seen)

    async with running() as found, httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
        response = await client.post("http://vllm/v1/completions", json=BODY)

    assert (response.content, max(sizes), len(sizes)) == (content, 65536, 4)


async def test_a_body_counts_with_its_objects_until_its_response_ends(variables):
    lists = b"[" + b"[]," * 1_390_000 + b"[]]"
    ids = json.dumps({"prompt": [10_000] * 100_000}).encode()
    text = json.dumps({"prompt": '\\",[' * 600_000}).encode()
    plain = b"a" * 70_000
    async with running() as found:
        bodies, seen, others = found.server.bodies, [], []

        async def app(scope, receive, send):
            body = (await receive())["body"]
            seen.append((bodies.used, sys.getrefcount(body)))
            if len(seen) == 1:
                others.extend(
                    [await client.post("/v1/completions", content=other) for other in (lists, ids, text, plain)]
                )
            await accept(scope, receive, send)

        async with before_app(found.server, app) as client:
            await client.post("/v1/completions", content=lists)
            after, bodies.limit = bodies.used, 5_000_000
            alone = await client.post("/v1/completions", content=lists)

    first, (with_ids, _), (with_text, _), (with_plain, _), _ = seen
    assert first == (len(lists) + 64 * 2_780_002 - 65_536, 2), "one reference is that of getrefcount"
    assert with_ids - first[0] == len(ids) + 64 * 100_001 - 65_536
    assert with_text - first[0] == len(text) + 64 - 65_536, "the marks in a string are no objects"
    assert with_plain - first[0] == len(plain) - 65_536
    assert [other.status_code for other in others] == [429, 200, 200, 200]
    assert after == 0
    assert alone.status_code == 200, "a body whose objects exceed the limit passes alone"


@pytest.mark.parametrize("access", [{}, {"tenants": ["legal"]}])
async def test_series_that_name_private_adapters_need_a_key(variables, tmp_path, access):
    keys, config = tmp_path / "keys.yaml", tmp_path / "worker.yaml"
    keys.write_text("secret: legal\n")
    adapters = [{"name": "contracts", "uri": "file:///contracts"} | access]
    config.write_text(json.dumps({"model": {"uri": "hf://a/m", "adapters": adapters}, "engine": {"backend": "vllm"}}))
    variables("BALLAST_CONFIG", str(config))
    variables("BALLAST_RUNTIME_API_KEYS_FILE", str(keys))
    series = Gauge("vllm:lora_requests_info", "Requests of adapters.", ["running_lora_adapters"])
    series.labels("contracts").set(1)
    try:
        async with running() as found:
            found.app.mount("/metrics", make_asgi_app())
            found.app.routes[-1].path_regex = re.compile("^/metrics(?P<path>.*)$")  # as vLLM mounts its exporter
            public = (await found.client.get("/metrics")).text
            tried = [
                (method, f"/metrics{end}") for method in ("GET", "POST", "OPTIONS") for end in ("", "/", "x", "/x")
            ]
            answers = {sent: await found.client.request(*sent) for sent in tried}
            owned = (await found.client.get("/ballast/metrics", headers={"authorization": "Bearer secret"})).text
    finally:
        REGISTRY.unregister(series)

    assert ("contracts" in public) == (not access)
    assert "contracts" in owned
    assert {sent for sent, answer in answers.items() if answer.is_success} == {
        ("GET", "/metrics"),
        ("GET", "/metrics/"),
    }
    assert not [sent for sent, answer in answers.items() if ("contracts" in answer.text) and access]


async def test_routers_see_online_requests_only(variables):
    async with running() as found:
        headers = {"x-ballast-class": "offline"}
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY, headers=headers))
        await found.sent("r1")
        text = (await found.client.get("/metrics")).text
        found.engine.give("r1", 5, reason="stop")
        await post

    assert 'ballast_requests_waiting{class="offline"} 1.0' in text
    assert 'ballast_requests_waiting{class="online"} 0.0' in text
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
