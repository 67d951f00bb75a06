"""Print and draw harvest against TTFT p99 inflation: every baseline and its knob beside Ballast and its own.

    python benchmarks/frontier.py --load 40 --minutes 58,15,15 --plot docs/images/frontier.png

Points that lose more than a point of attainment are hollow, and neither make our curve nor are held against it.
A point can be faster than Ballast's online alone, as where prompts are served in order: that is no cost of offline
work, and counts as 0.
Three traces: the Azure conversations, the arena's 27 tenants, and bursts (a tenth of each minute at eight times the
rate of the rest, Azure lengths). Above each: where GPUs apart do more than the SLO-bound ceiling, by computation.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path

from ballast_cli.bench import progress, refusals
from ballast_cli.console import print_table
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.arrivals import bursts, generate
from ballast_sim.crew import Table, run_table
from ballast_sim.mixed import Bench, Row, knob
from ballast_sim.report import Report
from ballast_sim.setting import setting
from ballast_sim.traffic import Arrival, read, read_lengths

BUDGET_POLICIES = tuple(
    f"static-budget={ms:g}" for ms in (*range(16, 26), 27.5, 30, 32.5, 35, 37.5, *range(40, 46), 50)
)
RATES = ("qps-cap=0.25", "qps-cap=0.5", "qps-cap=1", "qps-cap=1.5", "qps-cap=2")
CAPS = (2, 5, 10, 25)
WIDE_CAPS = (50, 75, 90, 100, 105, 110, 125)
OURS = (*(f"ballast={cap}" for cap in (*CAPS, *WIDE_CAPS)), "ballast")
OTHERS = ("static-split", "naive-priority", "sarathi", "aimd", "greedy")
MORE = 0.01
"""Points of harvest by which a baseline may lie above our curve."""


@dataclass(frozen=True)
class Point:
    """One row in the plane."""

    policy: str
    inflation: float
    """TTFT p99 over that of online alone, less 1."""
    harvest: float
    is_kept: bool
    """The attainment of online alone, less a point."""

    @property
    def cost(self) -> float:
        """What offline work costs online: inflation, and nothing where there is none."""
        return max(0.0, self.inflation)

    @property
    def is_ours(self) -> bool:
        """Whether it lies on our curve."""
        return knob(self.policy)[0] == "ballast"


def points(table: Table, load: float) -> list[Point]:
    """Where the rows lie."""
    alone = table.bench.alone(load).result.ttft.p99
    return [
        Point(
            row.policy,
            row.result.ttft.p99 / alone - 1,
            row.offline_tokens / table.bench.unbounded,
            table.bench.keeps(row),
        )
        for row in table.rows
    ]


def curve(ours: Sequence[Point], cost: float) -> float:
    """Most harvest of ours at that cost or less, straight lines between the points; 0 left of the first."""
    best = 0.0
    ordered = [Point("", 0.0, 0.0, is_kept=True), *sorted(ours, key=lambda point: point.cost)]
    for left, right in pairwise(ordered):
        if right.cost <= cost:
            best = max(best, right.harvest)
        elif left.cost <= cost:
            share = (cost - left.cost) / (right.cost - left.cost)
            best = max(best, left.harvest + share * (right.harvest - left.harvest))
    return best


def traces(minutes: Sequence[float], seed: int) -> dict[str, list[Arrival]]:
    """By name."""
    azure = read(ONLINE_TRACE)
    burst = generate(
        bursts(2.0, 16.0, every=60.0, lasting=6.0), peak=16.0, seconds=240 * max(minutes), lengths=azure, seed=seed
    )
    return {"azure": azure, "arena": read(ONLINE_TRACE.with_name("vtc_arena.csv")), "bursts": burst}


def bound_sentences(table: Table, load: float) -> str:
    """What GPUs apart and mixed can do at most, from the ceilings and the highest online rate."""
    full = table.bench.unbounded / table.bench.bound
    most = table.rate / table.bench.bound
    if not most:
        return "Online alone attains 99 % at no rate here."
    apart = load + max(0.0, 1 - load / most) * full
    mixed = min(1.0, load / most) + max(0.0, 1 - load / most) * full
    even = (full - 1) / (full / most - 1)
    return (
        f"Offline alone does {full:.1%} of the SLO-bound ceiling where no step is bound, online alone fills a GPU at "
        f"{most:.0%}. GPUs apart, cut as finely as one likes, do {load:.0%} + (1 - {load:.0%} / {most:.0%}) x "
        f"{full:.1%} = {apart:.1%}: more than the ceiling below {even:.0%} load. Online on the fewest mixed GPUs, "
        f"offline alone on the others: {mixed:.1%}."
    )


def judge(name: str, table: Table, load: float) -> tuple[list[Point], bool]:
    """Print one trace."""
    found = points(table, load)
    ours = [point for point in found if point.is_ours and point.is_kept]
    print(f"\n{name}: {100 * load:g} % load, {table.bench.request_rate(load):.2f} requests/s")
    print(bound_sentences(table, load))
    rows, above = [], {True: 0.0, False: 0.0}
    for point, row in zip(found, table.rows, strict=True):
        higher = point.harvest - curve(ours, point.cost)
        if not point.is_ours and point.policy != "static-split":
            above[point.is_kept] = max(above[point.is_kept], higher)
        rows.append(_cells(point, row, "" if point.is_ours else f"{100 * higher:+.1f}", table))
    columns = (
        "policy",
        "TTFT p99",
        "inflation",
        "TTFT met",
        "TPOT met",
        "SLO",
        "harvest",
        "of bound",
        "above ours",
        "",
    )
    print_table(columns, rows, right=columns[1:-1], is_wide=True)
    print(
        f"Highest baseline above our curve: {100 * above[True]:.1f} points among those that keep the attainment of "
        f"online alone less a point (allowed {100 * MORE:g}), {100 * above[False]:.1f} among those that break it"
    )
    print_caps(table, load)
    return found, above[True] <= MORE


def print_caps(table: Table, load: float) -> None:
    """Each cap: what offline work costs online, and the most that a static budget harvests at no more."""
    alone = table.bench.alone(load).result
    budgets = [row for row in table.rows if knob(row.policy)[0] == "static-budget"]
    rows = []
    for cap in (*CAPS, *WIDE_CAPS):
        (ours,) = (row for row in table.rows if row.policy == f"ballast={cap}")
        inflations = _inflations(ours.result, alone)
        below = [row for row in budgets if max(_inflations(row.result, alone)) <= cap / 100]
        best = max((row.offline_tokens for row in below), default=0.0)
        rows.append(
            (
                f"{cap} %",
                *(f"{inflation:+.1%}" for inflation in inflations),
                "kept" if max(inflations) <= cap / 100 else "broken",
                f"{ours.offline_tokens / table.bench.unbounded:.1%}",
                f"{best / table.bench.unbounded:.1%}",
            )
        )
    columns = ("cap", "TTFT p50", "p99", "TPOT p50", "p99", "cap is", "harvest", "best static budget")
    print_table(columns, rows, right=columns[1:], is_wide=True)


def _inflations(result: Report, alone: Report) -> tuple[float, ...]:
    """Of TTFT p50 and p99, TPOT p50 and p99."""
    pairs = ((result.ttft, alone.ttft), (result.tpot, alone.tpot))
    return tuple(getattr(ours, p) / getattr(theirs, p) - 1 for ours, theirs in pairs for p in ("p50", "p99"))


def _cells(point: Point, row: Row, above: str, table: Table) -> tuple[str, ...]:
    result = row.result
    return (
        point.policy,
        f"{1e3 * result.ttft.p99:,.0f} ms",
        f"{point.inflation:+.1%}",
        f"{result.ttft_attainment:.2%}",
        f"{result.tpot_attainment:.2%}",
        "kept" if point.is_kept else "broken",
        f"{point.harvest:.1%}",
        f"{row.total_tokens / table.bench.bound:.1%}",
        above,
        row.note,
    )


def draw(by_trace: dict[str, list[Point]], path: Path) -> None:
    """One plane for each trace: lines follow the knobs, and what breaks the attainment is hollow and faint."""
    from matplotlib.figure import Figure  # noqa: PLC0415  a second of import, where a picture is asked for

    figure = Figure(figsize=(13, 4.5), layout="constrained")
    planes = figure.subplots(1, len(by_trace), squeeze=False)[0]
    for axes, (name, found) in zip(planes, by_trace.items(), strict=True):
        for policy in dict.fromkeys(knob(point.policy)[0] for point in found):
            of_policy = [point for point in found if knob(point.policy)[0] == policy]
            is_ours = policy == "ballast"
            kept = [point for point in of_policy if point.is_kept]
            (line,) = axes.plot(
                [100 * point.inflation for point in kept],
                [100 * point.harvest for point in kept],
                marker="o",
                markersize=6 if is_ours else 4,
                label="ballast, caps of 2 % to none" if is_ours else policy,
                linewidth=2.5 if is_ours else 1.0,
                zorder=3 if is_ours else 2,
            )
            broken = [point for point in of_policy if not point.is_kept]
            axes.plot(
                [100 * point.inflation for point in broken],
                [100 * point.harvest for point in broken],
                linestyle="",
                marker="o",
                markersize=4,
                fillstyle="none",
                alpha=0.5,
                color=line.get_color(),
            )
        axes.axvline(0, color="grey", linewidth=0.5)
        axes.set_xscale("symlog", linthresh=10)
        axes.set(title=name, xlabel="TTFT p99 over online alone, %", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:+.0f}")
    figure.axes[0].set_ylabel("harvest, % of offline alone")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def main() -> int:
    """Run all three; the exit status is 1 where a baseline lies above our curve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=40.0, help="percent of the SLO-bound ceiling")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=[5.0],
        help="of all, or of each of the three; a p99 needs thousands of requests",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--trace", choices=("azure", "arena", "bursts"), help="one of them alone")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="two minutes of traffic")
    options = parser.parse_args()
    minutes, load = [2.0] if options.quick else options.minutes, options.load / 100
    lengths, by_trace, is_kept = read_lengths(OFFLINE_TRACE), {}, True
    for (name, trace), lasting in zip(traces(minutes, options.seed).items(), cycle(minutes), strict=False):
        if options.trace not in {None, name}:
            continue
        table = run(trace, lengths, load, lasting, options)
        by_trace[name], is_below = judge(name, table, load)
        is_kept &= is_below
    if options.plot:
        draw(by_trace, options.plot)
    return 0 if is_kept else 1


def _minutes(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if len(found) not in {1, 3} or min(found) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}; wanted more than 1, for all or for each of three, as in 58,15,15")
    return found


def run(
    trace: list[Arrival], lengths: list[Arrival], load: float, minutes: float, options: argparse.Namespace
) -> Table:
    """All policies on one trace."""
    with refusals():
        engine = setting(
            model="llama-3-8b", gpu="a100", ttft=1.0, tpot=0.05, slots=256, chunk_tokens=512, online=trace,
            offline=lengths,
        )  # fmt: skip
        config: PolicyConfig = engine.config
        bench = Bench(
            trace, lengths, config, engine.model, 60 * minutes, seed=options.seed, num_layers=engine.num_layers
        )
        return run_table(
            bench,
            policies=(*OURS, *BUDGET_POLICIES, *RATES, *OTHERS),
            loads=(load,),
            reservations=(0.0,),
            processes=options.jobs,
            has_best_budget=False,
            progress=progress,
        )


if __name__ == "__main__":
    sys.exit(main())
