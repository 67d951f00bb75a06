"""The metrics port: what names tenants, for Prometheus and the owner of the deployment."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.metrics import CONTENT_TYPE
from ballast_worker.model_server import ModelServer
from ballast_worker.settings import public_host

LIMITS = HttpLimits(connections=64)


def owner_server(of: ModelServer, listener: socket.socket, tls: ssl.SSLContext | None) -> HttpServer:
    """Return the metrics port of a server, to be run on `listener`. With `tls`, it serves HTTPS only."""

    async def metrics(_: Request) -> Response:
        return Response(of.tenant_metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def status(_: Request) -> Response:
        return Response(of.status().model_dump_json(), media_type="application/json")

    app = Starlette(routes=[Route("/metrics", metrics), Route("/ballast/status", status)])
    server = HttpServer(app, Connections(LIMITS), name="metrics", tls=tls)
    server.address = address_of(listener, tls)
    return server


@contextlib.asynccontextmanager
async def serving_owner(
    of: ModelServer, listener: socket.socket | None, tls: ssl.SSLContext | None
) -> AsyncIterator[None]:
    """Serve the metrics port of a server within the block, if it has one."""
    if listener is None:
        yield
        return
    server = owner_server(of, listener, tls)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving


def address_of(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    """Return the address of a server for other machines."""
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{public_host(host)}:{port}"
