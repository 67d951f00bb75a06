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
from typing import Protocol

from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_worker.feeder import Feeder
from ballast_worker.items import ItemLoop

log = Log(__name__)

POLL_SECONDS = 0.05
ABORT_SECONDS = 3.0
"""Time for the answers of requests that are aborted at the end."""


class Drained(Protocol):
    """A worker, or the API server of vLLM, as its drain sees it."""

    is_draining: bool
    is_closed: bool

    @property
    def config(self) -> WorkerConfig: ...
    @property
    def feeder(self) -> Feeder | None: ...
    @property
    def loop(self) -> ItemLoop: ...
    @property
    def num_answering(self) -> int: ...
    def abort_answers(self) -> None: ...


async def drain(server: Drained, *, hang_up: Callable[[], None]) -> None:
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


async def _until(is_done: Callable[[], bool], server: Drained, end: float) -> None:
    """Wait until other threads are done, the time is over, or the engine fails."""
    while not is_done() and server.loop.is_healthy and time.monotonic() < end:  # noqa: ASYNC110 - the other threads set no event
        await asyncio.sleep(POLL_SECONDS)
