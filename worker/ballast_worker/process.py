"""The process of one worker: load the model, serve, drain, end."""

from __future__ import annotations

import asyncio
import signal
import socket
from pathlib import Path

from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_worker.app import create_app, freeze_loaded, load
from ballast_worker.drain import drain
from ballast_worker.http_server import HttpServer
from ballast_worker.owner_port import address_of, serving_owner
from ballast_worker.preflight import listen_for_metrics
from ballast_worker.tls import EventLoop
from ballast_worker.worker import Worker

log = Log(__name__)


def run(config: WorkerConfig, path: Path | None, listener: socket.socket) -> None:
    """Serve on `listener` until a signal.

    Raises:
        NotServed: the model or the machine does not match the configuration.
    """
    metrics_listener = listen_for_metrics(config)
    worker = Worker(load(config, path), path=path)
    process = Process(worker, create_app(worker), listener, metrics_listener)
    freeze_loaded()
    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(process.serve())


class Process:
    """The server of one worker: signals, drain, exit."""

    def __init__(
        self, worker: Worker, app: Starlette, listener: socket.socket, metrics_listener: socket.socket | None
    ) -> None:
        self._worker = worker
        self._listener = listener
        self._draining: asyncio.Task[None] | None = None
        self._metrics_listener = metrics_listener
        self._tls = worker.certificate.context if worker.certificate is not None else None
        self._server = HttpServer(app, worker.connections, tls=self._tls)

    async def serve(self) -> None:
        """Serve until a signal, and return when everything has stopped."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)
        self._worker.address = self._server.address = address_of(self._listener, self._tls)
        async with serving_owner(self._worker, self._metrics_listener, self._tls):
            await self._server.serve(sockets=[self._listener])

    def _on_signal(self, name: str) -> None:
        if self._draining is None:
            log.info("signal received", name=name)
            self._draining = asyncio.get_running_loop().create_task(self._drain())
            return
        log.warning("second signal received, stopping at once", name=name)
        self._worker.abort_answers()
        self._server.should_exit = True

    async def _drain(self) -> None:
        try:
            await drain(self._worker, hang_up=self._server.hang_up)
        finally:
            self._server.should_exit = True
