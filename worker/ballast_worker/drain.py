"""SIGTERM: offline items go back with what they generated, online requests finish, then the process ends.

From the first signal on `/ready` says no, nothing more is claimed, and each answer is the last of its connection: a
client that keeps one comes by another, which leads to another worker. After `unready_seconds` new requests get 503 with
Retry-After, and connections that nobody used are closed. (In a cluster a preStop pause lets endpoints go before the
signal.)
A second signal ends at once: the leases of what is still held run out, and other workers take it up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from ballast_log import Log
from ballast_worker.worker import Worker

log = Log(__name__)

LOOK_SECONDS = 0.05
LAST_WORDS_SECONDS = 2.0
"""Kept back for the answers to what is aborted at the end."""


async def drain(worker: Worker, *, hang_up: Callable[[], None]) -> None:
    """Empty the worker within its `drain_seconds`; returns earlier when nothing is left.

    `hang_up` closes each connection once nothing is under way on it.
    """
    runtime = worker.config.runtime
    seconds = runtime.drain_seconds
    worker.is_draining = True
    feeder = worker.feeder
    log.info("draining", online=worker.loop.num_streams, offline=feeder.num_held if feeder else 0, seconds=seconds)
    if feeder is not None:
        feeder.drain()
    if runtime.unready_seconds:
        await asyncio.sleep(runtime.unready_seconds)
    worker.is_closed = True
    hang_up()
    end = time.monotonic() + seconds
    await _until(lambda: not worker.loop.num_streams and (feeder is None or feeder.drained.is_set()), worker, end)
    if worker.loop.num_streams:
        log.warning("drain time is over; online requests are aborted", count=worker.loop.num_streams)
        worker.loop.abort_streams()
        await _until(lambda: not worker.loop.num_streams, worker, time.monotonic() + LAST_WORDS_SECONDS)
    if feeder is not None and not feeder.drained.is_set():
        log.warning("drain time is over; leases of offline items run out", count=feeder.num_held)


async def _until(is_done: Callable[[], bool], worker: Worker, end: float) -> None:
    """Wait for other threads, or for the end, or for an engine that will not get there."""
    while not is_done() and worker.loop.is_healthy and time.monotonic() < end:  # noqa: ASYNC110 - they set no event
        await asyncio.sleep(LOOK_SECONDS)
