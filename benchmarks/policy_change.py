"""Measure the policy on all workloads, and print a change of the policy as one table of before and after.

    python benchmarks/policy_change.py --json before.json                     # with the current policy
    python benchmarks/policy_change.py --json after.json --against before.json     # with the changed policy

Each row pools three seeds: slices of a trace that start at different requests, or other draws of arrivals and offline
lengths. Attainment is also compared with online alone by the same code. Totals and offline tokens are shares of
offline alone with every step within 50 ms, or within the TPOT if that is shorter. "Worst third" is the attainment that
the worst third of prompt lengths loses against online alone, of TTFT or TPOT.

A change is judged row by row, including the rows of online alone: a row may lose 0.3 points of attainment and 1 point
of the total. The loss of a single request is always allowed, because it is more than 0.3 points in some rows.
The exit status is 1 if a row loses more, or if the simulation fails where it did not before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from math import isfinite
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any

from pooled import pooled, rotated

from ballast_cli.console import print_table
from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE, scale
from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.comparison.bench import Bench
from ballast_sim.comparison.bench import Row as BenchRow
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.comparison.workloads import WORKLOADS, sparse
from ballast_sim.errors import SimError
from ballast_sim.replay.arrivals import bursts, generate
from ballast_sim.replay.attainment import worst_lost
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.replica import Policy
from ballast_sim.replay.report import Report, report
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.traffic import Arrival, Trace, read, read_lengths

SEEDS = 3
MOST_ATTAINMENT, MOST_TOTAL = 0.003, 0.01
"""The most attainment and total throughput that a row may lose, as fractions of 1."""
WARMUP_SECONDS = 60.0
MAXIMUM_SECONDS = 450.0
CPU_SECONDS = 0.4
"""Approximate CPU time of one simulated minute, from which the expected duration is computed."""
QUICK = 0.2
"""Share of the simulated time that `--quick` keeps."""


@dataclass(frozen=True)
class Variant:
    """The options of the policy in one row of a workload."""

    label: str
    reservation: float = 0.0
    is_suspending: bool = True
    cap: float | None = None
    is_fitted: bool = False
    has_job: bool = True
    objective: float | None = None
    """Share of the online requests that must keep their SLO; None for 99 %."""


ALONE = Variant("online alone", has_job=False)
FOUR = (
    Variant("no reservation"),
    Variant("no reservation, no suspension", is_suspending=False),
    Variant("reservation 10 %", 0.1),
    Variant("reservation 10 %, no suspension", 0.1, is_suspending=False),
)
CAPS = (
    *(Variant(f"cap {percent} %", cap=percent / 100) for percent in (2, 5, 10, 25)),
    Variant("cap 10 %, fitted", cap=0.1, is_fitted=True),
    Variant("cap 10 %, no suspension", cap=0.1, is_suspending=False),
    Variant("cap 10 %, reservation 10 %", 0.1, cap=0.1),
)
LONG = (
    *FOUR,
    Variant("objective 99.9 %", objective=0.999),
    Variant("objective 99.9 %, reservation 10 %", 0.1, objective=0.999),
)
SPARSE = (
    Variant("SLO"),
    Variant("SLO, fitted", is_fitted=True),
    Variant("SLO, fitted, no suspension", is_fitted=True, is_suspending=False),
    Variant("SLO, reservation 10 %, fitted", 0.1, is_fitted=True),
    *(Variant(f"cap {percent} %", cap=percent / 100) for percent in (10, 25)),
    *(Variant(f"cap {percent} %, fitted", cap=percent / 100, is_fitted=True) for percent in (10, 25)),
)
FITTED = (Variant("SLO, fitted", is_fitted=True), Variant("cap 25 %, fitted", cap=0.25, is_fitted=True))


@dataclass(frozen=True)
class Workload:
    """Traffic and an SLO, and the rows that are measured on it."""

    minutes: float
    make: Callable[[int, float], tuple[Bench, float]]
    """Takes a seed and seconds. Returns the bench and its online load."""
    variants: tuple[Variant, ...] = FOUR
    least_minutes: float = 3.0
    """The shortest simulated time of a quick run."""

    def seconds(self, *, is_quick: bool) -> float:
        """Return the simulated time of one run."""
        return 60 * (max(QUICK * self.minutes, min(self.least_minutes, self.minutes)) if is_quick else self.minutes)


@cache
def azure() -> Sequence[Arrival]:
    """Read the Azure conversations."""
    return read(ONLINE_TRACE)


@cache
def arxiv() -> Sequence[Arrival]:
    """Read the offline lengths."""
    return read_lengths(OFFLINE_TRACE)


def slice_of_azure(seed: int, _: float) -> Trace:
    """Return the Azure trace, started at a different request for each seed."""
    return rotated(azure(), seed / SEEDS)


def slice_of_arena(seed: int, _: float) -> Trace:
    """Return the arena trace of 27 tenants, started at a different request for each seed."""
    return rotated(read(ONLINE_TRACE.with_name("vtc_arena.csv")), seed / SEEDS)


def burst(seed: int, seconds: float) -> Trace:
    """Draw arrivals with bursts: a tenth of each minute has eight times the rate of the rest."""
    share = bursts(1 / 8, every=60.0, lasting=6.0)
    return generate(16.0, share=share, seconds=4 * seconds, lengths=azure(), seed=seed)


def long_context(seed: int, seconds: float) -> Trace:
    """Draw prompts of 8,000 to 30,000 tokens with short answers, as those with retrieved documents are."""
    random = Random(seed)
    lengths = [
        Arrival(0.0, prompt, answer)
        for prompt, answer in ((round(random.gauss(15_000, 6_000)), round(random.gauss(50, 20))) for _ in range(2_000))
        if 8_000 <= prompt <= 30_000 and 10 <= answer <= 150
    ]
    return generate(1.0, seconds=seconds, lengths=lengths, seed=seed)


def on_trace(
    seed: int,
    seconds: float,
    *,
    load: float,
    make: Callable[[int, float], Trace] = slice_of_azure,
    ttft: float = 1.0,
    tpot: float = 0.05,
    slots: int = 256,
    model: str = "llama-3-8b",
) -> tuple[Bench, float]:
    """Return a bench on a trace, and the load to which the trace is stretched."""
    trace = make(seed, seconds)
    engine = BenchEngine.of(
        model=model, gpu="a100", ttft=ttft, tpot=tpot, slots=slots, chunk_tokens=512, online=trace,
        offline=arxiv(),
    )  # fmt: skip
    bench = Bench(
        trace, arxiv(), engine.config, engine.model, seconds, seed=seed, num_layers=engine.num_layers,
        warmup_seconds=min(WARMUP_SECONDS, seconds / 4), maximum_seconds=MAXIMUM_SECONDS,
    )  # fmt: skip
    return bench, load


FAST = CostModel(k0=0.45e-3, k1=30e-6, k2=10e-9, k3=30e-6, k4=0.15e-6, is_trusted=True)
"""Step times of the small model on a CPU, which the demo serves."""


def on_fast_steps(seed: int, seconds: float, *, load: float) -> tuple[Bench, float]:
    """Return the demo in virtual time: a small model, lengths and times of the Azure trace divided."""
    trace = scale(slice_of_azure(seed, seconds), length=1 / 16, speed=10)
    offline = scale(arxiv(), length=1 / 16)
    config = PolicyConfig(16, 4096, 16, chunk_tokens=512, ttft=0.022, tpot=0.004, objective=0.99)
    bench = Bench(
        trace, offline, config, FAST, seconds, seed=seed, num_layers=4, warmup_seconds=seconds / 6,
        maximum_seconds=30,
    )  # fmt: skip
    return bench, load


def on_workload(
    seed: int, seconds: float, *, name: str, point: int = 0, offline: Callable[[], Sequence[Arrival]] | None = None
) -> tuple[Bench, float]:
    """Return the bench of one point of a workload that sets its own arrival times, and its load."""
    workload = WORKLOADS[name](seconds=seconds, seed=seed)
    if offline:
        workload = replace(workload, offline=offline())
    chosen = workload.points[point]
    engine = BenchEngine.of(
        model="llama-3-8b", gpu="a100", ttft=chosen.ttft, tpot=chosen.tpot, slots=workload.slots, chunk_tokens=512,
        online=chosen.online, offline=workload.offline,
    )  # fmt: skip
    bench = replace(workload.bench(chosen, engine), seed=seed, maximum_seconds=MAXIMUM_SECONDS)
    return bench, 1.0


def workloads() -> dict[str, Workload]:
    """Return all workloads by name, in the order of the table."""
    traced: Callable[..., Callable[[int, float], tuple[Bench, float]]] = partial(partial, on_trace)
    worked: Callable[..., Callable[[int, float], tuple[Bench, float]]] = partial(partial, on_workload)
    found = {
        "azure-60": Workload(20, traced(load=0.6)),
        "azure-20": Workload(15, traced(load=0.2)),
        "azure-20-tight": Workload(15, traced(load=0.2, ttft=0.3, tpot=0.03)),
        "azure-60-tight": Workload(15, traced(load=0.6, ttft=0.3, tpot=0.03)),
        "azure-40-ttft-500": Workload(15, traced(load=0.4, ttft=0.5)),
        "azure-40-32-slots": Workload(15, traced(load=0.4, slots=32)),
        "arena-40": Workload(15, traced(load=0.4, make=slice_of_arena)),
        "bursts-40": Workload(15, traced(load=0.4, make=burst)),
        "bursts-40-32-slots-ttft-500": Workload(15, traced(load=0.4, make=burst, slots=32, ttft=0.5)),
        "long-context-50": Workload(15, traced(load=0.5, make=long_context, ttft=10.0, model="qwen3-8b")),
        "caps-azure-40": Workload(30, traced(load=0.4), CAPS),
    }
    for load in (5, 20):
        found[f"fast-steps-{load}"] = Workload(2, partial(on_fast_steps, load=load / 100), least_minutes=1)
    for index, point in enumerate(sparse().points):
        spacing = f"{point.online[1].seconds:g}"
        found[f"sparse-{spacing}s"] = Workload(5, worked(name="sparse", point=index), SPARSE, least_minutes=5)
    found["sparse-2s-arxiv"] = Workload(5, worked(name="sparse", point=1, offline=arxiv), FITTED, least_minutes=5)
    for index, point in enumerate(WORKLOADS["long-prompts"](seconds=60.0).points):
        found[f"long-prompts-{1e3 * point.ttft:g}"] = Workload(30, worked(name="long-prompts", point=index), LONG)
    found["bursts-from-silence"] = Workload(20, worked(name="bursts-from-silence"), least_minutes=6)
    return found


@dataclass(frozen=True)
class Outcome:
    """One run of one seed."""

    variant: str
    result: Report | None
    failure: str = ""


@dataclass(frozen=True)
class SeedRuns:
    """All runs of one workload with one seed."""

    workload: str
    seed: int
    judged_by: PolicyConfig
    bound: float
    outcomes: tuple[Outcome, ...]


known_maximums: dict[tuple[object, ...], dict[str, BenchRow]] = {}
"""Throughput of offline work alone, by model, slots, TPOT, and offline lengths. Each process has its own."""


def measure(name: str, seed: int, *, is_quick: bool) -> SeedRuns:
    """Run online alone and every variant of a workload."""
    chosen = workloads()[name]
    bench, load = chosen.make(seed, chosen.seconds(is_quick=is_quick))
    # Several workloads share a maximum throughput, which takes seconds to measure.
    key = (bench.model, bench.config.slots, bench.bound_tpot or bench.config.tpot, hash(tuple(bench.offline)))
    bench.maximums = known_maximums.setdefault(key, bench.maximums)
    online = bench.online(load)
    outcomes = tuple(run(bench, online, variant) for variant in (ALONE, *chosen.variants))
    return SeedRuns(name, seed, bench.config, bench.bound, outcomes)


def run(bench: Bench, online: Sequence[Arrival], variant: Variant, policy: Callable[[], Policy] = Ballast) -> Outcome:
    """Run one variant. A failed simulation is an outcome, too."""
    config = replace(bench.config, offline_share=variant.reservation, can_suspend=variant.is_suspending)
    try:
        return Outcome(variant.label, report(simulate(scenario_of(bench, online, variant, policy)), config))
    except SimError as error:
        return Outcome(variant.label, None, str(error))


def scenario_of(
    bench: Bench, online: Sequence[Arrival], variant: Variant, policy: Callable[[], Policy] = Ballast
) -> Scenario:
    """Return the scenario of a variant."""
    config = replace(bench.config, offline_share=variant.reservation, can_suspend=variant.is_suspending)
    if variant.cap is not None:
        ttft, tpot = bench.capped_slo or (config.ttft, config.tpot)
        config = replace(config, max_interference=variant.cap, ttft=ttft, tpot=tpot)
    if variant.objective is not None:
        config = replace(config, objective=variant.objective)
    scenario = replace(
        bench.scenario(policy, online),
        config=config,
        cost=None if variant.is_fitted else bench.cost,
        # A step can be suspended between two layers: with one layer, it never is.
        num_layers=bench.num_layers if variant.is_suspending else 1,
    )
    return scenario if variant.has_job else replace(scenario, offline=list)


@dataclass(frozen=True)
class Row:
    """One variant of one workload, all seeds pooled. Shares are fractions of 1."""

    workload: str
    variant: str
    seeds: int
    requests: int
    ttft_attainment: float | None
    tpot_attainment: float | None
    ttft_lost: float | None
    """Compared with online alone by the same code."""
    tpot_lost: float | None
    worst_third_ttft_lost: float | None
    worst_third_tpot_lost: float | None
    total: float | None
    offline: float | None
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None
    shortfall: float | None
    failure: str = ""

    @property
    def key(self) -> tuple[str, str]:
        """Return the key that matches the rows before and after a change."""
        return self.workload, self.variant


def rows(of_seeds: Sequence[SeedRuns]) -> Iterator[Row]:
    """Pool the seeds of one workload."""
    name = of_seeds[0].workload
    bound = sum(one.bound for one in of_seeds) / len(of_seeds)
    alone: Report | None = None
    for outcomes in zip(*(one.outcomes for one in of_seeds), strict=True):
        results = [outcome.result for outcome in outcomes if outcome.result]
        failures = [outcome.failure for outcome in outcomes if outcome.failure]
        variant = outcomes[0].variant
        if failures or (alone is None and variant != ALONE.label):
            failure = f"{len(failures)} of {len(outcomes)} seeds: {', '.join(failures[:1])}"
            yield Row(name, variant, len(outcomes), 0, *([None] * 12), failure=failure)
            continue
        result = pooled(results, of_seeds[0].judged_by)
        alone = alone or result
        yield Row(name, variant, len(outcomes), result.num_online, *figures(result, alone, bound))


def figures(result: Report, alone: Report, bound: float) -> Iterator[float | None]:
    """Compute the figures of a row, in its order. A figure that was not measured is None."""
    lost = worst_lost(result.thirds, alone.thirds)
    found = (
        result.ttft_attainment,
        result.tpot_attainment,
        alone.ttft_attainment - result.ttft_attainment,
        alone.tpot_attainment - result.tpot_attainment,
        lost.ttft,
        lost.tpot,
        result.total_tokens / bound,
        result.offline.total / bound,
        1e3 * result.ttft.p50,
        1e3 * result.ttft.p99,
        1e3 * result.tpot.p99,
        result.reservation_shortfall,
    )
    return (figure if isfinite(figure) else None for figure in found)


# The two tables

COLUMNS = (
    *("workload", "variant", "requests", "TTFT met", "lost", "TPOT met", "lost", "worst third", "total", "offline"),
    *("TTFT ms p50", "p99", "TPOT p99"),
)


def cells(row: Row) -> tuple[str, ...]:
    """Format one row."""
    if row.failure:
        return row.workload, row.variant, "-", "failed", *["-"] * 9
    return (
        row.workload,
        row.variant,
        f"{row.requests:,}",
        percent(row.ttft_attainment, 2),
        points(row.ttft_lost),
        percent(row.tpot_attainment, 2),
        points(row.tpot_lost),
        points(worst(row)),
        percent(row.total),
        percent(row.offline),
        *(number(value) for value in (row.ttft_p50_ms, row.ttft_p99_ms)),
        number(row.tpot_p99_ms, 1),
    )


CHANGES = (
    *(
        "workload",
        "variant",
        "requests",
        "TTFT met",
        "after",
        "TPOT met",
        "after",
        "total",
        "after",
        "offline",
        "after",
    ),
    *("TTFT ms p50", "after", "p99", "after", "worst third", "after", "bound"),
)


def change_cells(before: Row, after: Row) -> tuple[str, ...]:
    """Format one row before and after."""
    pairs: Iterable[tuple[float | None, float | None, Callable[[float | None], str]]] = (
        (before.ttft_attainment, after.ttft_attainment, partial(percent, digits=2)),
        (before.tpot_attainment, after.tpot_attainment, partial(percent, digits=2)),
        (before.total, after.total, percent),
        (before.offline, after.offline, percent),
        (before.ttft_p50_ms, after.ttft_p50_ms, number),
        (before.ttft_p99_ms, after.ttft_p99_ms, number),
        (worst(before), worst(after), points),
    )
    return (
        after.workload,
        after.variant,
        f"{after.requests:,}",
        *(text for was, now, form in pairs for text in (form(was), form(now))),
        "; ".join(broken(before, after)) or "kept",
    )


def worst(row: Row) -> float | None:
    """Return the attainment that the worst third of prompt lengths loses, of TTFT or TPOT."""
    lost = (row.worst_third_ttft_lost, row.worst_third_tpot_lost)
    return max((each for each in lost if each is not None), default=None)


def broken(before: Row, after: Row) -> list[str]:
    """Return each loss of a row that is over the bound."""
    if after.failure:
        return [] if before.failure else [f"failed: {after.failure}"]
    if before.failure:
        return []
    found, gained = [], []
    for name, was, now in (
        ("TTFT", before.ttft_attainment, after.ttft_attainment),
        ("TPOT", before.tpot_attainment, after.tpot_attainment),
    ):
        lost = (was or 0.0) - (now or 0.0)
        if abs(lost) > MOST_ATTAINMENT and abs(lost) * after.requests > 1.5:
            (found if lost > 0 else gained).append(f"{name} {'loses' if lost > 0 else 'gains'} {100 * abs(lost):.2f}")
    total = (before.total or 0.0) - (after.total or 0.0)
    if total > MOST_TOTAL:
        found += [f"total loses {100 * total:.1f}", *gained]
    return found


def percent(share: float | None, digits: int = 1) -> str:
    """Format a share."""
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def points(lost: float | None) -> str:
    """Format points lost."""
    return "-" if lost is None else f"{100 * lost + 0.0:.2f}"


def number(value: float | None, digits: int = 0) -> str:
    """Format a number."""
    return "-" if value is None else f"{value:,.{digits}f}"


def print_rows(found: Sequence[Row]) -> None:
    """Print the rows of one side."""
    print_table(COLUMNS, [cells(row) for row in found], right=COLUMNS[2:])
    for row in found:
        if row.failure:
            print(f"{row.workload}, {row.variant}: failed in {row.failure}")


def print_change(before: Mapping[tuple[str, str], Row], after: Sequence[Row]) -> bool:
    """Print both sides; return whether the bound is kept."""
    both = [(before[row.key], row) for row in after if row.key in before]
    print_table(CHANGES, [change_cells(*pair) for pair in both], right=CHANGES[2:-1])
    for row in after:
        if row.key not in before:
            print(f"{row.workload}, {row.variant}: not measured before")
    bad = [pair for pair in both if broken(*pair)]
    print(
        f"{len(both) - len(bad)} of {len(both)} rows lose at most {100 * MOST_ATTAINMENT:g} points of attainment and "
        f"{100 * MOST_TOTAL:g} point of the total"
    )
    return not bad


# The command


def options() -> argparse.Namespace:
    """Read the command line."""
    known = workloads()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--quick", action="store_true", help=f"{100 * QUICK:.0f} %% of the simulated time, 3 minutes at least"
    )
    parser.add_argument(
        "--only", metavar="WORKLOAD,...", help=f"workloads to run, of {', '.join(known)}; a prefix selects several"
    )
    parser.add_argument("--jobs", type=int, default=2, help="number of processes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file after each workload")
    parser.add_argument("--resume", action="store_true", help="skip the workloads that the file of --json already has")
    parser.add_argument(
        "--against", type=Path, metavar="FILE", help="compare with the rows of an earlier run with the same options"
    )
    found = parser.parse_args()
    prefixes = tuple(found.only.split(",")) if found.only else ("",)
    for prefix in prefixes:
        if not any(name.startswith(prefix) for name in known):
            parser.error(f"unknown workload {prefix!r}; known are {', '.join(known)}")
    if found.resume and not found.json:
        parser.error("--resume needs the file of the earlier run: add --json FILE")
    found.workloads = [name for name in known if name.startswith(prefixes)]
    return found


def main() -> int:
    """Measure, write and compare; the exit status is 1 if the bound is broken."""
    args = options()
    before = read_rows(args.against, is_quick=args.quick) if args.against else None
    found: dict[str, list[Row]] = {}
    if args.resume and args.json.exists():
        for row in read_rows(args.json, is_quick=args.quick).values():
            found.setdefault(row.workload, []).append(row)
    began = time.monotonic()
    wanted = [name for name in args.workloads if name not in found]
    for name, measured_rows in measured(wanted, is_quick=args.quick, jobs=args.jobs):
        found[name] = measured_rows
        if args.json:
            write_rows(args.json, in_order(found), is_quick=args.quick)
    print(f"{len(in_order(found))} rows in {(time.monotonic() - began) / 60:.1f} minutes")
    if before is None:
        print_rows(in_order(found))
        return 0
    return 0 if print_change(before, in_order(found)) else 1


def in_order(found: Mapping[str, Sequence[Row]]) -> list[Row]:
    """Return the rows in the order of the workloads, whichever was measured first."""
    return [row for name in workloads() for row in found.get(name, ())]


def write_rows(path: Path, found: Sequence[Row], *, is_quick: bool) -> None:
    """Write rows, so that a later run can resume or compare with them."""
    document = {"is_quick": is_quick, "rows": [asdict(row) for row in found]}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def read_rows(path: Path, *, is_quick: bool) -> dict[tuple[str, str], Row]:
    """Read the rows of an earlier run."""
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if document["is_quick"] != is_quick:
        sys.exit(f"{path} was written {'with' if document['is_quick'] else 'without'} --quick: run it the same way")
    return {row.key: row for row in (Row(**fields) for fields in document["rows"])}


def measured(names: Sequence[str], *, is_quick: bool, jobs: int) -> Iterator[tuple[str, list[Row]]]:
    """Measure the workloads in several processes, the longest first, and print progress."""
    known = workloads()
    cost = {name: (1 + len(known[name].variants)) * known[name].seconds(is_quick=is_quick) / 60 for name in names}
    tasks = sorted(((name, seed) for name in names for seed in range(SEEDS)), key=lambda task: -cost[task[0]])
    whole = SEEDS * sum(cost.values())
    print(
        f"{whole:,.0f} simulated minutes, about {whole * CPU_SECONDS / jobs / 60:.0f} minutes by {jobs} processes",
        flush=True,
    )
    of_seeds: dict[str, list[SeedRuns]] = {name: [] for name in names}
    began, done = time.monotonic(), 0.0
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(measure, name, seed, is_quick=is_quick): (name, seed) for name, seed in tasks}
        for future in as_completed(futures):
            name, seed = futures[future]
            if future.exception():
                pool.shutdown(cancel_futures=True)
            of_seeds[name].append(future.result())
            done += cost[name]
            elapsed = (time.monotonic() - began) / 60
            left = elapsed * (whole / done - 1)
            print(f"{elapsed:5.1f} min, {left:.1f} left: {name}, seed {seed}", file=sys.stderr, flush=True)
            if len(of_seeds[name]) == SEEDS:
                yield name, list(rows(sorted(of_seeds.pop(name), key=lambda one: one.seed)))


if __name__ == "__main__":
    sys.exit(main())
