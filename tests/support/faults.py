"""A proxy before the API server that sees every call, and can answer for the server, cut calls off, or tell of them."""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from aiohttp import web
from control_plane import PEM, ControlPlane

HOP_BY_HOP = {"transfer-encoding", "content-length", "content-encoding", "connection", "keep-alive"}


EXPIRED = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "Expired", "code": 410}


@dataclass(frozen=True)
class Call:
    """One request."""

    method: str
    path: str
    query: dict[str, str]

    @property
    def is_write(self) -> bool:
        """True for what changes children, status or pods; the Lease and events are the operator's own affair."""
        return self.method != "GET" and "/leases" not in self.path and "/events" not in self.path


Answer = tuple[int, dict[str, str]]
"""Status and headers in place of the server's."""


@dataclass
class Proxy:
    """What was seen, and what to do about calls to come."""

    plane: ControlPlane
    port: int = 0
    calls: list[Call] = field(default_factory=list)
    before: Callable[[Call], Answer | None] = lambda _: None
    """Called before a call goes on; an answer is given in the server's place."""
    after: Callable[[Call], None] = lambda _: None
    """Called when the server has answered, before its answer goes back."""

    mute: Callable[[Call], bool] = lambda _: False
    """Says which streams lose what they would have brought."""
    expire: Callable[[Call], bool] = lambda _: False
    """Says which streams are told, as the server does it, that what they ask for was compacted."""
    session: aiohttp.ClientSession | None = None

    @property
    def kubeconfig(self) -> Path:
        return self.plane.kubeconfig_of("test-admin", f"http://127.0.0.1:{self.port}")

    def kubeconfig_of(self, token: str) -> Path:
        return self.plane.kubeconfig_of(token, f"http://127.0.0.1:{self.port}")

    @property
    def writes(self) -> list[Call]:
        return [call for call in self.calls if call.is_write]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        call = Call(request.method, request.path, dict(request.query))
        self.calls.append(call)
        answer = self.before(call)
        if answer is not None:
            return web.json_response({"message": "injected"}, status=answer[0], headers=answer[1])
        if "watch" in call.query and self.expire(call):
            return web.json_response({"type": "ERROR", "object": EXPIRED})
        headers = {
            name: value for name, value in request.headers.items() if name.lower() not in {"host", "accept-encoding"}
        }
        assert self.session is not None
        body = await request.read() or None
        url = self.plane.url + str(request.rel_url)
        async with self.session.request(request.method, url, headers=headers, data=body) as upstream:
            kept = {name: value for name, value in upstream.headers.items() if name.lower() not in HOP_BY_HOP}
            if "watch" not in request.query:
                answered = await upstream.read()
                self.after(call)
                return web.Response(status=upstream.status, body=answered, headers=kept)
            response = web.StreamResponse(status=upstream.status, headers=kept)
            await response.prepare(request)
            async for chunk in upstream.content.iter_any():
                if not self.mute(call):
                    await response.write(chunk)
            return response

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self.handle(request)
            except (aiohttp.ClientError, ConnectionError) as error:  # the server is away
                return web.json_response({"message": str(error)}, status=503)

        context = ssl.create_default_context(cafile=str(PEM))
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None), connector=connector)
        app = web.Application(client_max_size=2**26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.port = int(runner.addresses[0][1])
        ready.set()
        await stop.wait()
        streams = asyncio.all_tasks() - {asyncio.current_task()}
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
        await self.session.close()
        await runner.cleanup()
        await asyncio.sleep(0.5)  # for the sockets to close


@contextmanager
def proxy(plane: ControlPlane) -> Iterator[Proxy]:
    """Run a proxy on a thread of its own."""
    found, ready, stop = Proxy(plane), threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=lambda: loop.run_until_complete(found.serve(ready, stop)), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
