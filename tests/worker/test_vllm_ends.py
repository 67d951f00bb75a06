"""How a server of vLLM drains, and what it answers when a part of it ended, over an app without a model."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading

import pytest
from served_vllm import BODY, running, wait_until
from starlette.applications import Starlette

from ballast_vllm.drain import Drain
from ballast_worker.drain import drain
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.http_server import HttpServer

pytestmark = pytest.mark.anyio


async def test_a_draining_server_finishes_its_requests_and_takes_no_others(variables):
    async with running() as found:
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY))
        await found.sent("r1")
        raw, is_begun = json.dumps(BODY).encode(), asyncio.Event()

        async def parts():
            is_begun.set()
            yield raw[:5]
            await wait_until(lambda: found.server.is_closed)
            yield raw[5:]

        upload = asyncio.create_task(found.client.post("/v1/completions", content=parts()))
        await is_begun.wait()
        drain = asyncio.create_task(found.server.drain.run())
        await wait_until(lambda: found.server.is_closed)
        seen = await found.client.get("/ready"), await found.client.post("/v1/completions", json=BODY)
        health = await found.client.get("/health")
        await wait_until(lambda: upload.done() or "r2" in found.engine.sent)
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
        await wait_until(lambda: found.server.is_draining)
        ready = await found.client.get("/ready")
        post = asyncio.create_task(found.client.post("/v1/completions", json=BODY))
        await found.sent("r1")
        found.engine.give("r1", 5, reason="length")
        answered, is_first_over = await post, http.should_exit
        signal.raise_signal(signal.SIGTERM)
        await wait_until(lambda: http.should_exit)

    assert (ready.status_code, answered.status_code, answered.headers["connection"]) == (503, 200, "close")
    assert (is_first_over, http.force_exit) == (False, True)


@pytest.mark.parametrize("is_own", [True, False], ids=["vllm serve", "another program"])
async def test_a_drain_closes_idle_connections(variables, is_own):
    http = HttpServer(Starlette(), Connections(HttpLimits()))
    listener = socket.create_server(("127.0.0.1", 0))
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    async with running() as found:
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        await wait_until(lambda: http.server_state.connections)
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
        await wait_until(lambda: not found.server.tap.live)
        response, answers = await post, found.engine.answers

    assert (response.status_code, response.headers["retry-after"]) == (503, "1")
    assert answers == {}


async def test_the_health_turns_bad_when_enginecore_ends(variables):
    async with running() as found:
        found.engine.errored = True
        probes = [await found.client.get(path) for path in ("/health", "/ready")]
        refused = await found.client.post("/v1/completions", json=BODY)

    assert [(probe.status_code, probe.json()["reason"]) for probe in probes] == [(503, "EngineCore of vLLM ended.")] * 2
    assert refused.status_code == 500


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_the_health_turns_bad_when_the_feeder_ends(vllm_queue):
    def exits(_: float) -> bool:
        raise SystemExit

    async with running() as found:
        before = (await found.client.get("/health")).status_code
        found.server.loop.wait_as_feeder = exits
        await wait_until(lambda: not any(thread.name == "ballast-feeder" for thread in threading.enumerate()))
        after = await found.client.get("/health")

    assert before == 200
    assert (after.status_code, after.json()) == (
        503,
        {"reason": "The feeder ended, so the server does no offline work."},
    )


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
