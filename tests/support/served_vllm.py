"""A server of vLLM over an app without a model, and its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from fake_vllm import FakeEngine, FakeVllm

from ballast_policy.request import RequestClass
from ballast_queue.redis_store import Queue
from ballast_vllm.middleware import BallastMiddleware
from ballast_vllm.server import VllmServer

BODY = {"model": "m", "prompt": "Once"}


@dataclass
class Running:
    app: FakeVllm
    engine: FakeEngine
    server: VllmServer
    client: httpx.AsyncClient

    async def sent(self, request_id: str) -> Any:
        """The request that EngineCore got."""
        return await wait_until(lambda: self.engine.sent.get(request_id))


async def wait_until(is_true: Callable[[], Any]) -> Any:
    async with asyncio.timeout(60):
        while not (found := is_true()):  # noqa: ASYNC110 - other threads set no event
            await asyncio.sleep(0.005)
    return found


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
        await wait_until(lambda: post.done() or len(self._found.engine.sent) > before)
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
    await wait_until(lambda: found.server.engine.latest.of(request_class).running == num_running)


def as_item(custom_id: str, **body: Any) -> str:
    """Return a line of a job."""
    return json.dumps({"custom_id": custom_id, "url": "/v1/completions", "body": BODY | body})


async def submit(queue: Queue, lines: Sequence[str], tenant: str = "default") -> str:
    """Submit a job as soon as the server has written the settings of the queue, and return its id."""
    await wait_until(lambda: queue.settings.read().models)
    return (await asyncio.to_thread(queue.submissions.submit, lines, tenant=tenant)).job_id


async def leave(found: Running) -> None:
    """End the items, so that the server stops at once."""
    found.engine.report(RequestClass.OFFLINE, 0)
    await found.server.drain.run()


async def rounds(found: Running, number: int) -> None:
    """Wait until the feeder has run at least this number of rounds."""
    loop, begun = found.server.loop, 0
    wait = loop.wait_as_feeder

    def counted(timeout: float) -> bool:
        nonlocal begun
        begun += 1
        return wait(timeout)

    loop.wait_as_feeder = counted
    await wait_until(lambda: loop.wake_feeder() or begun > number)
    loop.wait_as_feeder = wait


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
