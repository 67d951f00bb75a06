"""`ballast bench mixed --setting`: workloads with their own requests, with one table for each point of a workload."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite, isnan
from pathlib import Path
from typing import Any

from ballast_cli.bench.json_rows import as_json
from ballast_cli.bench.options import MixedOptions, fractions, names
from ballast_cli.bench.processes import in_processes
from ballast_cli.bench.table import change, milliseconds, percent, points
from ballast_cli.console import print_table
from ballast_cli.errors import Usage
from ballast_cli.sim_options import progress, write_json
from ballast_sim.comparison.bench import POLICIES, Row, knob
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.comparison.table import Table, run_table
from ballast_sim.comparison.workloads import CAPPED_SLO, WORKLOADS, Point, Workload, sparse
from ballast_sim.replay.attainment import worst_lost
from ballast_sim.replay.traffic import read_lengths

_COLUMNS = (
    *("policy", "TTFT ms p50", "p99", "p99 rise", "met", "lost", "TPOT ms p50", "p99", "p99 rise", "met", "lost"),
    *("worst third", "offline tok/s", "of alone", "total"),
)
_GOAL = ("best static budget that keeps the same", "of alone", "goal")


def workload_of(options: MixedOptions) -> Workload:
    """Return the workload that the options name, with the values that they replace."""
    traffic, engine = options.traffic, options.engine
    name, seconds, every = traffic.workload, traffic.minutes and 60 * traffic.minutes, traffic.every
    if name not in WORKLOADS:
        raise Usage(f"--setting is {name!r}; expected one of trace, {', '.join(WORKLOADS)}.")
    if every is not None and name != "sparse":
        raise Usage(f"--every sets the spacing of the workload sparse, and {name} has none. Leave it out.")
    if every is not None:
        found = sparse(seconds=seconds, seed=traffic.seed, every=spacings(every))
    else:
        found = WORKLOADS[name](seconds=seconds, seed=traffic.seed)
    found = found.judged_by(ttft=engine.ttft_ms and engine.ttft_ms / 1e3, tpot=engine.tpot_ms and engine.tpot_ms / 1e3)
    return replace(
        found,
        slots=engine.slots or found.slots,
        offline=read_lengths(traffic.offline) if traffic.offline else found.offline,
        policies=_policies(options.rows.policies, found),
    )


def _policies(text: str | None, workload: Workload) -> tuple[str, ...]:
    if text is None:
        return workload.policies
    found = names(text)
    return tuple(policy for policy in POLICIES if policy != "static-split") if found == ("all",) else found


@dataclass(frozen=True, slots=True)
class PointResult:
    """The table of one point. The static budgets that are only tried as a goal follow the other rows."""

    workload: Workload
    point: Point
    engine: BenchEngine
    table: Table

    @property
    def shown(self) -> list[Row]:
        """Return the rows of the chosen policies."""
        return [row for row in self.table.rows if row.policy in self.workload.policies]


def compare_on_workload(options: MixedOptions, *, processes: int, json_file: Path | None) -> None:
    """Run the points, and print the table of each as soon as it is known. Write the rows at the end."""
    rows: list[dict[str, Any]] = []
    for found in _run(options, processes=processes):
        if str(json_file) != "-":
            if not rows:
                print_engine(found)
            print_point(found)
        rows += rows_of(found)
    write_json(json_file, rows)


def _run(options: MixedOptions, *, processes: int) -> Iterator[PointResult]:
    """Run one point after the other."""
    workload, rows = workload_of(options), options.rows
    reservations = (0.0,) if rows.reservations is None else fractions("--reservation", rows.reservations)
    has_goal = any(policy.startswith("ballast") for policy in workload.policies)
    budgets = [policy for policy in workload.budgets if has_goal and policy not in workload.policies]
    maximums: dict[str, Row] = {}
    for point in workload.points:
        engine = options.engine.build(
            point.online, workload.offline, ttft=point.ttft, tpot=point.tpot, slots=workload.slots
        )
        bench = workload.bench(point, engine)
        table = run_table(
            replace(bench, seed=options.traffic.seed, noise=rows.noise, is_fitted=rows.is_fitted, maximums=maximums),
            policies=(*workload.policies, *budgets),
            reservations=reservations,
            mapped=in_processes(processes),
            progress=progress,
            has_best_budget=False,
        )
        maximums = table.bench.maximums  # offline alone is the same beside every point
        yield PointResult(workload, point, engine, table)


def rows_of(found: PointResult) -> list[dict[str, Any]]:
    """Return the rows as data: those of the table, and the static budgets that were tried."""
    where = {"workload": found.workload.name, "point": found.point.label}
    slo = {"slo_ttft_ms": 1e3 * found.point.ttft, "slo_tpot_ms": 1e3 * found.point.tpot}
    return [where | slo | as_json(row, found.table.bench) for row in found.table.rows]


def print_engine(found: PointResult) -> None:
    """Print the engine and the SLO-bound throughput, which all points share."""
    config, bench = found.engine.config, found.table.bench
    capped = any(knob(policy).name.startswith("ballast") and knob(policy).value for policy in found.workload.policies)
    ttft, tpot = CAPPED_SLO
    told = f"In rows with a cap, Ballast has an SLO of {1e3 * ttft:g} ms TTFT and {1e3 * tpot:g} ms TPOT.\n"
    sys.stdout.write(
        f"{found.workload.name}: {found.engine.name}, {found.engine.step_model} step times, {config.slots} slots, "
        f"chunks of {config.chunk_tokens}\n"
        f"Each run takes {bench.seconds:g} s, and the first {bench.warmup_seconds:g} s do not count. Offline tokens "
        f"and totals are shares of\noffline alone with every step within {1e3 * (bench.bound_tpot or 0):g} ms: "
        f"{bench.bound:,.0f} tokens/s.\n{told if capped else ''}"
    )


def print_point(found: PointResult) -> None:
    """Print one point."""
    point, bench = found.point, found.table.bench
    for reservation in dict.fromkeys(row.reservation for row in found.shown):
        rows = [row for row in found.shown if row.reservation == reservation]
        alone = bench.alone(rows[0].load).result
        sys.stdout.write(
            f"\n{point.label}; SLO {1e3 * point.ttft:g} ms TTFT, {1e3 * point.tpot:g} ms TPOT; "
            f"{alone.num_online:,} requests; reservation {100 * reservation:g} %\n"
        )
        columns = _COLUMNS + (_GOAL if found.workload.budgets else ())
        right = [column for column in columns if column not in {"policy", _GOAL[0], "goal"}]
        print_table(columns, [_cells(found, row) for row in rows], right=right)
        if len(alone.thirds) > 1:
            _print_thirds(rows)


def _cells(found: PointResult, row: Row) -> tuple[str, ...]:
    bench, result = found.table.bench, row.result
    alone = bench.alone(row.load).result
    ttft, tpot = result.ttft, result.tpot
    cells = (
        row.policy,
        *(milliseconds(value) for value in (ttft.p50, ttft.p99)),
        change(ttft.p99, alone.ttft.p99),
        percent(result.ttft_attainment),
        points(alone.ttft_attainment - result.ttft_attainment),
        *(milliseconds(value, 1) for value in (tpot.p50, tpot.p99)),
        change(tpot.p99, alone.tpot.p99),
        percent(result.tpot_attainment),
        points(alone.tpot_attainment - result.tpot_attainment),
        points(worst_lost(result.thirds, alone.thirds).worst),
        f"{row.offline_tokens:,.0f}",
        f"{row.offline_tokens / bench.bound:.0%}",
        f"{row.total_tokens / bench.bound:.0%}",
    )
    return cells + (_goal(found, row) if found.workload.budgets else ())


def _goal(found: PointResult, row: Row) -> tuple[str, str, str]:
    """Compare a row of Ballast with the best static budget that keeps the same SLO or the same cap."""
    if not knob(row.policy).name.startswith("ballast"):
        return "", "", ""
    bench = found.table.bench
    best = bench.best_static(found.table.rows, row)
    tokens = best.offline_tokens if best else 0.0
    judged = "reached" if row.offline_tokens >= tokens else "short"
    if not bench.keeps_its_own(row):
        judged = "broken: the SLO" if knob(row.policy).value is None else "broken: the cap"
    if best is None:
        return "none keeps it", "", judged
    _, step, chunk = knob(best.policy)
    return f"{step:g} ms, chunks of {chunk}", f"{tokens / bench.bound:.0%}", judged


def _print_thirds(rows: Sequence[Row]) -> None:
    """Print attainment by prompt length."""
    columns = ["by prompt length"]
    for third in max((row.result.thirds for row in rows), key=len):
        spread = (
            f"{third.shortest:,}" if third.shortest == third.longest else f"{third.shortest:,} to {third.longest:,}"
        )
        columns += [f"{spread} tokens ({third.num_online:,}): TTFT", "TPOT"]
    cells = []
    for row in rows:
        met = (value for third in row.result.thirds for value in (third.ttft_attainment, third.tpot_attainment))
        shown = [percent(value) for value in met]
        cells.append((row.policy, *shown, *["-"] * (len(columns) - 1 - len(shown))))
    sys.stdout.write("\n")
    print_table(columns, cells, right=columns[1:])


def spacings(text: str) -> tuple[float, ...]:
    """Read seconds, separated by commas."""
    try:
        found = tuple(float(part) for part in text.split(","))
    except ValueError:
        found = ()
    if not found or any(isnan(value) or not isfinite(value) or not 0.05 <= value <= 1000 for value in found):
        raise Usage(f"--every is {text!r}; expected seconds from 0.05 to 1000, separated by commas, such as 0.5,2,10.")
    return found
