"""An executor whose threads end with the process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class DaemonThreads(Executor):
    """Threads for work that may take minutes. The end of the process does not wait for it.

    It waits for the threads of ThreadPoolExecutor. Call `submit` on one thread only.
    """

    def __init__(self, number: int, name: str) -> None:
        self._number, self._name = number, name
        self._threads: list[Thread] = []
        self._work: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a thread do the work, and return the future of its result."""
        future: Future[Any] = Future()
        self._work.put((future, partial(work, *args, **kwargs)))
        if len(self._threads) < self._number:
            self._threads.append(Thread(target=self._run, name=self._name, daemon=True))
            self._threads[-1].start()
        return future

    def _run(self) -> None:
        while True:
            _do(*self._work.get())  # a function of its own, so that an idle thread keeps no result alive


def _do(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:  # noqa: BLE001 - the future raises it
        future.set_exception(error)
    else:
        future.set_result(result)
