"""Print and draw harvest against TTFT p99 inflation, for Ballast and every baseline with all values of its knob.

    python benchmarks/frontier.py --load 40 --minutes 58,15,15 --plot docs/images/frontier.png
    python benchmarks/frontier.py --trace bursts --slots 32 --ttft-ms 500 --seeds 3 --policy ballast,static-budget

Points that lose more than a point of attainment are hollow. They are no part of our curve, and are not compared with
it. A point can be faster than Ballast's online alone, for example if prompts are served in order. Its inflation counts
as 0.

There are three traces: the Azure conversations, the arena's 27 tenants, and bursts (a tenth of each minute at eight
times the rate of the rest, Azure lengths). The program also computes the load below which separate GPUs exceed the
SLO-bound throughput.

With several seeds, a row pools the requests of all runs: slices of a trace that start at other requests, or other
draws of the bursts.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from pathlib import Path

from pooled import pooled_table, rotated

from ballast_cli.bench.processes import in_processes
from ballast_cli.console import print_table
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_cli.refusals import refusals
from ballast_cli.sim_options import progress
from ballast_sim.comparison.baselines import PEERS
from ballast_sim.comparison.bench import Bench, Row, knob
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.comparison.table import Table, run_table
from ballast_sim.replay.arrivals import bursts, generate
from ballast_sim.replay.report import Report
from ballast_sim.replay.traffic import Arrival, read, read_lengths

BUDGET_POLICIES = tuple(
    f"static-budget={ms:g}" for ms in (*range(16, 26), 27.5, 30, 32.5, 35, 37.5, *range(40, 46), 50)
)
RATES = ("qps-cap=0.25", "qps-cap=0.5", "qps-cap=1", "qps-cap=1.5", "qps-cap=2")
CAPS = (2, 5, 10, 25)
WIDE_CAPS = (50, 75, 90, 100, 105, 110, 125)
FAMILIES = ("ballast", "static-budget", "qps-cap", "static-split", *PEERS)
"""The policies that `--policy` accepts. Each has all values of its knob."""
TRACES = ("azure", "arena", "bursts")
MORE = 0.01
"""Points of harvest by which a baseline may be above our curve."""


@dataclass(frozen=True)
class Point:
    """One row as a point of the picture."""

    policy: str
    inflation: float
    """TTFT p99 over that of online alone, less 1."""
    harvest: float
    is_kept: bool
    """Whether it keeps the attainment of online alone, less a point."""

    @property
    def cost(self) -> float:
        """Return the cost of offline work for online: the inflation, or 0 if the point is faster."""
        return max(0.0, self.inflation)

    @property
    def is_ours(self) -> bool:
        """Return whether the point is on our curve."""
        return knob(self.policy).name == "ballast"


def points(table: Table, load: float) -> list[Point]:
    """Return the rows as points."""
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
    """Return our highest harvest at this cost or less, interpolated between the points; 0 left of the first."""
    best = 0.0
    ordered = [Point("", 0.0, 0.0, is_kept=True), *sorted(ours, key=lambda point: point.cost)]
    for left, right in pairwise(ordered):
        if right.cost <= cost:
            best = max(best, right.harvest)
        elif left.cost <= cost:
            share = (cost - left.cost) / (right.cost - left.cost)
            best = max(best, left.harvest + share * (right.harvest - left.harvest))
    return best


def trace_of(name: str, minutes: float, *, seed: int, share: float) -> list[Arrival]:
    """Return a trace by name. A trace that is read from a file starts at a share of its requests."""
    azure = read(ONLINE_TRACE)
    if name == "bursts":
        share = bursts(1 / 8, every=60.0, lasting=6.0)
        return generate(16.0, share=share, seconds=240 * minutes, lengths=azure, seed=seed)
    return rotated(azure if name == "azure" else read(ONLINE_TRACE.with_name("vtc_arena.csv")), share)


def bound_sentences(table: Table, load: float) -> str:
    """Return the most that separate and mixed GPUs can do, from the maximum throughputs and the highest online rate."""
    full = table.bench.unbounded / table.bench.bound
    most = table.rate / table.bench.bound
    if not most:
        return "Online alone attains 99 % at no rate."
    apart = load + max(0.0, 1 - load / most) * full
    mixed = min(1.0, load / most) + max(0.0, 1 - load / most) * full
    even = (full - 1) / (full / most - 1)
    return (
        f"Offline alone without an SLO does {full:.1%} of the SLO-bound throughput. Online alone fills a GPU at "
        f"{most:.0%}. Separate GPUs, in a fleet that can be divided at will, do {load:.0%} + (1 - {load:.0%} / "
        f"{most:.0%}) x {full:.1%} = {apart:.1%}: more than the SLO-bound throughput below {even:.0%} load. Online on "
        f"the fewest mixed GPUs and offline alone on the others: {mixed:.1%}."
    )


def judge(name: str, table: Table, load: float) -> tuple[list[Point], bool]:
    """Print one trace."""
    found = points(table, load)
    ours = [point for point in found if point.is_ours and point.is_kept]
    requests = table.bench.alone(load).result.num_online
    print(f"\n{name}: {100 * load:g} % load, {table.bench.request_rate(load):.2f} requests/s, {requests:,} requests")
    print(bound_sentences(table, load))
    has_ours = any(point.is_ours for point in found)
    rows, above = [], {True: 0.0, False: 0.0}
    for point, row in zip(found, table.rows, strict=True):
        higher = point.harvest - curve(ours, point.cost)
        if not point.is_ours and point.policy != "static-split":
            above[point.is_kept] = max(above[point.is_kept], higher)
        is_compared = has_ours and not point.is_ours
        rows.append(_cells(point, row, f"{100 * higher:+.1f}" if is_compared else "", table))
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
    print_table(columns, rows, right=columns[1:-1])
    if has_ours:
        print(
            f"Highest baseline above our curve: {100 * above[True]:.1f} points if it keeps the attainment of "
            f"online alone less a point (allowed {100 * MORE:g}), {100 * above[False]:.1f} if it does not"
        )
        print_caps(table, load)
        return found, above[True] <= MORE
    return found, True


def print_caps(table: Table, load: float) -> None:
    """Print for each cap the cost for online, and the highest harvest of a static budget at the same cost or less."""
    alone = table.bench.alone(load).result
    budgets = [row for row in table.rows if knob(row.policy)[0] == "static-budget"]
    rows = []
    for ours in table.rows:
        name, percent, _ = knob(ours.policy)
        if name != "ballast" or percent is None:
            continue
        cap = percent
        inflations = _inflations(ours.result, alone)
        below = [row for row in budgets if max(_inflations(row.result, alone)) <= cap / 100]
        best = max((row.offline_tokens for row in below), default=0.0)
        rows.append(
            (
                f"{cap:g} %",
                *(f"{inflation:+.1%}" for inflation in inflations),
                "kept" if max(inflations) <= cap / 100 else "broken",
                f"{ours.offline_tokens / table.bench.unbounded:.1%}",
                f"{best / table.bench.unbounded:.1%}" if budgets else "-",
            )
        )
    if not rows:
        return
    columns = ("cap", "TTFT p50", "p99", "TPOT p50", "p99", "cap is", "harvest", "best static budget")
    print_table(columns, rows, right=columns[1:])


def _inflations(result: Report, alone: Report) -> tuple[float, ...]:
    """Return the inflation of TTFT p50 and p99, and of TPOT p50 and p99."""
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
    """Draw one plot for each trace. Lines follow the knobs. Points that break the attainment are hollow and faint."""
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
                label="ballast, by cap" if is_ours else policy,
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


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=40.0, help="percent of the SLO-bound throughput")
    parser.add_argument(
        "--minutes",
        type=_minutes,
        default=[5.0],
        help="minutes of a run, one number or one per trace; a p99 needs thousands of requests",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="number of runs that each row pools")
    parser.add_argument("--trace", choices=TRACES, help="run this trace only")
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="SLO of the time to the first token")
    parser.add_argument("--tpot-ms", type=float, default=50.0, help="SLO of the mean time per token after the first")
    parser.add_argument("--slots", type=int, default=256, help="number of slots")
    parser.add_argument("--reservation", type=float, default=0.0, help="percent of slots that is reserved for offline")
    parser.add_argument("--suspension", choices=("on", "off"), default="on", help="whether Ballast suspends steps")
    parser.add_argument(
        "--caps",
        type=_caps,
        default=[*CAPS, *WIDE_CAPS],
        help="interference caps in percent, such as 2,10; none: no cap",
    )
    parser.add_argument("--fitted", action="store_true", help="Ballast learns the step times during the run")
    parser.add_argument(
        "--policy", type=_families, default=FAMILIES, metavar="NAME,...", help=f"policies: {', '.join(FAMILIES)}"
    )
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--plot", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="run two minutes of traffic")
    found = parser.parse_args()
    if found.seeds < 1 or found.slots < 1 or not 0 <= found.reservation <= 100:
        parser.error("expected at least one seed, at least one slot, and a reservation from 0 to 100 percent")
    return found


def main() -> int:
    """Run all traces. The exit status is 1 if a baseline is above our curve."""
    args = options()
    minutes, load = [2.0] if args.quick else args.minutes, args.load / 100
    by_trace, is_kept = {}, True
    for name, lasting in zip(TRACES, cycle(minutes), strict=False):
        if args.trace not in {None, name}:
            continue
        tables = [run(name, lasting, turn, args) for turn in range(args.seeds)]
        by_trace[name], is_below = judge(name, pooled_table(tables), load)
        is_kept &= is_below
    if args.plot:
        draw(by_trace, args.plot)
    return 0 if is_kept else 1


def _minutes(text: str) -> list[float]:
    found = [float(part) for part in text.split(",")]
    if len(found) not in {1, 3} or min(found) <= 1:
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected one number above 1, or one for each trace, such as 58,15,15"
        )
    return found


def _caps(text: str) -> list[float]:
    found = [] if text == "none" else [float(part) for part in text.split(",")]
    if any(cap <= 0 for cap in found):
        raise argparse.ArgumentTypeError(f"{text!r}; expected percentages above 0, such as 2,10,25, or none")
    return found


def _families(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    unknown = [name for name in found if name not in FAMILIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown policy {unknown[0]!r}; known are {', '.join(FAMILIES)}")
    return found


def policies(args: argparse.Namespace) -> list[str]:
    """Return the rows of the table: each chosen policy with all values of its knob."""
    values = {
        "ballast": (*(f"ballast={cap:g}" for cap in args.caps), "ballast"),
        "static-budget": BUDGET_POLICIES,
        "qps-cap": RATES,
    }
    return [row for family in FAMILIES if family in args.policy for row in values.get(family, (family,))]


def run(name: str, minutes: float, turn: int, args: argparse.Namespace) -> Table:
    """Run all policies on one trace, from one seed."""
    with refusals():
        lengths = read_lengths(OFFLINE_TRACE)
        seed = args.seed + turn
        trace = trace_of(name, minutes, seed=seed, share=turn / args.seeds)
        engine = BenchEngine.of(
            model="llama-3-8b",
            gpu="a100",
            ttft=args.ttft_ms / 1e3,
            tpot=args.tpot_ms / 1e3,
            slots=args.slots,
            chunk_tokens=512,
            online=trace,
            offline=lengths,
        )
        bench = Bench(
            trace,
            lengths,
            replace(engine.config, can_suspend=args.suspension == "on"),
            engine.model,
            60 * minutes,
            seed=seed,
            # A step can be suspended between two layers. With one layer, it cannot.
            num_layers=engine.num_layers if args.suspension == "on" else 1,
            is_fitted=args.fitted,
        )
        return run_table(
            bench,
            policies=policies(args),
            loads=(args.load / 100,),
            reservations=(args.reservation / 100,),
            mapped=in_processes(args.jobs),
            has_best_budget=False,
            progress=progress,
        )


if __name__ == "__main__":
    sys.exit(main())
