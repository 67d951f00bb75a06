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
from ballast_worker.worker import Worker

log = Log(__name__)

POLL_SECONDS = 0.05
ABORT_SECONDS = 2.0
"""Time for the answers of requests that are aborted at the end."""


async def drain(worker: Worker, *, hang_up: Callable[[], None]) -> None:
    """Empty the worker within its `drain_seconds`. Return earlier if no request is left.

    `hang_up` closes each connection as soon as it is idle.
    """
    runtime = worker.config.runtime
    seconds = runtime.drain_seconds
    worker.is_draining = True
    feeder = worker.feeder
    log.info("draining", online=worker.num_answering, offline=feeder.num_held if feeder else 0, seconds=seconds)
    if feeder is not None:
        feeder.drain()
    if runtime.unready_seconds:
        await asyncio.sleep(runtime.unready_seconds)
    worker.is_closed = True
    hang_up()
    end = time.monotonic() + seconds
    await _until(lambda: not worker.num_answering and (feeder is None or feeder.drained.is_set()), worker, end)
    if worker.num_answering:
        log.warning("drain time is over, online requests are aborted", count=worker.num_answering)
        worker.loop.abort_streams()
        await _until(lambda: not worker.num_answering, worker, time.monotonic() + ABORT_SECONDS)
    if feeder is not None and not feeder.drained.is_set():
        log.warning("drain time is over, leases of offline items expire", count=feeder.num_held)


async def _until(is_done: Callable[[], bool], worker: Worker, end: float) -> None:
    """Wait until other threads are done, the time is over, or the engine fails."""
    while not is_done() and worker.loop.is_healthy and time.monotonic() < end:  # noqa: ASYNC110 - the other threads set no event
        await asyncio.sleep(POLL_SECONDS)
