"""SIGTERM in the API server of vLLM: return items, finish online requests, and let vLLM end.

vLLM's own handler ends EngineCore at once, or after `--shutdown-timeout`, while it still takes new requests. `Drain`
handles the signals in its place, in the order of a worker: see `ballast_worker.drain`.
"""

from __future__ import annotations

import asyncio
import signal
from typing import Any

from ballast_log import Log
from ballast_worker.drain import drain
from ballast_worker.model_server import ModelServer

log = Log(__name__)

STOP_SECONDS = 3.0
"""Time that the connections of the HTTP server have to end."""


class Drain:
    """The end of one server."""

    def __init__(self, server: ModelServer, http_server: Any) -> None:
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

    async def run(self) -> None:
        """Return items, finish online requests, and abort those that are left after `drain_seconds`."""
        await drain(self._server, hang_up=self._hang_up)

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
