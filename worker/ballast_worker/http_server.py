"""The HTTP server: uvicorn with limited connections, which leaves signals to its process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette

from ballast_log import Log
from ballast_worker.http_connection import SWEEP_SECONDS, Connections

log = Log(__name__)

BACKLOG = 2048
STOP_SECONDS = 3
TICK_SECONDS = 0.1
"""Time between two ticks of uvicorn."""
SWEEP_TICKS = round(SWEEP_SECONDS / TICK_SECONDS)


class HttpServer(uvicorn.Server):
    """A server that leaves signals to its process, and logs when it listens."""

    address = ""

    def __init__(
        self, app: Starlette, connections: Connections, *, name: str = "", tls: ssl.SSLContext | None = None
    ) -> None:
        """Create a server. Its log lines start with `name`. With `tls`, it serves HTTPS only."""
        super().__init__(
            uvicorn.Config(
                app,
                loop="none",
                http=connections.protocol(),
                ws="none",
                lifespan="on",
                access_log=False,
                proxy_headers=False,
                log_config=None,
                log_level="error",  # a warning for each wrong request would let clients fill the log
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=int(connections.limits.idle_seconds) + 1,
                timeout_graceful_shutdown=STOP_SECONDS,
            )
        )
        if tls is not None:
            self.config.load()
            self.config.ssl = tls
        self._connections = connections
        self._event = f"{name} listening".strip()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        log.info(self._event, address=self.address)

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            self._connections.sweep(asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        closing = asyncio.create_task(super().shutdown(sockets))
        while not closing.done():  # no tick comes any more
            self._connections.sweep(asyncio.get_running_loop().time())
            await asyncio.wait((closing,), timeout=SWEEP_SECONDS)
        await closing

    def hang_up(self) -> None:
        """Close each connection as soon as it is idle. New connections are still accepted."""
        for connection in tuple(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield
