"""Metrics and probes over HTTP: `/metrics`, `/healthz`, `/readyz`."""

from __future__ import annotations

import socket
from collections.abc import Callable

from aiohttp import web

from ballast_api.wildcard import ANY_OF_BOTH_FAMILIES
from ballast_log import Log
from ballast_operator.metrics import Metrics

log = Log(__name__)


class Web:
    """An HTTP server for the kubelet and Prometheus."""

    def __init__(
        self,
        metrics: Metrics,
        *,
        is_alive: Callable[[], bool],
        unready: Callable[[], str],
        refresh: Callable[[], None],
    ) -> None:
        """Prepare a server.

        It calls `refresh` before each scrape, to update the gauges. `unready` returns why the process is not ready, or
        an empty text.
        """
        self._metrics = metrics
        self._is_alive = is_alive
        self._unready = unready
        self._refresh = refresh
        self._runner: web.AppRunner | None = None

    async def start(self, host: str, port: int) -> int:
        """Start to listen. Return the port."""
        app = web.Application()
        app.router.add_get("/metrics", self._scrape)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._readiness)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        site: web.BaseSite
        if host == ANY_OF_BOTH_FAMILIES:
            # asyncio would listen on IPv6 addresses only.
            listener = socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
            site = web.SockSite(self._runner, listener)
        else:
            site = web.TCPSite(self._runner, host, port)
        await site.start()
        taken = int(self._runner.addresses[0][1])
        log.info("listening", port=taken)
        return taken

    async def stop(self) -> None:
        """Stop listening."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _scrape(self, _: web.Request) -> web.Response:
        self._refresh()
        return web.Response(body=self._metrics.text(), content_type="text/plain", charset="utf-8")

    async def _readiness(self, _: web.Request) -> web.Response:
        why = self._unready()
        return web.Response(status=503, text=f"{why}\n") if why else web.Response(text="ok\n")

    async def _health(self, _: web.Request) -> web.Response:
        if self._is_alive():
            return web.Response(text="ok\n")
        return web.Response(status=503, text="a part of the operator has stopped\n")
