"""Run the rows of a table. The result does not depend on the processes that compute them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import nan

from ballast_sim.comparison.bench import STATIC_BUDGET, Bench, Row, knob
from ballast_sim.errors import BadInput

Progress = Callable[[int, int, str], None]
"""Called with the number of finished runs, the number of all runs, and the name of the last finished run."""
Map = Callable[..., Iterator[list[Row]]]
"""Computes a function of each task, like `map`."""


@dataclass(frozen=True, slots=True)
class Task:
    """One run of the bench: a maximum throughput, the highest rate, or the rows of a policy."""

    kind: str
    load: float = 0.0
    reservations: tuple[float, ...] = (0.0,)

    def __str__(self) -> str:
        return f"{self.kind} at {self.load:.0%}" if self.load else self.kind


_Rows = dict[Task, list[Row]]
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
    mapped: AbstractContextManager[Map] | None = None,
    progress: Progress = lambda *_: None,
    has_best_budget: bool = True,
) -> Table:
    """Compute the table, with another `map` than that of this process if `mapped` gives one.

    The best static budget takes many runs, and can be left out.

    A paced bench has its own load, and takes no `loads`.

    Raises:
        BadInput: a policy, a load or a reservation is unknown or out of range.
        PolicyDefect: the policy broke its contract.
    """
    _check(policies, (1.0,) if bench.is_paced else loads, reservations)
    if bench.is_paced and "static-split" in policies:
        raise BadInput("static-split divides a load among GPUs, and this traffic keeps its own times. Leave it out")
    with mapped or nullcontext(map) as run:
        found = _run(bench, (_FULL, _BOUND), run, progress)
        bench.maximums = {"full": found[_FULL][0], "bound": found[_BOUND][0]}
        loads = (bench.own_load,) if bench.is_paced else loads
        alone = [Task("online-only", load) for load in loads]
        found = _run(bench, alone if bench.is_paced else (_HIGHEST, *alone), run, progress)
        bench.alones = {task.load: found[task][0] for task in alone}
        highest = found[_HIGHEST][0].load * bench.bound if _HIGHEST in found else nan
        also = (STATIC_BUDGET,) if has_best_budget else ()
        tasks = _tasks((*also, *policies), loads, tuple(reservations))
        results = _run(bench, tasks, run, progress)
    budgets = {load: results[Task(STATIC_BUDGET, load, tuple(reservations))][0] for load in loads if has_best_budget}
    rows = [row for task in tasks for row in results[task] if task.kind in policies]
    rows.sort(key=lambda row: (loads.index(row.load), reservations.index(row.reservation), policies.index(row.policy)))
    return Table(bench, highest, budgets, rows)


def _tasks(policies: Sequence[str], loads: Sequence[float], reservations: tuple[float, ...]) -> list[Task]:
    """Split the table into runs. Ballast has a run for each reservation, and a baseline has one run for all."""
    return [
        Task(policy, load, asked)
        for load in loads
        for policy in dict.fromkeys(policies)
        for asked in ([(one,) for one in reservations] if policy.startswith("ballast") else [reservations])
    ]


def _check(policies: Sequence[str], loads: Sequence[float], reservations: Sequence[float]) -> None:
    for policy in policies:
        knob(policy)
    _check_each("policy", policies)
    check_shares(loads)
    check_shares(reservations, "reservation", 0.0, 1.0)


def check_shares(shares: Sequence[float], name: str = "load", least: float = 1e-3, most: float = 20.0) -> None:
    """Refuse shares outside of a range or given twice, with BadInput."""
    _check_each(name, shares)
    for share in (share for share in shares if not least <= share <= most):
        allowed = f"{100 * least:g} to {100 * most:g} %"
        raise BadInput(f"a {name} of {100 * share:g} % was given; expected {allowed}")


def _check_each(name: str, values: Sequence[object]) -> None:
    if len(set(values)) < len(values) or not values:
        raise BadInput(f"a {name} is given twice: give each once" if values else f"no {name} given: give at least one")


def _run(bench: Bench, tasks: Sequence[Task], run: Map, progress: Progress) -> _Rows:
    rows: _Rows = {}
    for task, found in zip(tasks, run(partial(_run_task, bench), tasks), strict=True):
        rows[task] = found
        progress(len(rows), len(tasks), str(task))
    return rows


def _run_task(bench: Bench, task: Task) -> list[Row]:
    if task in (_FULL, _BOUND):
        return [bench.maximum("full" if task == _FULL else "bound")]
    if task == _HIGHEST:
        return [bench.highest()]
    return bench.rows(task.kind, task.load, task.reservations)
