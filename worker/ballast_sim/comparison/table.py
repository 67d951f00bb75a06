"""Run the rows of a table in several processes. The result does not depend on the number of processes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from math import nan
from multiprocessing import get_context

from ballast_sim.comparison.bench import KNOWN, STATIC_BUDGET, Bench, Row, knob
from ballast_sim.errors import BadInput

Progress = Callable[[int, int, str], None]
"""Called with the number of finished runs, the number of all runs, and the name of the last finished run."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the bench: a maximum throughput, the highest rate, or the rows of a policy."""

    kind: str
    load: float = 0.0
    reservations: tuple[float, ...] = (0.0,)

    def __str__(self) -> str:
        return f"{self.kind} at {self.load:.0%}" if self.load else self.kind


_FULL, _BOUND = Task("offline alone"), Task("offline alone within the TPOT")
_HIGHEST = Task("highest online rate")


@dataclass(frozen=True, slots=True)
class Table:
    """The rows of one command."""

    bench: Bench
    rate: float
    """Highest online tokens per second at which online-only attains 99 %; nan if the bench is paced."""
    budgets: dict[float, Row]
    """The best static budget by load, if it was computed."""
    rows: list[Row]
    """Ordered by load, then reservation, then policy."""

    def of(self, load: float, reservation: float) -> list[Row]:
        """Return the rows of one load and reservation."""
        return [row for row in self.rows if (row.load, row.reservation) == (load, reservation)]


def run_table(
    bench: Bench,
    *,
    policies: Sequence[str],
    reservations: Sequence[float],
    loads: Sequence[float] = (),
    processes: int = 1,
    progress: Progress = lambda *_: None,
    has_best_budget: bool = True,
) -> Table:
    """Compute the table. The best static budget takes many runs, and can be left out.

    A paced bench has its own load, and takes no `loads`.

    Raises:
        BadInput: a policy, a load or a reservation is unknown or out of range.
        PolicyDefect: the policy broke its contract.
    """
    _check(policies, (1.0,) if bench.is_paced else loads, reservations)
    if "static-split" in policies:
        bench.check_split()
    with _process_pool(processes) as pool:
        found = _run(bench, (_FULL, _BOUND), pool, progress)
        bench.maximums = {"full": found[_FULL][0], "bound": found[_BOUND][0]}
        loads = (bench.own_load,) if bench.is_paced else loads
        alone = [Task("online-only", load) for load in loads]
        found = _run(bench, alone if bench.is_paced else (_HIGHEST, *alone), pool, progress)
        bench.alones = {task.load: found[task][0] for task in alone}
        highest = found[_HIGHEST][0].load * bench.bound if _HIGHEST in found else nan
        also = (STATIC_BUDGET,) if has_best_budget else ()
        tasks = _tasks((*also, *policies), loads, tuple(reservations))
        results = _run(bench, tasks, pool, progress)
    budgets = {load: results[Task(STATIC_BUDGET, load, tuple(reservations))][0] for load in loads if has_best_budget}
    rows = [row for task in tasks for row in results[task] if task.kind in policies]
    rows.sort(key=lambda row: (loads.index(row.load), reservations.index(row.reservation), policies.index(row.policy)))
    return Table(bench, highest, budgets, rows)


@contextmanager
def _process_pool(processes: int) -> Iterator[ProcessPoolExecutor | None]:
    """Return a process pool for more than one process. The calling process handles Ctrl-C."""
    if processes <= 1:
        yield None
        return
    pool = ProcessPoolExecutor(
        processes, get_context("spawn"), initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)
    )
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _tasks(policies: Sequence[str], loads: Sequence[float], reservations: tuple[float, ...]) -> list[Task]:
    """Split the table into runs. Ballast has a run for each reservation, and a baseline has one run for all."""
    return [
        Task(policy, load, asked)
        for load in loads
        for policy in dict.fromkeys(policies)
        for asked in ([(one,) for one in reservations] if policy.startswith("ballast") else [reservations])
    ]


def _check(policies: Sequence[str], loads: Sequence[float], reservations: Sequence[float]) -> None:
    unknown = [policy for policy in policies if knob(policy).name not in KNOWN]
    if unknown:
        raise BadInput(f"unknown policy {unknown[0]!r}; known are all, {', '.join(KNOWN)}")
    for name, values, least, most in (("load", loads, 1e-3, 20.0), ("reservation", reservations, 0.0, 1.0)):
        if not values:
            raise BadInput(f"no {name} given: give at least one")
        for value in values:
            if not least <= value <= most:
                allowed = f"{100 * least:g} to {100 * most:g} %"
                raise BadInput(f"a {name} of {100 * value:g} % was given; expected {allowed}")
        if len(set(values)) < len(values):
            raise BadInput(f"a {name} is given twice: give each once")
    if not policies:
        raise BadInput("no policy given: give at least one")
    if len(set(policies)) < len(policies):
        raise BadInput("a policy is given twice: give each once")


def _run(
    bench: Bench, tasks: Sequence[Task], pool: ProcessPoolExecutor | None, progress: Progress
) -> dict[Task, list[Row]]:
    """Run the tasks in the pool, or in this process without one."""
    rows: dict[Task, list[Row]] = {}
    results: Iterable[tuple[Task, list[Row]]] = ((task, _run_task(bench, task)) for task in tasks)
    if pool:
        futures = {pool.submit(_run_task, bench, task): task for task in tasks}
        results = ((futures[future], future.result()) for future in as_completed(futures))
    for task, found in results:
        rows[task] = found
        progress(len(rows), len(tasks), str(task))
    return rows


def _run_task(bench: Bench, task: Task) -> list[Row]:
    if task in (_FULL, _BOUND):
        return [bench.maximum("full" if task == _FULL else "bound")]
    if task == _HIGHEST:
        return [bench.highest()]
    return bench.rows(task.kind, task.load, task.reservations)
