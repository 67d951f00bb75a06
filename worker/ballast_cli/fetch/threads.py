"""Calls a function for several files at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, as_completed
from contextlib import suppress
from threading import Thread
from time import monotonic
from typing import TypeVar

_T = TypeVar("_T")
_R = TypeVar("_R")
_NUM_THREADS = 4
_MOMENT = 1.0
"""Seconds in which a call ends that waits for nothing, so that it writes no more when the caller goes on."""


def map_in_threads(
    function: Callable[[_T], _R], items: Iterable[_T], on_failure: Callable[[], None] = lambda: None
) -> list[_R]:
    """Return the results in the order of the items. The first failure is raised, and no further call begins.

    `on_failure` ends the calls that run, and a failure waits for them. Ctrl-C and SIGTERM wait for a moment only: a
    call may wait for a source or a disk that does not answer. The threads are daemons, so that they do not delay the
    end of the process.
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

    threads: list[Thread] = []
    try:
        for _ in range(min(_NUM_THREADS, len(calls))):
            thread = Thread(target=work, daemon=True)
            thread.start()  # fails at the limit of the container
            threads.append(thread)
        for done in as_completed(future for future, _ in calls):
            done.result()
    except BaseException as error:
        waiting.clear()
        on_failure()
        end = monotonic() + _MOMENT
        for thread in threads:
            thread.join(max(0, end - monotonic()) if isinstance(error, KeyboardInterrupt) else None)
        raise
    return [future.result() for future, _ in calls]
