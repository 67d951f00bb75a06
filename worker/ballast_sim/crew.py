"""Run the rows of a table in several processes; what comes back does not depend on their number."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from math import nan
from multiprocessing import get_context
from typing import Self

from ballast_sim.errors import BadInput
from ballast_sim.mixed import KNOWN, STATIC_BUDGET, Bench, Row, knob

Progress = Callable[[int, int, str], None]
"""How many runs are done, of how many, and which one was the last."""


@dataclass(frozen=True, slots=True)
class Task:
    """One call of the bench: a ceiling, the highest rate, or the rows of a policy."""

    kind: str
    load: float = 0.0
    reservations: tuple[float, ...] = (0.0,)

    def __str__(self) -> str:
        if not self.load:
            return self.kind
        return f"{self.kind} at {self.load:.0%}"


_FULL, _BOUND = Task("offline alone"), Task("offline alone within the TPOT")
_HIGHEST = Task("highest online rate")


@dataclass(frozen=True, slots=True)
class Table:
    """What one command computes."""

    bench: Bench
    rate: float
    """Highest online tokens per second at which online-only still attains 99 %; nan if the bench is paced."""
    budgets: dict[float, Row]
    """By load: the best static budget, where it was looked for."""
    rows: list[Row]
    """By load, then reservation, then policy."""

    def of(self, load: float, reservation: float) -> list[Row]:
        """The rows of one block."""
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
    """Compute everything that the table shows; the best static budget takes many runs, and may be left out.

    A paced bench has a load of its own, and takes no `loads`.

    Raises:
        BadInput: a policy, load or reservation that cannot be.
        IllegalPlan: the policy broke its contract.
    """
    _check(policies, (1.0,) if bench.is_paced else loads, reservations)
    if "static-split" in policies:
        bench.check_split()
    with _Crew(bench, processes, progress) as crew:
        found = crew.ask((_FULL, _BOUND))
        bench.ceilings = {"full": found[_FULL][0], "bound": found[_BOUND][0]}
        loads = (bench.own_load,) if bench.is_paced else loads
        alone = [Task("online-only", load) for load in loads]
        found = crew.ask(alone if bench.is_paced else (_HIGHEST, *alone))
        bench.alones = {task.load: found[task][0] for task in alone}
        highest = found[_HIGHEST][0].load * bench.bound if _HIGHEST in found else nan
        also = (STATIC_BUDGET,) if has_best_budget else ()
        tasks = _tasks((*also, *policies), loads, tuple(reservations))
        results = crew.ask(tasks)
    budgets = {load: results[Task(STATIC_BUDGET, load, tuple(reservations))][0] for load in loads if has_best_budget}
    rows = [row for task in tasks for row in results[task] if task.kind in policies]
    rows.sort(key=lambda row: (loads.index(row.load), reservations.index(row.reservation), policies.index(row.policy)))
    return Table(bench, highest, budgets, rows)


def _tasks(policies: Sequence[str], loads: Sequence[float], reservations: tuple[float, ...]) -> list[Task]:
    """Split the table: a reservation is a run of its own for Ballast, and a look at the same run for the others."""
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
    for name, values, most in (("load", loads, 20.0), ("reservation", reservations, 1.0)):
        if not values:
            raise BadInput(f"no {name} given: name at least one")
        for value in values:
            if not (0 if name == "reservation" else 1e-3) <= value <= most:
                low = "0" if name == "reservation" else "0.1"
                raise BadInput(f"a {name} of {100 * value:g} % was asked for; wanted {low} to {100 * most:g} %")
        if len(set(values)) < len(values):
            raise BadInput(f"a {name} is named twice: name each once")
    if not policies:
        raise BadInput("no policy given: name at least one")
    if len(set(policies)) < len(policies):
        raise BadInput("a policy is named twice: name each once")


class _Crew:
    """Does tasks here, or in processes that live until the end."""

    def __init__(self, bench: Bench, processes: int, progress: Progress) -> None:
        self._bench, self._progress = bench, progress
        self._pool: ProcessPoolExecutor | None = None
        if processes > 1:
            self._pool = ProcessPoolExecutor(processes, get_context("spawn"), initializer=_begin, initargs=(bench,))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)

    def ask(self, tasks: Sequence[Task]) -> dict[Task, list[Row]]:
        """Do the tasks, with what the bench knows by now."""
        rows: dict[Task, list[Row]] = {}
        for task, found in self._results(tasks):
            rows[task] = found
            self._progress(len(rows), len(tasks), str(task))
        return rows

    def _results(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, list[Row]]]:
        bench = self._bench
        if self._pool is None:
            yield from ((task, _do(bench, task)) for task in tasks)
            return
        futures = {self._pool.submit(_do_here, task, bench.ceilings, bench.alones): task for task in tasks}
        yield from ((futures[future], future.result()) for future in as_completed(futures))


def _do(bench: Bench, task: Task) -> list[Row]:
    if task in (_FULL, _BOUND):
        return [bench.ceiling("full" if task == _FULL else "bound")]
    if task == _HIGHEST:
        return [bench.highest()]
    return bench.rows(task.kind, task.load, task.reservations)


_here: list[Bench] = []
"""In a process of the crew: what it works on."""


def _begin(bench: Bench) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the caller's to answer
    _here.append(bench)


def _do_here(task: Task, ceilings: dict[str, Row], alones: dict[float, Row]) -> list[Row]:
    (bench,) = _here
    bench.ceilings |= ceilings
    bench.alones |= alones
    return _do(bench, task)
