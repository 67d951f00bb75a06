"""SIGTERM in the API server of vLLM: return items, finish online requests, and let vLLM end.

vLLM's own handler ends EngineCore at once, or after `--shutdown-timeout`, while it still takes new requests. `Drain`
handles the signals in its place, in the order of a worker: see `ballast_worker.drain`.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection
from typing import Any, Protocol

from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_vllm.calls import Call
from ballast_vllm.engine_client import EngineTap
from ballast_worker.feeder import Feeder

log = Log(__name__)

POLL_SECONDS = 0.05
STOP_SECONDS = 3.0
"""Time that aborted requests, and then the connections of the HTTP server, have to end."""


class Drained(Protocol):
    """The server as the drain sees it."""

    is_draining: bool
    is_closed: bool

    @property
    def config(self) -> WorkerConfig: ...
    @property
    def tap(self) -> EngineTap: ...
    @property
    def feeder(self) -> Feeder | None: ...
    @property
    def calls(self) -> Collection[Call]: ...


class Drain:
    """The end of one server."""

    def __init__(self, server: Drained, http_server: Any) -> None:
        """`http_server` is vLLM's uvicorn server; None if another program serves the app, and stops it."""
        self._server = server
        self._http = http_server
        self._task: asyncio.Task[None] | None = None

    def take_signals(self) -> None:
        """Handle SIGTERM and SIGINT."""
        if self._http is None:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number).name)

    async def run(self, hang_up: Callable[[], None] | None = None) -> None:
        """Return items, finish online requests, and abort those that are left after `drain_seconds`.

        `hang_up` closes each connection as soon as it is idle. Only a program that serves the app itself passes it.
        """
        server = self._server
        runtime, feeder = server.config.runtime, server.feeder
        server.is_draining = True
        held = feeder.num_held if feeder else 0
        log.info("draining", online=len(server.calls), offline=held, seconds=runtime.drain_seconds)
        if feeder is not None:
            feeder.drain()
        if runtime.unready_seconds:
            await asyncio.sleep(runtime.unready_seconds)
        server.is_closed = True
        (hang_up or self._hang_up)()
        await self._until(
            lambda: not server.calls and (feeder is None or feeder.drained.is_set()), seconds=runtime.drain_seconds
        )
        if server.calls:
            log.warning("drain time is over, online requests are aborted", count=len(server.calls))
            for call in tuple(server.calls):
                call.hang_up()
            await self._until(lambda: not server.calls, seconds=STOP_SECONDS)
        if feeder is not None and not feeder.drained.is_set():
            log.warning("drain time is over, leases of offline items expire", count=feeder.num_held)

    def _hang_up(self) -> None:
        if self._http is not None:
            for connection in tuple(self._http.server_state.connections):
                connection.shutdown()

    def _on_signal(self, name: str) -> None:
        if self._task is None:
            log.info("signal received", name=name)
            self._task = asyncio.get_running_loop().create_task(self._run_and_exit())
            return
        log.warning("second signal received, stopping at once", name=name)
        self._http.force_exit = self._http.should_exit = True

    async def _run_and_exit(self) -> None:
        try:
            await self.run()
        finally:
            self._http.should_exit = True  # vLLM then ends EngineCore
        await asyncio.sleep(STOP_SECONDS)
        self._http.force_exit = True

    async def _until(self, is_done: Callable[[], bool], *, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not is_done() and not self._server.tap.is_dead and time.monotonic() < end:  # noqa: ASYNC110 - as in ballast_worker.drain
            await asyncio.sleep(POLL_SECONDS)
