"""Reconciles the keys of the work queue: several at a time, each key once, with a growing delay after failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from ballast_log import Log
from ballast_operator.errors import ClusterUnavailable, OperatorError
from ballast_operator.kinds import Key
from ballast_operator.work_queue import WorkQueue

log = Log(__name__)

Reconcile = Callable[[Key], Awaitable[float | None]]
"""Returns after how many seconds to reconcile again, or None to wait for an event."""


class Controller:
    """Calls `reconcile(key)` for every key that was added. It belongs to one event loop."""

    def __init__(self, reconcile: Reconcile, *, max_concurrent: int, failed: Callable[[Exception], None]) -> None:
        self.queue = WorkQueue()
        self._reconcile = reconcile
        self._max_concurrent = max_concurrent
        self._failed = failed
        self._changed = asyncio.Event()

    def add(self, key: Key, seconds: float = 0.0) -> None:
        """Reconcile `key` in at most `seconds`."""
        self.queue.add(key, asyncio.get_running_loop().time() + seconds)
        self._changed.set()

    async def run(self) -> None:
        """Reconcile until cancelled."""
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._changed.clear()
                while len(running) < self._max_concurrent and (key := self.queue.take(loop.time())) is not None:
                    task = asyncio.create_task(self._reconcile_once(key))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    task.add_done_callback(lambda _: self._changed.set())
                due = self.queue.next_due() if len(running) < self._max_concurrent else None
                try:
                    async with asyncio.timeout_at(due):
                        await self._changed.wait()
                except TimeoutError:
                    continue
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _reconcile_once(self, key: Key) -> None:
        again: float | None = None
        failure: Exception | None = None
        try:
            again = await self._reconcile(key)
        except OperatorError as error:
            failure = error
            log.warning("reconciliation failed and will be retried", resource=str(key), error=str(error))
        except Exception as error:
            failure = error
            log.exception("reconciliation failed on an unexpected error and will be retried", resource=str(key))
        asked = failure.retry_after if isinstance(failure, ClusterUnavailable) else None
        not_before = None if asked is None else asyncio.get_running_loop().time() + asked
        delay = self.queue.finish(key, failed=failure is not None, not_before=not_before)
        if failure is not None:
            self._failed(failure)
            again = delay * random.uniform(0.8, 1.2)
        if again is not None:
            self.add(key, again)
