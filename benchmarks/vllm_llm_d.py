"""Run the benchmark of llm-d's batch gateway on vLLM on a CPU: its scenarios, vLLM's priorities, and Ballast.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_llm_d.py --json found.json [--load 0.75] [--quick]
    python benchmarks/vllm_llm_d.py --draw found.json docs/images/llm-d-vllm.svg

Interactive traffic comes in cycles, as in `llm_d_protocol.py`, which replays the same in the simulator: an idle phase,
then a burst at 88 % of the rate that this engine sustains, 15 times the rate of the idle phase. The model is a Llama
with random weights in float32, and all lengths are a quarter of the published ones: prompts of 128 tokens, answers of
32, batch answers lognormal (mean 125, at most 512). With a larger model (`--hidden`, `--layers`) and shorter lengths
(`--divisor`), as many requests arrive, and steps take longer, as on a GPU. Phases last 10 s instead of 90 s. Batch work
does not run out, so every burst has batch work beside it. Prompts share no prefix.

- S0: interactive only. S1: batch requests are sent as ordinary ones, at a quarter of the sustained rate, as published.
  S6: a gateway sends a small fixed number of them at a time. All three run on vLLM's default scheduling.
- priorities: many batch requests wait in the engine, with vLLM's lower priority.
- ballast: the same requests wait. The SLO is 1.25 times the p99 of TTFT and ITL in an earlier run of S0.
- ballast-alone: the same without batch work.

The sustained rate is that of interactive requests alone which all arrive at once. Latencies are of requests that arrive
in the bursts of measured cycles: all but the first two. Those of S0 are pooled from its earlier run and the one beside
the others, because a p99 near the sustained rate varies between runs. ITL is the mean gap between two tokens of one
request. Batch tokens are those of prompts and answers in the measured cycles. Times are CPU time of the computing
thread, and jump to the next request when nothing is left to do, so other work on the machine counts little. The speed
of a machine still changes within minutes, by half and more. So each scenario has a process of its own, and they take
turns of two seconds. Before each turn, plain vLLM computes a fixed number of requests. The longer these take, the
slower the clocks run, so the load stays the same.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from math import ceil, inf, log, sqrt
from pathlib import Path
from random import Random
from typing import Any

from llm_d.picture import Column, Curve, draw
from llm_d.protocol import ALONE, ANSWER, DEVIATION, MEAN, MOST, PROMPT, SCENARIOS, UNSUSPENDED, Protocol
from replay import Clock, machine, parser, percentile, write
from replay.random_llama import bytes_llama, make_model
from replay.side_process import SideProcess, send_result
from replay.turns import TURN, Pace, in_turns, wait_for_turn
from replay.vllm_engine import BALLAST, PLAIN, PRIORITIES, UNBOUNDED, Feed, Replayed, VllmEngine, backlog

from ballast_sim.replay.traffic import Arrival

SLOTS = 128
LOAD, IDLE = 0.88, 1 / 15
"""Rate of a burst over the sustained rate, and rate of an idle phase over that of a burst."""
BATCH_LOAD = 4 / 16
"""Batch requests of S1 over the interactive requests that are sustained, both per second."""
CONCURRENCY = 10
"""Batch requests in flight of S6."""
FACTOR, SHARE = 1.25, 0.8
"""The goal: latencies over those of S0, and batch tokens over those of S1."""
PACED = 32
"""Requests that plain vLLM computes before each turn, all at once. Their time sets the pace of the clocks."""
SCHEDULER = dict.fromkeys([name for name in SCENARIOS if name != UNSUSPENDED], PLAIN) | {
    "priorities": PRIORITIES,
    "ballast-alone": BALLAST,
    "ballast": BALLAST,
}


@dataclass
class Run:
    """What a process shall replay. Without a protocol, `count` interactive requests arrive at once."""

    scenario: str
    protocol: dict[str, Any] | None = None
    count: int = 0
    batch_rate: float = 0.0
    slo: dict[str, Any] | None = None
    """Of Ballast."""


@dataclass
class Found:
    """The result of a run. Times are in seconds."""

    seconds: float = 0.0
    ttft: list[float] = field(default_factory=list)
    """Of the measured requests. The next field has the same requests."""
    itl: list[float] = field(default_factory=list)
    worst_ttft: list[float] = field(default_factory=list)
    """By second of arrival; 0 if none arrived."""
    offline_tokens: list[int] = field(default_factory=list)
    """By second."""
    measured_tokens: int = 0
    """Batch tokens in the measured cycles."""
    burst_tokens: int = 0
    """Those of them in bursts."""


# One process: an engine that replays runs


def batch(divisor: int) -> Iterator[Arrival]:
    """Yield batch requests, with the published lengths over `divisor`."""
    random = Random(1000)
    sigma = sqrt(log(1 + (DEVIATION / MEAN) ** 2))
    mu = log(MEAN) - sigma**2 / 2
    while True:
        answer = min(MOST, random.lognormvariate(mu, sigma)) / divisor
        yield Arrival(0.0, PROMPT // divisor, max(1, round(answer)))


def feed(run: Run) -> Feed:
    """Return how the batch requests of a scenario are sent."""
    if run.protocol is None or run.scenario in ALONE:
        return Feed()
    if run.scenario == "S1":
        return Feed(most=sys.maxsize, rate=run.batch_rate)
    if run.scenario == "S6":
        return Feed(most=CONCURRENCY)
    return backlog(SLOTS)


def replay(engine: VllmEngine, run: Run, divisor: int) -> Found:
    """Replay one run, with the published lengths over `divisor`."""
    protocol = Protocol(**run.protocol) if run.protocol else None
    starts = [a.seconds for a in protocol.traffic(protocol.cycles)] if protocol else [0.0] * run.count
    online = [Arrival(at, PROMPT // divisor, ANSWER // divisor) for at in starts]

    if run.slo is not None:
        engine.scheduler.ballast_configure(run.slo)
    turn = TURN if protocol is not None else inf
    return summary(
        engine.replay(online, batch(divisor), feed(run), pause=wait_for_turn(engine.clock), pause_seconds=turn),
        protocol,
    )


def summary(replayed: Replayed, protocol: Protocol | None) -> Found:
    """Return the result of a replay."""
    found = Found(seconds=max(answer.last for answer in replayed.online))
    if protocol is None:
        return found
    end = protocol.cycles * protocol.cycle_seconds
    found.worst_ttft, found.offline_tokens = [0.0] * ceil(end), [0] * ceil(end)
    for answer in replayed.online:
        second = int(answer.arrival)
        found.worst_ttft[second] = max(found.worst_ttft[second], answer.ttft)
        if is_measured(protocol, answer.arrival) and protocol.is_burst(answer.arrival):
            found.ttft.append(answer.ttft)
            found.itl.append(answer.tpot)
    for at, tokens in replayed.offline:
        if at < end:
            found.offline_tokens[int(at)] += tokens
        if is_measured(protocol, at):
            found.measured_tokens += tokens
            found.burst_tokens += tokens * protocol.is_burst(at)
    return found


def is_measured(protocol: Protocol, seconds: float) -> bool:
    """Return whether a time is in a measured cycle."""
    return protocol.warmup_cycles <= seconds // protocol.cycle_seconds < protocol.cycles


def replay_runs(scheduler: str, model: str, divisor: int) -> None:
    """Read runs from the input, and print the result of each."""
    clock = Clock()
    time.monotonic = clock  # before vLLM and Ballast read it
    longest = (PROMPT + MOST) // divisor + 32
    engine = VllmEngine(
        clock, model, scheduler, slots=SLOTS, longest=longest, dtype="float32", enforce_eager=True,
        gpu_memory_utilization=0.2,
    )  # fmt: skip
    if scheduler == BALLAST:
        engine.scheduler.ballast_configure(UNBOUNDED)
    engine.replay([], batch(divisor), backlog(SLOTS), seconds=8.0)
    for line in sys.stdin:
        send_result(asdict(replay(engine, Run(**json.loads(line)), divisor)))


# The process that compares


class Process(SideProcess):
    """An engine in a process of its own."""

    def __init__(self, scheduler: str, model: Path, divisor: int) -> None:
        super().__init__(__file__, "--scheduler", scheduler, "--model", str(model), "--divisor", str(divisor))

    def run(self, run: Run) -> Found:
        """Replay one run there."""
        return Found(**self.replay(asdict(run)))


def compare(asked: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Measure every scenario."""
    num = 10 * SLOTS // (4 if asked.quick else 1)
    plain = Process(PLAIN, model, asked.divisor)
    pace = Pace(lambda: plain.run(Run("S0", count=PACED)).seconds)
    sustained = num / plain.run(Run("S0", count=num)).seconds
    pace.measure()
    burst = asked.load * sustained
    protocol = Protocol(
        burst_rate=burst, idle_rate=IDLE * burst, phase_seconds=asked.phase, cycles=asked.cycles,
        warmup_cycles=asked.warmup,
    )  # fmt: skip
    base, measured = Run("S0", asdict(protocol), batch_rate=BATCH_LOAD * sustained), asked.cycles - asked.warmup
    print(
        f"The engine sustains {sustained:.1f} interactive requests/s. Bursts of {burst:.1f}/s, {asked.phase:g} s long, "
        f"{measured} measured cycles. S1: {base.batch_rate:.1f} batch requests/s."
    )
    sides = {scenario: Process(scheduler, model, asked.divisor) for scenario, scheduler in SCHEDULER.items()}
    for side in sides.values():
        side.run(Run("S0", count=1))  # no side loads its model or warms up beside another one
    sides["S0"].begin(asdict(base))
    alone = Found(**in_turns({"S0": sides["S0"]}, pace, report=True)["S0"])
    ttft, itl = (FACTOR * percentile(values, 99) for values in (alone.ttft, alone.itl))
    slo = {"ttft": ttft, "tpot": itl, "max_interference": None}
    print(f"SLO: TTFT {1e3 * ttft:.0f} ms, ITL {1e3 * itl:.1f} ms", flush=True)
    for scenario, side in sides.items():
        side.begin(asdict(replace(base, scenario=scenario, slo=slo if SCHEDULER[scenario] == BALLAST else None)))
    found = {name: Found(**result) for name, result in in_turns(sides, pace, report=True).items()}
    found["S0"].ttft += alone.ttft
    found["S0"].itl += alone.itl
    for side in (plain, *sides.values()):
        side.close()
    print(f"\n{pace.spread()}")
    print(HEADER)
    rows = [row(name, found, protocol) for name in SCHEDULER]
    last = rows[-1]
    print(
        f"\nBallast: TTFT p99 {last['ttft_p99_over_alone']:.2f} and ITL p99 {last['itl_p99_over_alone']:.2f} times S0 "
        f"(goal: {FACTOR:g}), with {last['tokens_of_s1']:.0%} of the batch tokens of S1 (goal: {SHARE:.0%})"
    )
    curves = {
        name: {"worst_ttft": found[name].worst_ttft, "offline_tokens": found[name].offline_tokens} for name in SCHEDULER
    }
    return {"sustained_per_s": sustained, "protocol": asdict(protocol), "slo": slo, "rows": rows, "curves": curves}


