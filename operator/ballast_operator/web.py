"""Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`.

Whoever reaches the port may connect. So few connections are open at the same time, each for a short time, and requests
for metrics share a budget of time.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable

from aiohttp import web

from ballast_api.scrape_budget import ScrapeBudget
from ballast_api.wildcard import ANY_OF_BOTH_FAMILIES
from ballast_log import Log
from ballast_operator.metrics import Metrics

log = Log(__name__)

MOST_CONNECTIONS = 32
"""One more closes the oldest of the address that has most, so that such a client does not keep the kubelet out."""
MOST_OF_ONE = 8
"""The connections of one address. One more closes its oldest."""
CONNECTION_SECONDS = 30.0
"""Longest time of a connection. An answer that its client does not read takes memory."""


class _Connection(web.RequestHandler):
    """A connection of one client."""

    __slots__ = ("_begun", "_ended", "address")

    def __init__(
        self, server: web.Server, *, begun: Callable[[_Connection], None], ended: Callable[[_Connection], None]
    ) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), access_log=None)  # type: ignore[arg-type]  # no log
        self._begun, self._ended = begun, ended
        self.address = ""
        """The address of the client."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self.address = str(peer[0]) if peer else ""
        self._begun(self)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._ended(self)
        super().connection_lost(exc)

    def end(self) -> None:
        """Close the connection, without the rest of its answer."""
        if self.transport is not None:
            self.transport.abort()


class Web:
    """An HTTP server for the kubelet and Prometheus."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        is_alive: Callable[[], bool],
        unready: Callable[[], str],
        refresh: Callable[[], None],
        seconds: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        """Prepare a server.

        It calls `refresh` before it renders the metrics, to update the gauges. `unready` returns why the process is not
        ready, or an empty text. `seconds` is the clock of their budget, and `computed` the time that the current thread
        spent on a CPU.
        """
        self._metrics = metrics
        self._is_alive = is_alive
        self._unready = unready
        self._refresh = refresh
        self._seconds = seconds
        self._computed = computed
        self._budget = ScrapeBudget()
        self._text = b""
        """The metrics that were rendered last."""
        self._rendering = asyncio.Lock()
        self._runner: web.AppRunner | None = None
        self._listening: asyncio.Server | None = None
        self._open: dict[_Connection, asyncio.TimerHandle] = {}
        """The connections, the oldest first, and when each ends."""

    async def start(self, host: str, port: int) -> int:
        """Start to listen. Return the port."""
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._readiness)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        if host == ANY_OF_BOTH_FAMILIES:
            # asyncio would listen on IPv6 addresses only.
            listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
            self._listening = await loop.create_server(self._admit, sock=listener)
        else:
            self._listening = await loop.create_server(self._admit, host, port)
        taken = int(self._listening.sockets[0].getsockname()[1])
        log.info("listening", port=taken)
        return taken

    async def stop(self) -> None:
        """Stop listening, and close all connections. A client that does not read would delay the end of the process."""
        if self._listening is not None:
            self._listening.close()
        for connection in list(self._open):
            connection.end()
        if self._runner is not None:
            await self._runner.cleanup()

    def _admit(self) -> _Connection:
        """Return the handler of a new connection."""
        assert self._runner is not None, "it listens after its start"
        assert self._runner.server is not None, "the same"
        return _Connection(self._runner.server, begun=self._count, ended=self._forget)

    def _count(self, connection: _Connection) -> None:
        """Count a connection, and close another one if there are too many: a flood pushes out only its own address."""
        loop = asyncio.get_running_loop()
        self._open[connection] = loop.call_later(CONNECTION_SECONDS, connection.end)
        counts = Counter(each.address for each in self._open)
        most = connection.address
        if counts[most] <= MOST_OF_ONE:
            if len(self._open) <= MOST_CONNECTIONS:
                return
            most = max(counts, key=counts.__getitem__)
        oldest = next(each for each in self._open if each.address == most)
        self._forget(oldest)
        oldest.end()

    def _forget(self, connection: _Connection) -> None:
        timer = self._open.pop(connection, None)
        if timer is not None:
            timer.cancel()

    async def _scrape(self, _: web.Request) -> web.Response:
        async with self._rendering:
            if self._budget.has_left(self._seconds()):
                begun = self._computed()
                self._refresh()
                self._budget.spend(self._computed() - begun)
                # The event loop renews the Lease meanwhile.
                self._text, took = await asyncio.to_thread(self._render)
                self._budget.spend(took)
        return _closing(web.Response(body=self._text, content_type="text/plain", charset="utf-8"))

    def _render(self) -> tuple[bytes, float]:
        """Return the metrics, and the time of this thread that they took."""
        begun = self._computed()
        return self._metrics.text(), self._computed() - begun

    async def _readiness(self, _: web.Request) -> web.Response:
        why = self._unready()
        return _closing(web.Response(status=503, text=f"{why}\n") if why else web.Response(text="ok\n"))

    async def _health(self, _: web.Request) -> web.Response:
        if self._is_alive():
            return _closing(web.Response(text="ok\n"))
        return _closing(web.Response(status=503, text="a part of the operator has stopped\n"))


def _closing(response: web.Response) -> web.Response:
    """Close the connection after a response. An idle one would count among the few that may be open."""
    response.force_close()
    return response
