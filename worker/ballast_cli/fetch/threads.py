"""Calls a function for several files at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from contextlib import suppress
from threading import Thread
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_NUM_THREADS = 4


def map_in_threads(
    function: Callable[[_T], _R], items: Iterable[_T], on_failure: Callable[[], None] = lambda: None
) -> list[_R]:
    """Return the results in the order of the items. The first failure is raised, and no further call begins.

    `on_failure` ends the calls that run, and a failure waits for them. Ctrl-C and SIGTERM do not: a call may wait for a
    source or a disk that does not answer. The threads are daemons, so that they do not delay the end of the process.
    """
    calls: list[tuple[Future[_R], _T]] = [(Future(), item) for item in items]
    waiting = deque(calls)

    def work() -> None:
        with suppress(IndexError):  # none waits
            while True:
                future, item = waiting.popleft()
                try:
                    future.set_result(function(item))
                except BaseException as error:  # noqa: BLE001  it is raised where the results are read
                    future.set_exception(error)

    threads = [Thread(target=work, daemon=True) for _ in range(min(_NUM_THREADS, len(calls)))]
    try:
        for thread in threads:
            thread.start()
        for done in as_completed(future for future, _ in calls):
            done.result()
    except BaseException as error:
        waiting.clear()
        on_failure()
        if not isinstance(error, KeyboardInterrupt):
            for thread in threads:
                thread.join()
        raise
    return [future.result() for future, _ in calls]