HEADER = (
    f"{'scenario':42}{'TTFT p50':>10}{'p95':>9}{'p99':>9}{'x S0':>7}{'ITL p50':>10}{'p95':>9}{'p99':>9}{'x S0':>7}"
    f"{'batch/s':>9}{'in bursts':>11}{'of S1':>7}"
)


def row(scenario: str, found: dict[str, Found], protocol: Protocol) -> dict[str, Any]:
    """Print one row, and return its figures."""
    one, alone, s1 = found[scenario], found["S0"], found["S1"]
    seconds = (protocol.cycles - protocol.warmup_cycles) * protocol.cycle_seconds
    figures: dict[str, Any] = {"scenario": scenario, "requests": len(one.ttft)}
    text = f"{f'{scenario}: {SCENARIOS[scenario]}':42}"
    for what, digits in (("ttft", 0), ("itl", 1)):
        values = [1e3 * percentile(getattr(one, what), share) for share in (50, 95, 99)]
        figures[f"{what}_ms"] = values
        figures[f"{what}_p99_over_alone"] = values[-1] / 1e3 / percentile(getattr(alone, what), 99)
        text += "".join(f"{value:{width}.{digits}f} ms" for value, width in zip(values, (7, 6, 6), strict=True))
        text += f"{figures[f'{what}_p99_over_alone']:7.2f}"
    figures["tokens_of_s1"] = one.measured_tokens / s1.measured_tokens
    figures["batch_tokens_per_s"] = one.measured_tokens / seconds
    figures["batch_tokens_per_s_in_bursts"] = 2 * one.burst_tokens / seconds
    print(
        f"{text}{figures['batch_tokens_per_s']:9,.0f}{figures['batch_tokens_per_s_in_bursts']:11,.0f}"
        f"{figures['tokens_of_s1']:7.0%}"
    )
    return figures


