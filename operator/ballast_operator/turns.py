"""Give every name its turns: a few at a time, one per name, later and later after failures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

from ballast_log import Log
from ballast_operator.agenda import Agenda
from ballast_operator.errors import ClusterUnavailable, OperatorError
from ballast_operator.kinds import Key

log = Log(__name__)

Turn = Callable[[Key], Awaitable[float | None]]
"""Gives in how many seconds it wants to run again; None: when something happens."""


class Turns:
    """Runs `turn(key)` for every key that was added. Belongs to one event loop."""

    def __init__(self, turn: Turn, *, at_a_time: int, failed: Callable[[Key, Exception], None]) -> None:
        self.agenda = Agenda()
        self.is_alive = True
        """False once a worker of this queue ended, which only a defect does."""
        self._turn = turn
        self._at_a_time = at_a_time
        self._failed = failed
        self._news = asyncio.Event()

    def add(self, key: Key, *, seconds: float = 0.0) -> None:
        """Let `key` have a turn, at the latest in so many seconds."""
        self.agenda.add(key, asyncio.get_running_loop().time() + seconds)
        self._news.set()

    async def run(self) -> None:
        """Give turns until cancelled."""
        loop = asyncio.get_running_loop()
        running: set[asyncio.Task[None]] = set()
        try:
            while True:
                self._news.clear()
                while len(running) < self._at_a_time and (key := self.agenda.take(loop.time())) is not None:
                    task = asyncio.create_task(self._give(key))
                    running.add(task)
                    task.add_done_callback(running.discard)
                    task.add_done_callback(lambda _: self._news.set())
                due = self.agenda.next_due() if len(running) < self._at_a_time else None
                try:
                    async with asyncio.timeout_at(due):
                        await self._news.wait()
                except TimeoutError:
                    continue
        finally:
            self.is_alive = False
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    async def _give(self, key: Key) -> None:
        again: float | None = None
        failure: Exception | None = None
        try:
            again = await self._turn(key)
        except OperatorError as error:
            failure = error
            log.warning("turn failed, it is tried again", resource=str(key), because=str(error))
        except Exception as error:
            failure = error
            log.exception("turn failed by a defect, it is tried again", resource=str(key))
        delay = self.agenda.finish(key, failed=failure is not None)
        if failure is not None:
            self._failed(key, failure)
            asked = failure.retry_after if isinstance(failure, ClusterUnavailable) else None
            again = max(delay * random.uniform(0.8, 1.2), asked or 0.0)
        if again is not None:
            self.add(key, seconds=again)
