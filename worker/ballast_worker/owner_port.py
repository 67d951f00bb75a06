"""The metrics port: what names tenants, for Prometheus and the owner of the deployment."""

from __future__ import annotations

import socket
import ssl
from typing import Protocol

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ballast_queue.status import WorkerStatus
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.metrics import CONTENT_TYPE
from ballast_worker.settings import public_host

LIMITS = HttpLimits(connections=64)


class TenantMetrics(Protocol):
    """The series that name tenants."""

    def render(self) -> bytes:
        """Return them in the text format of Prometheus."""


class TenantReport(Protocol):
    """A server that knows its tenants: a worker, or the server inside vLLM."""

    @property
    def tenant_metrics(self) -> TenantMetrics:
        """The metrics."""

    def status(self) -> WorkerStatus:
        """Return the status."""


def owner_server(report: TenantReport, listener: socket.socket, tls: ssl.SSLContext | None) -> HttpServer:
    """Return the server of the metrics port, to be run on `listener`. With `tls`, it serves HTTPS only."""

    async def metrics(_: Request) -> Response:
        return Response(report.tenant_metrics.render(), headers={"content-type": CONTENT_TYPE})

    async def status(_: Request) -> Response:
        return Response(report.status().model_dump_json(), media_type="application/json")

    app = Starlette(routes=[Route("/metrics", metrics), Route("/ballast/status", status)])
    server = HttpServer(app, Connections(LIMITS), name="metrics", tls=tls)
    server.address = address_of(listener, tls)
    return server


def address_of(listener: socket.socket, tls: ssl.SSLContext | None) -> str:
    """Return the address of a server for other machines."""
    host, port = listener.getsockname()[:2]
    return f"{'http' if tls is None else 'https'}://{public_host(host)}:{port}"
