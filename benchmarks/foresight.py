"""Measure the cost of the online SLO for offline work, and the value of knowing the future, in the simulator.

    python benchmarks/foresight.py --load 40,60 --reservation 0,10 --minutes 8

For each load, pooled over slices of the Azure conversations:

- `ballast` with its default, and with lower values of `most_risk`: the cost of each point of attainment in tokens.
- `reservation`: nothing is lent, so that the loss is caused by the reservation alone.
- `foresight`: Ballast at the highest risk, run several times. Each run lends nothing during the requests that missed
  their SLO in the run before, and during a growing time before them. A real policy cannot know these requests.

The loss is in points of attainment, compared with online alone on the same slice. Totals are shares of the SLO-bound
throughput.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from multiprocessing import get_context

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_policy.learning.interference import Allowance
from ballast_policy.plan import StepPlan
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_sim.comparison.bench import Bench
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.replica import Policy
from ballast_sim.replay.report import Report, report
from ballast_sim.replay.simulated import SimulatedRequest
from ballast_sim.replay.simulation import Run, simulate
from ballast_sim.replay.traffic import Trace, at_zero, excerpt, read, read_lengths, repeated

WARMUP = 60.0
RISKS = (0.05, 0.1, 0.2)
"""Accepted risks below the default of the policy."""
ROUNDS = 12
EARLIER = 3.0
"""Seconds by which each round extends the time without lending."""
ENOUGH = 0.001
"""The attainment that may be lost, as a fraction of 1."""
NOTHING = Allowance(lending_ratio=0.0)

Span = tuple[float, float]
ALWAYS: Sequence[Span] = ((-inf, inf),)


@dataclass(frozen=True)
class Withheld(Ballast):
    """Ballast without lending during some spans of time."""

    spans: Sequence[Span]

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""
        if any(begin <= snapshot.now < end for begin, end in self.spans):
            snapshot = replace(snapshot, allowance=NOTHING)
        return super().plan(snapshot)


@dataclass(frozen=True)
class Slice:
    """Some minutes of online traffic on one engine."""

    bench: Bench
    load: float
    start: float
    """The start in the trace, as a share of its length."""
    minutes: float

    def run(self, config: PolicyConfig, policy: Callable[[], Policy] = Ballast, *, has_job: bool = True) -> Run:
        """Simulate it."""
        bench = self.bench
        rate, seconds = self.load * bench.bound, 60 * self.minutes
        trace = at_zero(bench.trace[int(self.start * len(bench.trace)) :])
        scenario = bench.scenario(policy, excerpt(repeated(trace, rate * seconds), rate, seconds))
        scenario = replace(scenario, config=config, seconds=seconds, warmup_seconds=WARMUP)
        return simulate(scenario if has_job else replace(scenario, offline=list))


@dataclass(frozen=True)
class Found:
    """One row of one slice."""

    name: str
    num_online: int
    ttft_lost: float
    tpot_lost: float
    total: float
    p50_rise: float


def tpot(item: SimulatedRequest) -> float:
    """Mean time per output token after the first."""
    return (item.last_token - item.first_token) / max(item.num_output - 1, 1)


def rows(piece: Slice, config: PolicyConfig) -> list[Found]:
    """All rows of one slice."""
    alone = piece.run(config, has_job=False)
    judged = partial(judge, report(alone), bound=piece.bench.bound)
    risks = [(risk, replace(config, most_risk=risk)) for risk in (*RISKS, config.most_risk)]
    found = [judged(f"ballast, risk {risk:g}", report(piece.run(told))) for risk, told in risks]
    found.append(judged("reservation", report(piece.run(config, partial(Withheld, ALWAYS)))))
    return [*found, foresee(piece, config, alone, judged)]


def judge(alone: Report, name: str, mixed: Report, bound: float) -> Found:
    """Compare one run with online alone."""
    return Found(
        name,
        alone.num_online,
        alone.ttft_attainment - mixed.ttft_attainment,
        alone.tpot_attainment - mixed.tpot_attainment,
        mixed.total_tokens / bound,
        mixed.ttft.p50 / alone.ttft.p50 - 1,
    )


def foresee(piece: Slice, config: PolicyConfig, alone: Run, judged: Callable[[str, Report], Found]) -> Found:
    """Stop lending around requests that missed their SLO, until few do. Return the round that lost least."""
    kept = {item.request.seq for item in alone.online if tpot(item) <= config.tpot}
    spans: list[Span] = []
    best: Found | None = None
    for turn in range(ROUNDS):
        run = piece.run(config, partial(Withheld, tuple(spans)))
        found = judged("foresight", report(run))
        if best is None or found.tpot_lost < best.tpot_lost:
            best = found
        lost = [item for item in run.online if item.request.seq in kept and is_late(item, config.tpot)]
        if found.tpot_lost <= ENOUGH or not lost:
            break
        spans += [(item.first_token - EARLIER * (turn + 1), item.last_token) for item in lost]
    assert best is not None
    return best


def is_late(item: SimulatedRequest, slo: float) -> bool:
    """Return whether a request ended, but too slowly."""
    return isfinite(item.last_token) and tpot(item) > slo


def pooled(name: str, found: Sequence[Found]) -> str:
    """Print one line over all slices."""
    number = sum(row.num_online for row in found)
    ttft = sum(row.ttft_lost * row.num_online for row in found) / number
    lost = sum(row.tpot_lost * row.num_online for row in found) / number
    total = sum(row.total for row in found) / len(found)
    rise = sum(row.p50_rise for row in found) / len(found)
    each = "  ".join(f"{100 * row.tpot_lost:5.2f}/{row.total:6.1%}" for row in found)
    return f"{name:20} {100 * ttft:9.2f} {100 * lost:9.2f} {total:8.1%} {rise:+8.0%}   {each}"


def make_bench(trace: Trace, minutes: float) -> Bench:
    """Return a bench of Llama-3-8B on an A100, with TTFT 1 s, TPOT 50 ms, and no objective."""
    offline = read_lengths(OFFLINE_TRACE)
    chosen = BenchEngine.of(
        model="llama-3-8b", gpu="a100", ttft=1.0, tpot=0.05, slots=256, chunk_tokens=512, online=trace, offline=offline
    )
    config = replace(chosen.config, objective=0.0)  # backing off would hide what lending costs
    return Bench(trace, offline, config, chosen.model, 60 * minutes, num_layers=chosen.num_layers)


def percents(text: str) -> list[float]:
    """Read `20,40`."""
    return [float(part) / 100 for part in text.split(",")]


def main() -> None:
    """Print every table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=percents, default=[0.2, 0.4, 0.6], metavar="PERCENT,...")
    parser.add_argument("--reservation", type=percents, default=[0.0, 0.1], metavar="PERCENT,...")
    parser.add_argument("--minutes", type=float, default=8.0, help="length of each slice, without the first minute")
    parser.add_argument("--slices", type=int, default=4)
    args = parser.parse_args()
    bench = make_bench(read(ONLINE_TRACE), args.minutes)
    print(f"SLO-bound throughput {bench.bound:,.0f} tokens/s; {args.slices} slices of {args.minutes:g} minutes")
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        for load in args.load:
            pieces = [Slice(bench, load, i / args.slices, args.minutes) for i in range(args.slices)]
            for reservation in args.reservation:
                told = replace(bench.config, offline_share=reservation)
                found = list(pool.map(rows, pieces, [told] * len(pieces)))
                print(
                    f"\nLoad {load:.0%}, reservation {reservation:.0%}, {sum(f[0].num_online for f in found)} requests"
                )
                print(f"{'':20} TTFT lost TPOT lost    total  p50 rise   each slice: TPOT lost/total")
                for row in zip(*found, strict=True):
                    print(pooled(row[0].name, row), flush=True)


if __name__ == "__main__":
    main()
