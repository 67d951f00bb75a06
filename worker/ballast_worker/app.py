"""The ASGI app of one worker, and the server that runs it as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Generator
from pathlib import Path

import uvicorn
from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig
from ballast_worker.api import routes
from ballast_worker.drain import drain
from ballast_worker.errors import AddressTaken
from ballast_worker.log import Log
from ballast_worker.reload import Loaded, content_hash
from ballast_worker.worker import Worker

log = Log(__name__)

IDLE_CONNECTION_SECONDS = 75
"""Longer than the minute after which load balancers drop idle connections, so that they close first."""
STOP_SECONDS = 3
BACKLOG = 2048


def create_app(config: WorkerConfig, *, path: Path | None = None, worker: Worker | None = None) -> Starlette:
    """The app that serves one model; under this module's server, another ASGI server, or Ray Serve.

    Args:
        config: the configuration
        path: the file it came from, watched for changes
        worker: one made before from this configuration; by default a new one, which loads the model now

    Raises:
        NotServed: the configuration asks for what this worker cannot do.
        EngineError: the checkpoint, or the options of the engine, are wrong.
    """
    if worker is None:
        worker = Worker(load(config, path), path=path)
    serving = worker

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving.start()
        try:
            yield
        finally:
            await serving.stop()

    app = routes(worker, lifespan)
    app.state.worker = worker
    return app


def load(config: WorkerConfig, path: Path | None) -> Loaded:
    """The configuration with the hash of its file."""
    text = path.read_text(encoding="utf-8") if path is not None else config.dump()
    return Loaded(config, content_hash(text))


def listen(config: WorkerConfig) -> socket.socket:
    """Take the address, before the model is loaded.

    Raises:
        AddressTaken: says who could hold it and what to do.
    """
    host, port = config.runtime.host, config.runtime.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        taken = socket.socket(found[0], socket.SOCK_STREAM)
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(found[4])
    except OSError as error:
        raise AddressTaken(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Stop what listens there, or set "
            "runtime.port to another port (0 takes a free one)."
        ) from error
    return taken


class _Server(uvicorn.Server):
    """Leaves signals to `_Signals`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Process:
    """The server of one worker: signals, drain, exit."""

    def __init__(self, worker: Worker, app: Starlette, listener: socket.socket) -> None:
        self._worker = worker
        self._listener = listener
        self._draining: asyncio.Task[None] | None = None
        self._server = _Server(
            uvicorn.Config(
                app,
                loop="none",
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=False,
                log_config=None,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=IDLE_CONNECTION_SECONDS,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )

    async def serve(self) -> None:
        """Serve until a signal; returns once everything has stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        host, port = self._listener.getsockname()[:2]
        self._worker.address = f"http://{'[' + host + ']' if ':' in host else host}:{port}"
        log.info("listening", address=self._worker.address)
        await self._server.serve(sockets=[self._listener])

    def _on_signal(self, name: str) -> None:
        if self._draining is None:
            log.info("signal", name=name)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            return
        log.warning("second signal, stopping at once", name=name)
        self._worker.loop.abort_streams()
        self._server.force_exit = self._server.should_exit = True

    async def _drain(self) -> None:
        try:
            await drain(self._worker)
        finally:
            self._server.should_exit = True
