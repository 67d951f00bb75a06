"""An executor whose threads end with the process."""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any

GRACE_SECONDS = 2.0


class DaemonThreads(Executor):
    """Threads for work that may take minutes. The end of the process waits for it only a moment.

    It waits without limit for the threads of ThreadPoolExecutor. Call `submit` on one thread only.
    """

    def __init__(self, number: int, name: str) -> None:
        self._number, self._name = number, name
        self._threads: list[Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._is_over = False

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread do the work, and return the future of its result."""
        future: Future[Any] = Future()
        self._work.put((future, partial(work, *args, **kwargs)))
        if not self._threads:
            atexit.register(self._end)
        if len(self._threads) < self._number:
            self._threads.append(Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()
        return future

    def _run(self) -> None:
        while (found := self._work.get()) is not None and not self._is_over:
            do(*found)
            del found  # an idle thread keeps no result alive

    def _end(self) -> None:
        """Start no more work, and wait a moment for the rest.

        If native code returns to Python while the process ends, the process can end by a signal.
        """
        self._is_over = True
        until = time.monotonic() + GRACE_SECONDS
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))


def do(future: Future[Any], work: Callable[[], Any]) -> None:
    """Do the work of a future, unless the future is cancelled."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)
