"""Ballast's middleware of vLLM over an app without a model; `tests/vllm/server` has the same over a real vLLM."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

import httpx
import pytest
from fake_vllm import FakeEngine, FakeVllm
from prometheus_client import REGISTRY, Gauge, make_asgi_app
from starlette.applications import Starlette
from starlette.responses import Response

from ballast_api.worker_config import WorkerConfig
from ballast_cli.explain import scene
from ballast_cli.fetch.directory import Directory
from ballast_cli.fetch.manifest import MANIFEST, Kept, Manifest, write_manifest
from ballast_engine.stats import StepKind, StepRecord
from ballast_policy.request import RequestClass
from ballast_queue.job import JobState
from ballast_queue.redis_store import Queue
from ballast_vllm.calls import CALL, Call, EngineRequest
from ballast_vllm.drain import Drain
from ballast_vllm.engine_client import DECIDING
from ballast_vllm.middleware import BallastMiddleware
from ballast_vllm.server import VllmServer
from ballast_worker.drain import drain
from ballast_worker.errors import NotServed
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.openai import Caller
from ballast_worker.requests import RequestTiming
from ballast_worker.settings import model_revision
from ballast_worker.waiting_reasons import why

pytestmark = pytest.mark.anyio
BODY = {"model": "m", "prompt": "Once"}


@dataclass
class Running:
    app: FakeVllm
    engine: FakeEngine
    server: VllmServer
    client: httpx.AsyncClient

    async def sent(self, request_id: str) -> Any:
        """The request that EngineCore got."""
        return await _until(lambda: self.engine.sent.get(request_id))


async def _until(is_true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(60):
        while not (found := is_true()):  # noqa: ASYNC110 - other threads set no event
            await asyncio.sleep(0.005)
    return found


@pytest.fixture
def variables(monkeypatch):
    for name in [name for name in os.environ if name.startswith("BALLAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BALLAST_OFFLINE_LEASE_SECONDS", "5")
    return monkeypatch.setenv


@pytest.fixture
def file(variables, tmp_path):
    """The configuration file of the server, which it follows."""
    variables("BALLAST_CONFIG", str(tmp_path / "worker.yaml"))
    return tmp_path / "worker.yaml"


@asynccontextmanager
async def running(**arguments: Any) -> AsyncIterator[Running]:
    """Run the app with the middleware, as an ASGI server does."""
    engine = FakeEngine(arguments.pop("slots", 2))
    engine.vllm_config.device_config.device_type = arguments.pop("device", "cpu")
    vars(engine.model_config).update(arguments.pop("model_config", {}))
    app = FakeVllm(engine, **arguments)
    app.add_middleware(BallastMiddleware)
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    said: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    life = asyncio.create_task(app({"type": "lifespan", "app": app, "state": {}}, events.get, said.put))
    events.put_nowait({"type": "lifespan.startup"})
    started = await said.get()
    assert started["type"] == "lifespan.startup.complete", started
    layer = app.middleware_stack
    while not isinstance(layer, BallastMiddleware):
        layer = layer.app
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://vllm", timeout=60) as client:
        yield Running(app, engine, layer.server, client)
    events.put_nowait({"type": "lifespan.shutdown"})
    await life


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


@pytest.mark.parametrize(("asked", "slots"), [("1", 1), ("100", 2)])
async def test_the_policy_of_the_configuration_is_in_force_from_the_start(variables, asked, slots):
    variables("BALLAST_SLOTS", asked)
    variables("BALLAST_SLO_TTFT_MILLISECONDS", "250")
    async with running() as found:
        (message,) = found.engine.configured

    assert (message["slots"], message["ttft"]) == (slots, 0.25)


async def test_a_step_is_counted_once_however_often_the_scheduler_is_asked(variables):
    async with running() as found:
        found.engine.counters.note_step(StepRecord(StepKind.DECODE, 0.1, 0.0, 0, 1))
        for _ in range(3):
            await found.server._poll()  # noqa: SLF001 -- the server does it four times a second
        text = (await found.client.get("/metrics")).text

    assert 'ballast_step_seconds_count{kind="decode"} 1.0' in text


async def test_the_latency_of_a_model_that_returns_vectors_changes_while_it_serves(file):
    file.write_text("slo: {latencyMilliseconds: 30}")
    async with running(model_config={"runner_type": "pooling"}) as found:
        file.write_text("slo: {latencyMilliseconds: 20}")
        await _until(lambda: len(found.engine.configured) > 1)

        assert [(message["ttft"], message["tpot"]) for message in found.engine.configured] == [
            (0.03, None),
            (0.02, None),
        ]


async def test_the_price_of_a_worker_is_that_of_all_its_gpus(variables):
    variables("BALLAST_COST_DOLLARS_PER_GPU_HOUR", "2.5")
    async with running() as found:
        assert found.server.dollars_per_hour == 5


async def test_a_raised_limit_of_bodies_raises_their_memory(file):
    file.write_text("limits: {maxBodyKibibytes: 1024}")
    async with running() as found:
        before = found.server.bodies.limit
        file.write_text("limits: {maxBodyKibibytes: 204800}")
        await _until(lambda: found.server.config.limits.max_body_kibibytes == 204800)

        assert (before, found.server.bodies.limit) == (256 * 1024 * 1024, 800 * 1024 * 1024)


async def test_a_raised_limit_of_waiting_requests_raises_that_of_connections(file):
    file.write_text("limits: {maxQueuedRequests: 1}")
    async with running() as found:
        connections = found.app.state.connections = Connections(HttpLimits())
        slots = found.server.policy.slots
        file.write_text("limits: {maxQueuedRequests: 101}")
        await _until(lambda: found.server.config.limits.max_queued_requests == 101)

        assert connections.limits.connections - HttpLimits.beside(slots).connections == 404


async def test_a_model_that_generates_keeps_its_slo_when_a_latency_is_set(file):
    file.write_text("slo: {ttftMilliseconds: 250}")
    async with running(model_config={"runner_type": "generate"}) as found:
        file.write_text("slo: {latencyMilliseconds: 20}")
        await _until(lambda: b"ballast_config_invalid 1.0" in found.server.metrics.render())
        slo, num_configured = found.server.config.slo.milliseconds, len(found.engine.configured)

    assert slo["ttft"] == 250
    assert num_configured == 1


async def test_a_configuration_is_in_force_only_when_enginecore_took_it_and_is_tried_again(fed, file):
    file.write_text("runtime: {generation: 1}")
    async with running() as found:
        await _until(lambda: fed.settings.read().generation == 1)
        core, calls = found.engine.engine_core, []
        call, first = core.call_utility_async, found.server.policy

        async def failing(method, argument):
            if method == "ballast_configure":
                calls.append(argument)
                raise TimeoutError
            return await call(method, argument)

        core.call_utility_async = failing
        file.write_text("runtime: {generation: 2}\nslo: {ttftMilliseconds: 250}")
        await _until(lambda: len(calls) > 1)
        failed = found.server.status().generation, fed.settings.read().generation, found.server.policy == first
        core.call_utility_async = call
        await _until(lambda: found.server.status().generation == 2)
        await _until(lambda: fed.settings.read().generation == 2)

        assert (failed, found.engine.configured[-1]["ttft"], found.server.policy.ttft) == ((1, 1, True), 0.25, 0.25)


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


async def test_a_web_page_can_read_a_refusal(variables):
    variables("BALLAST_LIMITS_MAX_BODY_KIBIBYTES", "1")
    given = {"allowed_origins": ["http://page"], "allowed_methods": ["*"], "allowed_headers": ["*"]}
    async with running(**given, allow_credentials=False) as found:
        body = BODY | {"prompt": "a" * 2000}
        refused = await found.client.post("/v1/completions", json=body, headers={"origin": "http://page"})
        other = await found.client.post("/v1/completions", json=body, headers={"origin": "http://other"})

    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (413, "http://page")
    assert "access-control-allow-origin" not in other.headers


class Posts:
    """Requests that stay until the test gives their outputs."""

    def __init__(self, found: Running, request_class: str = "online", key: str = "") -> None:
        self._found, self._headers = found, {"x-ballast-class": request_class, "authorization": f"Bearer {key}"}
        self._posts: list[asyncio.Task[httpx.Response]] = []

    async def is_accepted(self, **fields: Any) -> bool:
        """Send a request, and return whether it reaches EngineCore."""
        before = len(self._found.engine.sent)
        sent = self._found.client.post("/v1/completions", json=BODY | fields, headers=self._headers)
        post = asyncio.create_task(sent)
        self._posts.append(post)
        await _until(lambda: post.done() or len(self._found.engine.sent) > before)
        assert not post.done() or (await post).status_code == 429
        return not post.done()

    async def end(self) -> None:
        """Answer all requests."""
        for request_id in list(self._found.engine.answers):
            self._found.engine.give(request_id, 5, reason="length")
        await asyncio.gather(*self._posts)


async def reported(found: Running, request_class: RequestClass, num_running: int) -> None:
    """Return when the server knows from the scheduler that requests hold slots."""
    found.engine.report(request_class, num_running)
    await _until(lambda: found.server.engine.latest.of(request_class).running == num_running)


async def submit(queue: Queue, lines: Sequence[str], tenant: str = "default") -> str:
    """Submit a job as soon as the server has written the settings of the queue, and return its id."""
    await _until(lambda: queue.settings.read().models)
    return (await asyncio.to_thread(queue.submissions.submit, lines, tenant=tenant)).job_id


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


async def test_the_requests_of_the_last_step_of_an_encoder_are_shown_in_slots_and_fill_no_queue(variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running(slots=4, model_config={"runner_type": "pooling"}) as found:
        posts = Posts(found)
        found.engine.counters.in_step = {RequestClass.ONLINE: 3}
        accepted = [await posts.is_accepted() for _ in range(6)]
        await _until(lambda: found.server.engine.in_step)
        busy = found.server.status().online
        later = await posts.is_accepted()
        await posts.end()
        idle = found.server.status().online

    assert (accepted, later) == ([True] * 5 + [False], False)
    assert (busy.running, busy.waiting) == (3, 2)
    assert (idle.running, idle.waiting) == (0, 0)


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


async def test_a_draining_server_finishes_its_requests_and_takes_no_others(variables):
    async with running() as found:
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY))
        await found.sent("r1")
        raw, is_begun = json.dumps(BODY).encode(), asyncio.Event()

        async def parts():
            is_begun.set()
            yield raw[:5]
            await _until(lambda: found.server.is_closed)
            yield raw[5:]

        upload = asyncio.create_task(found.client.post("/v1/completions", content=parts()))
        await is_begun.wait()
        drain = asyncio.create_task(found.server.drain.run())
        await _until(lambda: found.server.is_closed)
        seen = await found.client.get("/ready"), await found.client.post("/v1/completions", json=BODY)
        health = await found.client.get("/health")
        await _until(lambda: upload.done() or "r2" in found.engine.sent)
        found.engine.give("r1", 5, reason="length")
        await drain

        assert list(found.engine.sent) == ["r1"]
        assert [response.status_code for response in (*seen, await upload, health, await post)] == [503] * 3 + [200] * 2


async def test_a_server_is_unready_before_it_refuses_requests_and_a_second_signal_stops_it_at_once(variables):
    variables("BALLAST_RUNTIME_UNREADY_SECONDS", "3600")
    http = HttpServer(Starlette(), Connections(HttpLimits()))
    async with running() as found:
        Drain(found.server, http).take_signals()
        signal.raise_signal(signal.SIGTERM)
        await _until(lambda: found.server.is_draining)
        ready = await found.client.get("/ready")
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY))
        await found.sent("r1")
        found.engine.give("r1", 5, reason="length")
        answered, is_first_over = await post, http.should_exit
        signal.raise_signal(signal.SIGTERM)
        await _until(lambda: http.should_exit)

    assert (ready.status_code, answered.status_code, answered.headers["connection"]) == (503, 200, "close")
    assert (is_first_over, http.force_exit) == (False, True)


async def test_a_web_socket_that_a_proxy_of_ray_serve_passes_on_is_closed(variables):
    async with running() as found:
        received, sent = asyncio.Queue(), asyncio.Queue()
        received.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": "/v1/realtime", "headers": [], "query_string": b""}
        await found.app(scope, received.get, sent.put)

        assert [sent.get_nowait()["type"] for _ in range(sent.qsize())] == ["websocket.close"]


@pytest.mark.parametrize("is_own", [True, False], ids=["vllm serve", "another program"])
async def test_a_drain_closes_idle_connections(variables, is_own):
    http = HttpServer(Starlette(), Connections(HttpLimits()))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    async with running() as found:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await _until(lambda: http.server_state.connections)
        await (Drain(found.server, http).run() if is_own else drain(found.server, hang_up=http.hang_up))

        assert await asyncio.wait_for(reader.read(), 60) == b""
    writer.close()
    http.should_exit = True
    await serving


async def test_requests_that_outlive_the_drain_are_aborted(variables):
    variables("BALLAST_RUNTIME_DRAIN_SECONDS", "0")
    async with running() as found:
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY))
        await found.sent("r1")
        await found.server.drain.run()
        await _until(lambda: not found.server.tap.live)
        response, answers = await post, found.engine.answers

    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert answers == {}


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
        await _until(lambda: not found.server.tap.live)
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


async def test_the_health_turns_bad_when_enginecore_ends(variables):
    async with running() as found:
        found.engine.errored = True
        probes = [await found.client.get(path) for path in ("/health", "/ready")]
        refused = await found.client.post("/v1/completions", json=BODY)

    assert [(probe.status_code, probe.json()["reason"]) for probe in probes] == [(503, "EngineCore of vLLM ended.")] * 2
    assert refused.status_code == 500


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_health_turns_bad_when_the_feeder_ends(variables, valkey, queue_name):
    variables("BALLAST_RUNTIME_REDIS_URL", valkey.url)
    variables("BALLAST_OFFLINE_QUEUE", queue_name)

    def exits(_: float) -> bool:
        raise SystemExit

    async with running() as found:
        before = (await found.client.get("/health")).status_code
        found.server.loop.wait_as_feeder = exits
        await _until(lambda: not any(thread.name == "ballast-feeder" for thread in threading.enumerate()))
        after = await found.client.get("/health")

    assert before == 200
    assert (after.status_code, after.json()) == (
        503,
        {"reason": "The feeder ended, so the server does no offline work."},
    )


@pytest.fixture
def fed(variables, valkey, queue_name):
    variables("BALLAST_RUNTIME_REDIS_URL", valkey.url)
    variables("BALLAST_OFFLINE_QUEUE", queue_name)
    queue = Queue.connect(valkey.url, queue_name)
    yield queue
    queue.close()


async def test_an_item_that_is_given_back_goes_on_after_its_tokens(fed, as_item):
    async with running() as first:
        job_id = await submit(fed, [as_item("a")])
        await first.sent("r1")
        first.engine.give("r1", 11)
        first.engine.give("r1", 12)
        await first.server.drain.run()
    counts = fed.jobs.get(job_id).counts
    async with running() as second:
        request = await second.sent("r1")
        second.engine.give("r1", 13)
        await second.server.drain.run()
    async with running() as third:
        last = await third.sent("r1")
        third.engine.give("r1", 14, reason="length")
        await _until(lambda: fed.jobs.get(job_id).state is JobState.COMPLETED)
    (result,) = fed.results.read(job_id)

    assert (counts.waiting, counts.leased) == (1, 0)
    assert request.prompt_token_ids == [1, 2, 3, 11, 12]
    assert request.sampling_params.max_tokens == 6
    assert request.sampling_params.extra_args["ballast"]["num_computed"] == 5
    assert last.prompt_token_ids == [1, 2, 3, 11, 12, 13]
    assert last.sampling_params.extra_args["ballast"]["num_computed"] == 6
    assert result.body["tokens"] == [11, 12, 13, 14]
    assert (result.tokens_in, result.tokens_out) == (3, 4)


async def _leave(found: Running) -> None:
    """End the items, so that the server stops at once."""
    found.engine.report(RequestClass.OFFLINE, 0)
    await found.server.drain.run()


async def test_items_that_run_leave_the_limit_of_other_offline_requests_as_it_is(fed, as_item, variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    async with running() as found:
        await submit(fed, [as_item("a"), as_item("b")])
        for request_id in ("r1", "r2"):
            await found.sent(request_id)
            found.engine.give(request_id, 11)
        await reported(found, RequestClass.OFFLINE, 2)
        posts = Posts(found, "offline")
        accepted = [await posts.is_accepted() for _ in range(2)]
        await posts.end()
        await _leave(found)

        assert accepted == [True, False]


async def test_the_prompts_of_an_item_do_not_fill_the_queue_of_other_offline_requests(fed, as_item, variables):
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "2")
    async with running() as found:
        await submit(fed, [as_item("a", prompt=["Once"] * 40)])
        await found.sent("r40")
        posts = Posts(found, "offline")
        accepted = await posts.is_accepted()
        await posts.end()
        await _leave(found)

        assert accepted


async def rounds(found: Running, number: int) -> None:
    """Wait until the feeder has run at least this number of rounds."""
    loop, begun = found.server.loop, 0
    wait = loop.wait_as_feeder

    def counted(timeout: float) -> bool:
        nonlocal begun
        begun += 1
        return wait(timeout)

    loop.wait_as_feeder = counted
    await _until(lambda: loop.wake_feeder() or begun > number)
    loop.wait_as_feeder = wait


@pytest.mark.parametrize("kind", ["generate", "pooling"])
async def test_items_with_many_prompts_are_claimed_as_their_requests_get_slots(fed, as_item, kind):
    """The scheduler of an encoder reports between two steps, when no request of it holds a slot."""
    async with running(slots=8, model_config={"runner_type": kind}) as found:
        job_id = await submit(fed, [as_item(f"{i}", prompt=["Once"] * 40) for i in range(30)])
        held = []
        for ended in range(3):
            await found.sent(f"r{40 * ended + 8}")
            await reported(found, RequestClass.OFFLINE, 8 if kind == "generate" else 0)
            await rounds(found, 5)
            found.engine.give(f"r{40 * ended + 1}", 5, reason="stop")
            await _until(lambda: len(found.server.engine.items) == 2)
            await rounds(found, 5)
            held.append(len(found.server.engine.items))
            for i in range(40 * ended + 2, 40 * ended + 41):
                found.engine.give(f"r{i}", 5, reason="stop")
        await _leave(found)
        counts, recorder = fed.jobs.get(job_id).counts, found.server.feeder.recorder

    assert set(held) == {2}, "one that has begun, and one ahead"
    assert not sum(recorder.tpot["offline"].counts), "no answer has a second token"
    assert (counts.succeeded, counts.waiting, counts.failed) == (3, 27, 0)


async def test_an_item_with_many_prompts_at_the_cap_of_its_tenant_leaves_the_other_slots_to_others(
    fed, as_item, variables
):
    variables("BALLAST_OFFLINE_TENANTS", "[{name: capped, maxSlots: 3}, {name: other}]")
    async with running(slots=8) as found:
        job_id = await submit(fed, [as_item(f"{i}", prompt=["Once"] * 40) for i in range(9)], tenant="capped")
        await found.sent("r40")
        found.engine.give("r1", 5)
        await reported(found, RequestClass.OFFLINE, 3)
        await _until(lambda: [w.tenant_requests for w in fed.workers.statuses()] == [{"capped": 40}])
        [status], said = fed.workers.statuses(), why(fed.jobs.get(job_id), scene(fed))
        await submit(fed, [as_item(f"{i}") for i in range(9)], tenant="other")
        await _until(lambda: len(found.server.engine.items) >= 1 + 5)
        tenants = [item.call.caller.tenant for item in found.server.engine.items.values()]
        await _leave(found)

    assert tenants.count("capped") == 1
    assert tenants.count("other") >= 5
    assert not status.can_claim
    assert any("its cap: 1 item of 40 requests under lease, at most 3 slots" in sentence for sentence in said), said


@pytest.mark.parametrize("sampling", [{"logprobs": 1}, {"max_tokens": 1}], ids=["logprobs", "nothing is left"])
async def test_an_item_that_cannot_go_on_starts_again_and_its_tokens_count_as_computed(fed, as_item, sampling):
    async with running() as first:
        await submit(fed, [as_item("a", sampling=sampling)])
        await first.sent("r1")
        first.engine.give("r1", 11)
        await first.server.drain.run()
    async with running() as second:
        request = await second.sent("r1")
        await second.server.drain.run()

    assert request.prompt_token_ids == [1, 2, 3]
    assert request.sampling_params.extra_args["ballast"]["num_computed"] == 4


async def test_the_computed_tokens_of_an_item_are_divided_between_its_requests(fed, as_item):
    async with running() as first:
        await submit(fed, [as_item("a", prompt=["Once"] * 4)])
        await first.sent("r4")
        first.engine.give("r1", 11)
        await first.server.drain.run()
    async with running() as second:
        await second.sent("r4")
        places = [request.sampling_params.extra_args["ballast"] for request in second.engine.sent.values()]
        await second.server.drain.run()

    assert [place.get("num_computed", 0) for place in places] == [3, 1, 0, 0]


async def test_an_item_starts_again_when_the_arguments_of_vllm_changed(fed, as_item, variables):
    async with running() as first:
        await submit(fed, [as_item("a")])
        await first.sent("r1")
        first.engine.give("r1", 11)
        await first.server.drain.run()
    variables("BALLAST_ENGINE_BACKEND", "vllm")
    variables("BALLAST_ENGINE_VLLM", "{args: [--tokenizer=other]}")
    async with running() as second:
        changed = await second.sent("r1")
        second.engine.give("r1", 12)
        await second.server.drain.run()
    async with running() as third:
        same = await third.sent("r1")
        await third.server.drain.run()

    assert (changed.prompt_token_ids, same.prompt_token_ids) == ([1, 2, 3], [1, 2, 3, 12])


async def revision(**arguments: Any) -> str:
    async with running(**arguments) as found:
        return found.server.revision


@pytest.mark.parametrize("field", DECIDING)
async def test_a_field_of_vllm_that_decides_tokens_is_part_of_the_revision(variables, field):
    assert await revision() == await revision()
    assert await revision() != await revision(model_config={field: "another"})


async def test_the_rendering_of_chats_is_part_of_the_revision(variables, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages }}>")

    async def revisions():
        stated = {"chat_template": str(file)}
        options = ({}, stated, {"chat_template": "[{{ messages }}]"}, {"chat_template": "tool.jinja"})
        thinking = {"default_chat_template_kwargs": {"enable_thinking": False}}
        return [await revision(**arguments) for arguments in (*options, stated | thinking)]

    before = await revisions()
    again = await revisions()
    file.write_text("({{ messages }})")
    after = await revisions()

    assert len(set(before)) == 5
    assert before == again
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True, True, False]


@pytest.mark.parametrize("name", ["chat_template.jinja", "additional_chat_templates/tool_use.jinja", "config.json"])
def test_a_file_that_decides_prompts_is_part_of_the_revision_of_a_directory(tmp_path, name):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text("<{{ messages }}>")
    before = model_revision(config, tmp_path)
    file.write_text("({{ messages }})")

    assert model_revision(config, tmp_path) != before


@pytest.mark.parametrize(
    ("revision", "is_one_version"),
    [("", False), ("main", False), ("v1", False), ("0123456789abcdef" * 2 + "0" * 8, True)],
)
def test_only_a_commit_names_a_version_without_its_files(tmp_path, revision, is_one_version):
    config = WorkerConfig.model_validate({"model": {"uri": "/models/m", "revision": revision}})
    zeros, other = bytes(1 << 20), bytearray(1 << 20)
    other[200_000] = 1  # between the samples
    for copy, weights in (("first", zeros), ("again", zeros), ("moved", bytes(other))):
        _fetched(tmp_path / copy, weights)
    first, again, moved = (model_revision(config, tmp_path / copy) for copy in ("first", "again", "moved"))

    assert first == again
    assert (first == moved) == is_one_version
    assert first.startswith(revision)
    assert (first == revision) == is_one_version, (
        "a worker with an older Ballast continues no answer of another version"
    )


@pytest.mark.parametrize("record", ["", "[]", '{"files": {"model.safetensors": {}}}'], ids=["no JSON", "list", "empty"])
def test_only_the_record_of_an_unchanged_file_names_its_content(tmp_path, record):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    file, changed = tmp_path / "model.safetensors", bytearray(1 << 20)
    changed[0] = 1
    _fetched(tmp_path, bytes(1 << 20))
    recorded = model_revision(config, tmp_path)
    file.write_bytes(changed)
    edited = model_revision(config, tmp_path)
    (tmp_path / MANIFEST).write_text(record)

    assert len({recorded, edited}) == 2
    assert model_revision(config, tmp_path) == edited


def _fetched(path, weights):
    """Write a directory as `ballast fetch` leaves it."""
    path.mkdir(exist_ok=True)
    (path / "model.safetensors").write_bytes(weights)
    with Directory.open(path) as directory:
        kept = Kept.of(directory, "model.safetensors", hashlib.sha256(weights).hexdigest())
        write_manifest(directory, Manifest("hf://a/b@main", "", "v", {"model.safetensors": kept}))


@pytest.mark.parametrize(
    "make", [lambda file: file.symlink_to("nowhere"), lambda file: file.mkdir()], ids=["dangling", "directory"]
)
def test_a_file_of_the_model_that_cannot_be_read_is_named(tmp_path, make):
    config = WorkerConfig.parse("model: {uri: /models/m}", "here.yaml")
    make(tmp_path / "generation_config.json")

    with pytest.raises(NotServed, match=rf"{tmp_path}/generation_config\.json cannot be read"):
        model_revision(config, tmp_path)


async def test_the_queue_learns_of_an_adapter_that_is_loaded_later(fed):
    async with running() as found:
        await _until(lambda: fed.settings.read().models)
        found.app.state.openai_serving_models.lora_requests["late"] = object()
        await _until(lambda: "late" in fed.settings.read().models)


async def test_a_model_without_a_url_of_items_serves_online_and_refuses_items_with_a_sentence(fed, as_item):
    because = "the model of this queue serves no URL of items"
    early = await asyncio.to_thread(fed.submissions.submit, [as_item("a")])
    async with running(model_config={"runner_type": "pooling"}, urls=["/classify"]) as found:
        await _until(lambda: fed.jobs.get(early.job_id).state.is_over)
        late = await submit(fed, [as_item("a")])
        status = (await found.client.get("/ready")).status_code
    errors = [result.error["message"] for job_id in (early.job_id, late) for result in fed.results.read(job_id)]

    assert status == 200
    assert len(errors) == 2
    assert all(because in error for error in errors), errors


async def test_an_item_that_vllm_refuses_keeps_the_sentence_and_spends_no_other_attempt(fed, as_item):
    async with running():
        job_id = await submit(fed, [as_item("a", max_tokens=0)])
        await _until(lambda: fed.jobs.get(job_id).state.is_over)
    (result,) = fed.results.read(job_id)

    assert (result.status_code, result.error["message"]) == (400, "max_tokens must be at least 1")


async def test_an_item_that_runs_is_aborted_when_its_job_is_cancelled(fed, as_item):
    async with running() as found:
        job_id = await submit(fed, [as_item("a")])
        await found.sent("r1")
        found.engine.give("r1", 11)
        await asyncio.to_thread(fed.jobs.cancel, job_id)
        outcomes = found.server.feeder.recorder.outcomes
        await _until(lambda: outcomes["offline", "aborted"])
        await _until(lambda: fed.jobs.get(job_id).state.is_over and not found.server.tap.live)
        job, aborted, items = fed.jobs.get(job_id), found.engine.aborted, found.server.engine.items

    assert job.state is JobState.CANCELLED
    assert (job.counts.leased, job.counts.waiting, job.counts.succeeded) == (0, 0, 0)
    assert aborted == ["r1"]
    assert items == {}


async def test_items_in_flight_are_tried_again_when_enginecore_ends(fed, as_item):
    async with running() as found:
        job_id = await submit(fed, [as_item("a")])
        await found.sent("r1")
        found.engine.errored = True
        await _until(lambda: fed.jobs.get(job_id).counts.waiting)
    counts = fed.jobs.get(job_id).counts

    assert (counts.leased, counts.waiting) == (0, 1)


async def test_items_in_flight_are_tried_again_when_enginecore_hangs_and_the_server_has_failed(fed, as_item, variables):
    variables("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "1")
    async with running() as found:
        job_id = await submit(fed, [as_item("a")])
        await found.sent("r1")
        core, goes_on = found.engine.engine_core, asyncio.Event()
        call = core.call_utility_async

        async def hanging(method, argument):
            await goes_on.wait()
            return await call(method, argument)

        core.call_utility_async = hanging
        await _until(lambda: fed.jobs.get(job_id).counts.waiting)
        goes_on.set()
        polled = found.server.engine.latest
        await _until(lambda: found.server.engine.latest is not polled)
        probes = [await found.client.get(path) for path in ("/health", "/ready")]
        refused = await found.client.post("/v1/completions", json=BODY)
    counts = fed.jobs.get(job_id).counts

    assert (counts.leased, counts.waiting) == (0, 1)
    reason = "EngineCore of vLLM has not answered for 1 s (VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS)"
    assert [probe.status_code for probe in probes] == [503, 503]
    assert all(probe.json()["reason"].startswith(reason) for probe in probes)
    assert refused.status_code == 500


@pytest.mark.parametrize(
    ("limit", "device", "has_failed"),
    [("", "cuda", True), ("", "cpu", False), ("100", "cpu", True), ("0", "cuda", False), ("-1", "cuda", False)],
)
async def test_a_silent_enginecore_has_failed_where_a_limit_applies(variables, limit, device, has_failed):
    variables("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", limit)
    async with running(device=device) as found:
        for _ in range(1201):  # 300 s, in which no other task runs
            await found.server._watch()  # noqa: SLF001 -- the server does it four times a second

        assert (found.server.failure is not None) is has_failed


@pytest.fixture
def as_item():
    def line(custom_id: str, **body: Any) -> str:
        return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": BODY | body})

    return line


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
        (tmp_path / "fresh").write_text("other: lab\n")
        (tmp_path / "fresh").rename(keys)
        async with asyncio.timeout(60):
            while await status("k") == 200:  # noqa: ASYNC110 - other threads set no event
                await asyncio.sleep(0.005)

        assert before == (200, 200)
        assert (await status("k"), await status("other")) == (401, 200)

        for text, is_invalid in (("other: [", "1.0"), ("{}", "0.0")):
            (tmp_path / "fresh").write_text(text)
            (tmp_path / "fresh").rename(keys)
            shown = f"ballast_config_invalid {is_invalid}".encode()
            await _until(lambda: shown in found.server.metrics.render())  # noqa: B023

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


@asynccontextmanager
async def before_app(server: VllmServer, app: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    """Yield a client of an app with the middleware of a server."""
    middleware = BallastMiddleware(app)
    middleware.server = server
    async with httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://vllm") as client:
        yield client


async def accept(scope, receive, send):
    """Answer with 200."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})


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


@pytest.mark.parametrize(("number", "status"), [(3, 200), (4, 400)])
@pytest.mark.parametrize("path", ["/v1/chat/completions/batch", "/v1/chat/completions"])
async def test_a_call_fills_the_slots_and_the_queue_and_not_more(variables, path, number, status):
    """Several conversations are counted before vLLM renders them, and several choices (`n`) by vLLM."""
    variables("BALLAST_LIMITS_MAX_QUEUED_REQUESTS", "1")
    body, is_batch = {"messages": [[{"role": "user", "content": "Hi"}]] * number}, path.endswith("batch")

    async def app(scope, receive, send):
        found.engine.check_admission(1 if is_batch else number)
        await accept(scope, receive, send)

    async with running() as found, before_app(found.server, app) as client:
        response = await client.post(path, json=body)

    assert response.status_code == status
    assert not found.server.recorder.outcomes["online", "stop"], "EngineCore got no request"


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
