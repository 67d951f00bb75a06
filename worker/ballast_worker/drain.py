"""SIGTERM: return offline items with their generated tokens, finish online requests, and end the process.

After the first signal `/ready` returns 503, the worker claims no more items, and each answer closes its connection, so
that the next request of the client reaches another worker. For `unready_seconds` the worker still accepts new requests,
while Kubernetes removes it from the endpoints. After that, new requests get 503 with Retry-After, and idle connections
are closed. No preStop hook is needed.

A second signal ends the process at once. The leases of its items expire, and other workers claim them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ballast_log import Log
from ballast_worker.model_server import ModelServer

log = Log(__name__)

POLL_SECONDS = 0.05
ABORT_SECONDS = 3.0
"""Time for the answers of requests that are aborted at the end."""


async def drain(server: ModelServer, *, hang_up: Callable[[], None]) -> None:
    """Empty the server within its `drain_seconds`. Return earlier if no request is left.

    `hang_up` closes each connection as soon as it is idle.
    """
    runtime = server.config.runtime
    seconds = runtime.drain_seconds
    server.is_draining = True
    feeder = server.feeder
    log.info("draining", online=server.num_answering, offline=feeder.num_held if feeder else 0, seconds=seconds)
    if feeder is not None:
        feeder.drain()
    if runtime.unready_seconds:
        await asyncio.sleep(runtime.unready_seconds)
    server.is_closed = True
    hang_up()
    end = time.monotonic() + seconds
    await _until(lambda: not server.num_answering and (feeder is None or feeder.drained.is_set()), server, end)
    if server.num_answering:
        log.warning("drain time is over, online requests are aborted", count=server.num_answering)
        server.abort_answers()
        await _until(lambda: not server.num_answering, server, time.monotonic() + ABORT_SECONDS)
    if feeder is not None and not feeder.drained.is_set():
        log.warning("drain time is over, leases of offline items expire", count=feeder.num_held)


async def _until(is_done: Callable[[], bool], server: ModelServer, end: float) -> None:
    """Wait until other threads are done, the time is over, or the engine fails."""
    while not is_done() and server.loop.is_healthy and time.monotonic() < end:  # noqa: ASYNC110 - the other threads set no event
        await asyncio.sleep(POLL_SECONDS)
