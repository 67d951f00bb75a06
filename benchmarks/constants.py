"""Print what half and twice of each tuning constant of the policy change.

    python benchmarks/constants.py                                # all of them, about half an hour on two cores
    python benchmarks/constants.py --only _SPENT,_LOSS_STEP
    python benchmarks/constants.py --workloads fast-steps-20

A constant is a number at the head of a module of `ballast_policy`. Each is halved and doubled, alone, and workloads of
`policy_change.py --quick` run with it: without a reservation, and for sparse traffic with a cost model that the run
fits. A line of the table is one change in one workload, with what it gains in points: of the TTFT attainment, the TPOT
attainment, and the total. Differences below half a point are chance, and have no line. The last line names constants
without any.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import pkgutil
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import policy_change
from policy_change import FITTED, FOUR, SEEDS, SPARSE, Outcome, Row, Variant, figures, run, workloads
from pooled import pooled

import ballast_policy
from ballast_cli.console import print_table
from ballast_policy.snapshot import PolicyConfig

SETTINGS: dict[str, Variant] = {
    "bursts-40-32-slots-ttft-500": FOUR[0],
    "azure-40-ttft-500": FOUR[0],
    "fast-steps-20": FOUR[0],
    "bursts-from-silence": FOUR[0],
    "sparse-0.5s": SPARSE[1],
    "sparse-2s": FITTED[1],
}
"""The workloads, and the variant that runs in each."""
LEAST = 0.005
"""Differences below this are chance."""
ROUNDED = {"ROUNDING"}
"""Constants that are no choice."""


class Constant(NamedTuple):
    """A number at the head of a module of the policy."""

    module: str
    name: str
    value: float

    @property
    def changes(self) -> tuple[float, float]:
        """Return half and twice of it; a whole number stays one, and a share is at most 1."""
        if isinstance(self.value, int):
            return max(1, self.value // 2), 2 * self.value
        return self.value / 2, min(1.0, 2 * self.value) if self.value < 1 else 2 * self.value


def constants() -> list[Constant]:
    """Return the constants of all modules, by module."""
    found = []
    for module in pkgutil.walk_packages(ballast_policy.__path__, "ballast_policy."):
        imported = importlib.import_module(module.name)
        if module.ispkg or imported.__file__ is None:
            continue
        for node in ast.parse(Path(imported.__file__).read_text(encoding="utf-8")).body:
            if isinstance(node, ast.Assign) and isinstance(target := node.targets[0], ast.Name):
                value = getattr(imported, target.id)
                is_number = isinstance(value, int | float) and not isinstance(value, bool)
                if target.id.lstrip("_").isupper() and is_number and target.id not in ROUNDED:
                    found.append(Constant(module.name, target.id, value))
    return found


def use(constant: Constant, value: float) -> None:
    """Give the constant a value in its module, and in the modules that import it."""
    for name, module in list(sys.modules.items()):
        if name.startswith("ballast_policy") and getattr(module, constant.name, None) == constant.value:
            setattr(module, constant.name, value)


class SeedRun(NamedTuple):
    """One run of one seed."""

    judged_by: PolicyConfig
    bound: float
    outcome: Outcome


def measure(workload: str, seed: int, constant: Constant | None, value: float) -> SeedRun:
    """Run one workload with one constant changed."""
    chosen = workloads()[workload]
    bench, load = chosen.make(seed, chosen.seconds(is_quick=True))
    key = (bench.config.slots, bench.bound_tpot or bench.config.tpot, hash(tuple(bench.offline)))
    bench.maximums = policy_change.known_maximums.setdefault(key, bench.maximums)
    online, bound = bench.online(load), bench.bound
    if constant is None:
        return SeedRun(bench.config, bound, run(bench, online, SETTINGS[workload]))
    constants()  # imports all modules
    use(constant, value)
    try:
        return SeedRun(bench.config, bound, run(bench, online, SETTINGS[workload]))
    finally:
        use(constant._replace(value=value), constant.value)


def row(workload: str, runs: Sequence[SeedRun]) -> Row:
    """Pool the seeds."""
    variant, outcomes = SETTINGS[workload].label, [each.outcome for each in runs]
    if failures := [outcome.failure for outcome in outcomes if outcome.failure]:
        return Row(workload, variant, len(runs), 0, *([None] * 12), failure=failures[0])
    result = pooled([outcome.result for outcome in outcomes if outcome.result], runs[0].judged_by)
    bound = sum(each.bound for each in runs) / len(runs)
    return Row(workload, variant, len(runs), result.num_online, *figures(result, result, bound))


Task = tuple[str, Constant | None, float]


def measured(tasks: Sequence[Task], jobs: int) -> Iterator[tuple[Task, Row]]:
    """Run the tasks in several processes, and print progress."""
    began = time.monotonic()
    of_seeds: dict[Task, list[SeedRun]] = {task: [] for task in tasks}
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(measure, task[0], seed, *task[1:]): task for task in tasks for seed in range(SEEDS)}
        for number, future in enumerate(as_completed(futures), 1):
            of_seeds[task := futures[future]].append(future.result())
            if len(of_seeds[task]) == SEEDS:
                yield task, row(task[0], of_seeds.pop(task))
            if number % 30 == 0:
                left = (time.monotonic() - began) * (len(futures) / number - 1) / 60
                print(f"{number} of {len(futures)} runs, {left:.0f} min left", file=sys.stderr, flush=True)


def differences(before: Row, after: Row) -> tuple[float, float, float]:
    """Return what was gained, as fractions: TTFT attainment, TPOT attainment, total."""
    pairs = (
        (before.ttft_attainment, after.ttft_attainment),
        (before.tpot_attainment, after.tpot_attainment),
        (before.total, after.total),
    )
    ttft, tpot, total = ((now or 0.0) - (was or 0.0) for was, now in pairs)
    return ttft, tpot, total


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME,...", help="constants to change; all by default")
    parser.add_argument("--workloads", metavar="NAME,...", help=f"of {', '.join(SETTINGS)}; all by default")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else []
    chosen = [constant for constant in constants() if not names or constant.name in names]
    if unknown := set(names) - {constant.name for constant in chosen}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(c.name for c in constants())}")
    settings = args.workloads.split(",") if args.workloads else list(SETTINGS)
    if unknown := set(settings) - set(SETTINGS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; known are {', '.join(SETTINGS)}")
    changes: list[tuple[Constant | None, float]] = [(None, 0.0)]
    changes += [(constant, value) for constant in chosen for value in constant.changes if value != constant.value]
    tasks = [(workload, *change) for change in changes for workload in settings]
    found = dict(measured(tasks, args.jobs))
    lines, alike = [], set(chosen)
    for task in tasks[len(settings) :]:
        workload, constant, value = task
        assert constant is not None
        line = constant.name, f"{constant.value:g} > {value:g}", workload
        gained = differences(found[workload, None, 0.0], found[task])
        if failure := found[task].failure:
            lines.append((*line, f"failed: {failure}", "", ""))
        elif max(map(abs, gained)) >= LEAST:
            lines.append((*line, *(f"{100 * each:+.1f}" for each in gained)))
        else:
            continue
        alike.discard(constant)
    columns = ("constant", "change", "workload", "TTFT met", "TPOT met", "total")
    print_table(columns, lines, right=columns[3:])
    print(f"Neither half nor twice changes half a point: {', '.join(sorted(c.name for c in alike)) or 'none'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
