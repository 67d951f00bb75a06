"""A worker in the process of a replica: its engine, its feeder, and its HTTP server on a port of its own.

Requests reach the port directly, as they do that of any worker. Through a proxy of Serve they reach the same app.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from socket import socket

from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig
from ballast_worker.drain import drain
from ballast_worker.errors import NotServed
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.owner_port import address_of, serving_owner
from ballast_worker.preflight import listen, listen_for_metrics, prepare

POLL_SECONDS = 0.02
ENDED = "The HTTP server of the replica ended."


@dataclass(frozen=True, slots=True)
class Served:
    """A worker that serves."""

    app: Starlette
    address: str
    """The address of its HTTP server."""
    failure: Callable[[], str | None]
    """Return why only a restart helps; None while the worker is healthy."""


@dataclass(frozen=True, slots=True)
class ReadyApp:
    """An app that has its engine and does not serve yet. It starts and stops with the lifespan of the app."""

    app: Starlette
    connections: Connections
    failure: Callable[[], str | None]
    drain: Callable[[Callable[[], None]], Awaitable[None]]
    """Empty the worker. The argument closes each connection as soon as it is idle."""
    tls: ssl.SSLContext | None = None


@contextlib.asynccontextmanager
async def serving(path: Path) -> AsyncIterator[Served]:
    """Run a worker with a configuration file, which it watches. At the end, drain and stop it.

    Raises:
        InvalidConfig: the message names each wrong field.
        NotServed: the configuration asks for something that this replica cannot do.
        AddressTaken: another process listens on the port.
    """
    config = WorkerConfig.load(path)
    is_native = config.backend == "native"
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(await asyncio.to_thread(prepare if is_native else listen, config))
        opened = _native(config, path, listener) if is_native else _vllm(config, path)
        yield await stack.enter_async_context(serve_app(await stack.enter_async_context(opened), listener))


@contextlib.asynccontextmanager
async def serve_app(opened: ReadyApp, listener: socket) -> AsyncIterator[Served]:
    """Serve an app on a socket. At the end, drain the worker and stop the server.

    Raises:
        NotServed: the app does not start.
    """
    server = HttpServer(opened.app, opened.connections, tls=opened.tls)
    server.address = address_of(listener, opened.tls)
    task = asyncio.create_task(_run(server, listener))
    try:
        while not server.started and not task.done():  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(POLL_SECONDS)
        if not server.started:
            raise NotServed(getattr(opened.app.state, "ballast_error", "The app did not start: see the log."))
        opened.app.state.server = server  # vLLM ends it when EngineCore ended
        yield Served(opened.app, server.address, lambda: ENDED if task.done() else opened.failure())
        await opened.drain(server.hang_up)
    finally:
        server.should_exit = True
        await task


async def _run(server: HttpServer, listener: socket) -> None:
    # uvicorn exits if the app does not start, which would end the event loop of the replica and leave Serve waiting.
    with contextlib.suppress(SystemExit):
        await server.serve(sockets=[listener])


@contextlib.asynccontextmanager
async def _native(config: WorkerConfig, path: Path, listener: socket) -> AsyncIterator[ReadyApp]:
    # These imports take seconds.
    from ballast_worker.app import create_app, freeze_loaded, load  # noqa: PLC0415
    from ballast_worker.worker import Worker  # noqa: PLC0415

    metrics_listener = listen_for_metrics(config)
    worker = await asyncio.to_thread(lambda: Worker(load(config, path), path=path))
    tls = worker.certificate.context if worker.certificate is not None else None
    worker.address = address_of(listener, tls)
    app = create_app(worker)
    freeze_loaded()
    opened = ReadyApp(
        app, worker.connections, lambda: worker.failure, lambda hang_up: drain(worker, hang_up=hang_up), tls
    )
    async with serving_owner(worker, metrics_listener, tls):
        yield opened


@contextlib.asynccontextmanager
async def _vllm(config: WorkerConfig, path: Path) -> AsyncIterator[ReadyApp]:
    from ballast_api.serve_config import most_requests  # noqa: PLC0415
    from ballast_serve.ranks import other_nodes  # noqa: PLC0415
    from ballast_vllm.hosted import open_app  # noqa: PLC0415 - it imports vLLM

    if config.runtime.tls_cert_file is not None:
        raise NotServed("runtime.tlsCertFile needs engine.backend native in a replica of Ray Serve. Remove the field")
    with other_nodes(config, path) as ranks:
        async with open_app(config, path, None if ranks is None else ranks.first) as app:
            if ranks is not None:
                ranks.has_started = True

            def failure() -> str | None:
                found: str | None = app.state.ballast.failure
                return (None if ranks is None else ranks.failure) or found

            # The app changes their number with the limit of waiting requests.
            connections = app.state.connections = Connections(HttpLimits.beside(most_requests(config)))
            try:
                yield ReadyApp(app, connections, failure, lambda hang_up: drain(app.state.ballast, hang_up=hang_up))
            finally:
                if ranks is not None:
                    ranks.stop_watching()  # the other nodes end with EngineCore
