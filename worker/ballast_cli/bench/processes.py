"""The processes that compute the rows of a table."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context

from ballast_sim.comparison.bench import Row
from ballast_sim.comparison.table import Map, Task


@contextmanager
def in_processes(number: int) -> Iterator[Map]:
    """Yield a `map` that computes in this number of processes. An error or Ctrl-C ends them at once."""
    if number == 1:
        yield map
        return
    ignore = signal.SIGINT, signal.SIG_IGN  # the calling process handles Ctrl-C
    pool = ProcessPoolExecutor(number, get_context("spawn"), signal.signal, ignore)

    def submit(run: Callable[[Task], list[Row]], tasks: Sequence[Task]) -> Iterator[list[Row]]:
        """Start the processes. Amid a start, Ctrl-C would leave one that is not known, so it takes effect after it."""
        caught: list[int] = []
        former = signal.signal(signal.SIGINT, lambda number, _: caught.append(number))
        try:
            return pool.map(run, tasks)
        finally:
            signal.signal(signal.SIGINT, former)
            for interrupt in caught:
                signal.raise_signal(interrupt)

    try:
        yield submit
    except BaseException:
        for child in active_children():
            child.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