def draw_found(found: dict[str, Any], path: Path) -> None:
    """Draw the cycles of a run that was written with `--json`."""
    protocol = Protocol(**found["protocol"])
    title = f"{protocol.burst_rate:.1f} requests/s in bursts"
    cycles = min(protocol.cycles, protocol.warmup_cycles + 4)
    curves = [Curve(name, **figures) for name, figures in found["curves"].items()]
    draw([Column(title, protocol.phase_seconds, cycles * protocol.cycle_seconds, curves, bin=1)], path)


def main() -> int:
    """Compare, replay one side, or draw."""
    options = parser(__doc__)
    options.set_defaults(model=None)
    options.add_argument("--cycles", type=int, default=10, help="cycles, warm-up included")
    options.add_argument("--warmup", type=int, default=2, help="cycles at the start whose latencies do not count")
    options.add_argument("--phase", type=float, default=10.0, help="seconds of an idle phase and of a burst")
    options.add_argument("--load", type=float, default=LOAD, help="rate of a burst over the sustained rate")
    options.add_argument("--divisor", type=int, default=4, help="divisor of the published lengths")
    options.add_argument("--hidden", type=int, default=384, help="width of the model")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--draw", type=Path, nargs=2, metavar=("FOUND", "PICTURE"), help="draw the figures of --json")
    options.add_argument("--scheduler", choices=tuple(SCHEDULER.values()), help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.quick:
        asked.cycles, asked.warmup, asked.phase = 3, 1, 5.0
    if asked.draw is not None:
        draw_found(json.loads(asked.draw[0].read_text()), asked.draw[1])
        return 0
    if asked.scheduler is not None:
        replay_runs(asked.scheduler, str(asked.model), asked.divisor)
        return 0
    about = machine()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = compare(asked, asked.model or make_model(Path(folder), bytes_llama(asked.hidden, asked.layers)))
    print(f"\n{(time.monotonic() - begin) / 60:.0f} min")
    write(asked.json, {"machine": about, **found})
    last = found["rows"][-1]
    is_met = max(last["ttft_p99_over_alone"], last["itl_p99_over_alone"]) <= FACTOR and last["tokens_of_s1"] >= SHARE
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
