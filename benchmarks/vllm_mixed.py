"""Compare Ballast inside vLLM with vLLM's priorities, on the same arrivals and the same vLLM.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_mixed.py [--load 20,40,60] [--caps] [--quick]

Online requests follow the Azure conversation trace, at rates that take a share of the tokens per second of offline
alone. All lengths are divided by `--scale`. Offline work never runs out. The model is a Llama with random weights in
float32. `LLMEngine` computes in this process, without HTTP.

The SLO is 1.25 times the p99 of online alone at the same load. The sides are online alone; vLLM's priorities with its
default settings; priorities with two settings of `max_num_seqs` and the token budget; and Ballast. The settings are
chosen on another part of the trace, of those that lose at most one point of attainment there: the one with most offline
tokens, and the one that attains most. The best of them is that with most offline tokens of those that lose at most one
point here, too. With `--caps`,
the sides are online alone in plain vLLM and in Ballast, and Ballast with caps on interference. A request attains the
SLO if both its TTFT and its TPOT do.

All times are CPU time of the computing thread, and vLLM and Ballast see the same clock, so other work on the machine
counts little. The speed of a machine still changes within minutes. So the slices of the trace are cut into short parts,
and all sides run a part before the next part. Within a part they take turns of two seconds. Before each turn, plain
vLLM computes a fixed number of requests. The longer these take, the slower the clocks run, so the load stays the same.
The SLO is from an earlier run of online alone over all parts. When nothing is left to do, time jumps to the next
request. With `--clock wall`, as a GPU needs it, times are those of the wall, and sides run a part one after the other.
Each side has a process of its own.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count, pairwise, product
from math import inf
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from replay import Clock, azure, machine, parser, percentile, write
from replay.random_llama import bytes_llama, make_model
from replay.side_process import SideProcess, send_result
from replay.turns import TURN, Pace, in_turns, wait_for_turn
from replay.vllm_engine import BALLAST, BUDGET, PLAIN, PRIORITIES, SCHEDULERS, UNBOUNDED, Feed, VllmEngine, backlog

from ballast_sim.replay.traffic import Arrival

SEQS, BUDGETS = (1, 2, 4), (2048, 256, 64)
"""Settings that are tried for vLLM's priorities: divisors of `max_num_seqs`, and tokens per step."""
SLACK = 1.25
LOSS = 0.01
"""Most attainment that a setting may lose against online alone."""
TUNING, TUNING_START = 342, 3000
"""Requests of another slice on which settings are tuned, and on which Ballast learns the cost of a step."""
CAP_WARM = 4
"""Times `TUNING` that a side with a cap runs before its first row: its feedback needs about a minute."""
PACED = 64
"""Online requests that plain vLLM computes before each turn, all at once. Their time sets the pace of the clocks."""
PART, PARTS = 171, 4
"""Online requests of a part, and the parts of a slice of the trace. Slices begin 1,000 requests apart."""
CAPPED = {f"Ballast, cap of {cap:.0%}": {"max_interference": cap} for cap in (0.10, 0.25)}
"""Sides with Ballast of `--caps`, and the settings in which they differ."""
SIDES = ("offline alone", "online alone", PRIORITIES, BALLAST)
MOST_TUNED = 2
"""Most settings of vLLM's priorities that are compared at a load."""
MEMORY = 0.9 / (len(SIDES) + max(MOST_TUNED, len(CAPPED)))
"""Share of a GPU's memory for each engine, so that all of them fit at the same time."""


@dataclass(frozen=True)
class Setup:
    """What all sides share."""

    model: str
    dtype: str
    slots: int
    scale: float
    longest: int
    """Most tokens of prompt and answer. Longer requests of the trace are cut to it."""
    clock: str


@dataclass
class Run:
    """What a process shall replay: part of the trace at a rate, under one setting."""

    name: str
    start: int = 0
    count: int = 0
    tokens_per_second: float = 0.0
    seconds: float = 0.0
    """Length of a run without online requests."""
    fills: bool = True
    seqs: int | None = None
    """None: as many as there are slots."""
    budget: int = BUDGET
    policy: dict[str, Any] | None = None
    turn: float = inf
    """Seconds after which the process waits until it is its turn again."""


@dataclass
class Found:
    """The result of a run, or of several pooled runs. Times are in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    """The TPOT of the same requests; 0 for an answer of one token."""
    online_tokens: int = 0
    offline_tokens: int = 0
    seconds: float = 0.0
    """Until the last online request arrived; until its answer if all arrived at once."""
    measured: list[float] = field(default_factory=list)
    """Inflation under a cap that Ballast measured itself at the end of each pooled run, as a fraction."""

    def pool(self, other: Found) -> None:
        """Add another run."""
        self.measured += other.measured
        self.ttft += other.ttft
        self.tpot += other.tpot
        self.online_tokens += other.online_tokens
        self.offline_tokens += other.offline_tokens
        self.seconds += other.seconds

    def attainment(self, ttft: float, tpot: float) -> float:
        """Return the share of requests that meet both."""
        met = [a <= ttft and b <= tpot for a, b in zip(self.ttft, self.tpot, strict=True)]
        return sum(met) / len(met)


def part(trace: Sequence[Arrival], run: Run) -> list[Arrival]:
    """Return the arrivals of a run, from time 0."""
    rows = [trace[(run.start + i) % len(trace)] for i in range(run.count)]
    gaps = [max(0.0, b.seconds - a.seconds) for a, b in pairwise(rows)]
    tokens = sum(row.num_prompt + row.num_output for row in rows)
    stretch = tokens / run.tokens_per_second / sum(gaps)
    at, found = 0.0, []
    for row, gap in zip(rows, [*gaps, 0.0], strict=True):
        found.append(Arrival(at, row.num_prompt, row.num_output))
        at += gap * stretch
    return found


class WallClock:
    """The time of the wall."""

    def __init__(self) -> None:
        self._now = time.monotonic

    def __call__(self) -> float:
        return self._now()

    def jump(self, seconds: float) -> None:
        """Sleep."""
        time.sleep(seconds)


# One process: an engine that replays runs


class Side:
    """An engine of vLLM, with or without Ballast, and the traffic."""

    def __init__(self, clock: Clock | WallClock, setup: Setup, side: str) -> None:
        self.vllm = VllmEngine(
            clock, setup.model, side if side in SCHEDULERS else PLAIN, slots=setup.slots, longest=setup.longest + 32,
            dtype=setup.dtype, enforce_eager=setup.clock == "cpu", gpu_memory_utilization=MEMORY,
        )  # fmt: skip
        self.slots = setup.slots
        self.trace = azure(20_000, scale=setup.scale, longest=setup.longest)
        random = Random(5)
        self.offline = (random.choice(self.trace) for _ in count())

    def run(self, run: Run) -> Found:
        """Replay one run."""
        scheduler = self.vllm.scheduler
        if run.policy is not None:
            scheduler.ballast_configure(run.policy)
        else:
            scheduler.max_num_active_reqs = run.seqs or self.slots
            scheduler.max_num_scheduled_tokens = run.budget
        online = part(self.trace, run) if run.count else []
        last = online[-1].seconds if online else run.seconds
        feed = backlog(self.slots) if run.fills else Feed()
        replayed = self.vllm.replay(
            online,
            self.offline,
            feed,
            seconds=run.seconds,
            pause=wait_for_turn(self.vllm.clock),
            pause_seconds=run.turn,
        )
        return Found(
            ttft=[answer.ttft for answer in replayed.online],
            tpot=[answer.tpot for answer in replayed.online],
            online_tokens=replayed.online_tokens,
            offline_tokens=replayed.offline_tokens(last),
            seconds=last or max(answer.last for answer in replayed.online),
            measured=[scheduler.driver.host.interference.inflation] if run.policy is not None else [],
        )


def replay_runs(side: str, setup: Setup) -> None:
    """Read runs from the input, and print the result of each."""
    clock = Clock() if setup.clock == "cpu" else WallClock()
    time.monotonic = clock  # before vLLM and Ballast read it
    engine = Side(clock, setup, side)
    warm = Run("warm", seconds=8.0, policy=UNBOUNDED if side == BALLAST else None)
    engine.run(warm)
    for line in sys.stdin:
        send_result(asdict(engine.run(Run(**json.loads(line)))))


# The process that compares


class Process(SideProcess):
    """A side in a process of its own."""

    def __init__(self, side: str, setup: Setup) -> None:
        super().__init__(__file__, "--side", side, "--setup", json.dumps(asdict(setup)))

    def run(self, run: Run) -> Found:
        """Replay one run there, without turns."""
        return Found(**self.replay(asdict(run)))


def started(side: str, setup: Setup) -> Process:
    """Start a side, and wait until it is ready.

    No side loads its model while another one is measured, or finds out how much memory of a GPU is left.
    """
    process = Process(side, setup)
    process.run(Run("ready", seconds=0.1))
    return process


class Turns:
    """Lets processes replay runs, in turns if their clocks follow the pace of the machine."""

    def __init__(self, setup: Setup) -> None:
        """Start plain vLLM, which measures the pace and what offline work alone reaches."""
        self.plain = started("offline alone", setup)
        self._pace = Pace(self._measure) if setup.clock == "cpu" else None

    def _measure(self) -> float:
        return self.plain.run(Run("pace", TUNING_START, PACED, inf, fills=False)).seconds

    def run(self, process: Process, run: Run) -> Found:
        """Replay one run."""
        return self.run_all({run.name: (process, run)})[run.name]

    def run_all(self, runs: Mapping[str, tuple[Process, Run]]) -> dict[str, Found]:
        """Replay the runs of several processes."""
        if self._pace is None:
            return {name: process.run(run) for name, (process, run) in runs.items()}
        for process, run in runs.values():
            process.begin(asdict(replace(run, turn=TURN)))
        found = in_turns({name: process for name, (process, _) in runs.items()}, self._pace)
        return {name: Found(**result) for name, result in found.items()}

    def close(self) -> None:
        """Print the pace, and end plain vLLM."""
        if self._pace is not None:
            print(f"\n{self._pace.spread()}")
        self.plain.close()


HEADER = (
    f"{'side':32}{'TTFT p50':>10}{'p99':>9}{'added':>7}{'TPOT p50':>10}{'p99':>9}{'added':>7}{'met':>8}"
    f"{'offline/s':>11}{'of alone':>10}{'total/s':>9}"
)


def row(name: str, found: Found, alone: Found, slo: tuple[float, float], ceiling: float) -> dict[str, Any]:
    """Print one row, and return its figures."""
    figures: dict[str, Any] = {"side": name, "online_requests": len(found.ttft)}
    for what in ("ttft", "tpot"):
        for share in (50, 99):
            value = percentile(getattr(found, what), share)
            figures[f"{what}_p{share}_ms"] = 1e3 * value
            figures[f"{what}_p{share}_added"] = value / percentile(getattr(alone, what), share) - 1
    figures["attainment"] = found.attainment(*slo)
    measured = found.measured
    figures["measured_inflation"] = median(measured) if measured else 0.0
    figures["offline_tokens_per_s"] = found.offline_tokens / found.seconds
    figures["total_tokens_per_s"] = (found.offline_tokens + found.online_tokens) / found.seconds
    print(
        f"{name:32}{figures['ttft_p50_ms']:7.0f} ms{figures['ttft_p99_ms']:6.0f} ms{figures['ttft_p99_added']:+7.0%}"
        f"{figures['tpot_p50_ms']:7.1f} ms{figures['tpot_p99_ms']:6.1f} ms{figures['tpot_p99_added']:+7.0%}"
        f"{figures['attainment']:8.1%}{figures['offline_tokens_per_s']:11,.0f}"
        f"{figures['offline_tokens_per_s'] / ceiling:10.0%}{figures['total_tokens_per_s']:9,.0f}"
        + (f"  Ballast measured {min(measured):+.0%} to {max(measured):+.0%}" if any(measured) else ""),
        flush=True,
    )
    return figures


def compare(asked: argparse.Namespace, setup: Setup) -> dict[str, Any]:
    """Measure every side at every load."""
    each = 60 if asked.quick else PART
    tuning = min(TUNING, each)
    loads = [float(text) / 100 for text in asked.load.split(",")]
    wanted = [each] if asked.quick else [int(text) for text in asked.requests.split(",")]
    names = ("online alone", "Ballast") if asked.caps else SIDES[1:]
    turns = Turns(setup)
    sides = {side: started(side, setup) for side in names}
    offline = turns.run(sides["online alone"], Run("offline alone", seconds=5.0 if asked.quick else 60.0))
    ceiling = offline.offline_tokens / offline.seconds
    print(f"Offline alone: {ceiling:,.0f} tokens/s.")
    rows: list[dict[str, Any]] = []
    for load, number in zip(loads, [*wanted, *wanted[-1:] * len(loads)], strict=False):
        rate = load * ceiling
        begins = starts(-(-number // each), each)

        def runs(name: str, rate: float = rate, begins: Sequence[int] = begins, **setting: Any) -> list[Run]:
            return [Run(name, begin, each, rate, **setting) for begin in begins]

        first = Found()
        for run in runs("online alone", fills=False):
            first.pool(turns.run(sides["online alone"], run))
        slo = (SLACK * percentile(first.ttft, 99), SLACK * percentile(first.tpot, 99))
        promise = f"TTFT {1e3 * slo[0]:.0f} ms, TPOT {1e3 * slo[1]:.1f} ms"
        print(f"\nLoad {load:.0%}, {promise}, {len(begins) * each} online requests for each row\n{HEADER}")
        cases = [("online alone", sides["online alone"], runs("online alone", fills=False))]
        if not asked.caps:
            cases.append(("priorities", sides["priorities"], runs("priorities")))
            for seqs, budget in best(turns, sides, Run("tuning", TUNING_START, tuning, rate), slo, setup.slots):
                name = f"priorities, {seqs} seqs, {budget} tokens"
                cases.append((name, started("priorities", setup), runs(name, seqs=seqs, budget=budget)))
        policy: dict[str, Any] = {"ttft": slo[0], "tpot": slo[1]}
        if asked.caps:
            turns.run(sides["Ballast"], Run("warm", TUNING_START, tuning, rate, fills=False, policy=policy))
            name = "online alone in Ballast"
            cases.append((name, sides["Ballast"], runs(name, fills=False, policy=policy)))
        warm = CAP_WARM * tuning if asked.caps and not asked.quick else tuning
        for name, setting in (CAPPED if asked.caps else {"Ballast": {}}).items():  # each learns from its own turns only
            process = started("Ballast", setup) if setting else sides["Ballast"]
            # Ballast learns the cost of steps with online and offline work.
            turns.run(process, Run("warm", TUNING_START, warm, rate, policy=policy | setting))
            cases.append((name, process, runs(name, policy=policy | setting)))
        pooled = {name: Found() for name, _, _ in cases}
        for turn in range(len(begins)):
            for name, found in turns.run_all({name: (process, runs[turn]) for name, process, runs in cases}).items():
                pooled[name].pool(found)
        for _, process, _ in cases:
            if process not in sides.values():
                process.close()
        figures = [row(name, found, pooled["online alone"], slo, ceiling) for name, found in pooled.items()]
        rows += [{"load_percent": 100 * load, **each_row} for each_row in figures]
        if not asked.caps:
            alone, plain, *tuned, ballast = figures
            goals(alone, plain, tuned, ballast)
    for side in sides.values():
        side.close()
    turns.close()
    return {"offline_alone_tokens_per_s": ceiling, "rows": rows}


def starts(num_parts: int, each: int) -> list[int]:
    """Return the first request of each part. The first parts of all slices go first; tuning has a slice of its own."""
    slices = [1000 * k for k in range(num_parts + 1) if 1000 * k != TUNING_START][: max(1, num_parts // PARTS)]
    return [slices[part % len(slices)] + each * (part // len(slices)) for part in range(num_parts)]


def best(
    turns: Turns, sides: dict[str, Process], tuning: Run, slo: tuple[float, float], slots: int
) -> list[tuple[int, int]]:
    """Return settings of vLLM's priorities that lose at most one point on another part, or the one that loses least.

    The first has the most offline tokens, the second the highest attainment there. They may be the same.
    """
    alone = turns.run(sides["online alone"], replace(tuning, fills=False)).attainment(*slo)
    tried = {}
    for seqs, budget in product((slots // divisor for divisor in SEQS), BUDGETS):
        found = turns.run(sides["priorities"], replace(tuning, seqs=seqs, budget=budget))
        tried[seqs, budget] = found.offline_tokens, found.attainment(*slo)
    most = max(tried, key=lambda setting: (tried[setting][1] >= alone - LOSS, tried[setting][0]))
    safest = max(tried, key=lambda setting: (tried[setting][1], tried[setting][0]))
    good = [most, safest] if tried[most][1] >= alone - LOSS else [safest]
    return list(dict.fromkeys(good))[:MOST_TUNED]


def goals(alone: dict[str, Any], plain: dict[str, Any], tuned: list[dict[str, Any]], ballast: dict[str, Any]) -> None:
    """Print what Ballast adds and loses beside priorities, and its tokens beside the best setting."""
    added = [found["ttft_p99_ms"] - alone["ttft_p99_ms"] for found in (ballast, plain)]

    def lost(found: dict[str, Any]) -> float:
        return alone["attainment"] - found["attainment"]

    best = max(tuned, key=lambda found: (lost(found) <= LOSS, found["offline_tokens_per_s"]))
    tokens = ballast["offline_tokens_per_s"] / max(1.0, best["offline_tokens_per_s"])
    no = "" if lost(best) <= LOSS else "No setting loses at most one point. "
    print(
        f"{ballast['side']} adds {added[0]:.0f} ms to the p99 of TTFT, priorities {added[1]:.0f} ms (goal: at most a "
        f"third). It loses {100 * lost(ballast):.1f} points of attainment (goal: 1). {no}It has {tokens:.0%} of the "
        f"offline tokens of {best['side']}, which loses {100 * lost(best):.1f} points (goal: 85 % of one that loses 1)."
    )


def main() -> int:
    """Compare, or replay one side."""
    options = parser(__doc__)
    options.set_defaults(model=None)
    options.add_argument("--load", default="20,40,60", help="percent of the tokens per second of offline alone")
    options.add_argument("--caps", action="store_true", help="compare Ballast with caps instead")
    options.add_argument("--requests", default="2052,2052,4104", help="online requests of each row, by load")
    options.add_argument("--scale", type=float, default=16.0, help="divisor of the lengths")
    options.add_argument("--hidden", type=int, default=384, help="width of the model")
    options.add_argument("--layers", type=int, default=6)
    options.add_argument("--dtype", default="float32")
    options.add_argument("--slots", type=int, default=128, help="default of `vllm serve` on a CPU: 128")
    options.add_argument("--longest", type=int, default=480, help="most tokens of a request")
    options.add_argument("--clock", choices=("cpu", "wall"), default="cpu")
    options.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options.add_argument("--setup", help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.side is not None:
        replay_runs(asked.side, Setup(**json.loads(asked.setup)))
        return 0
    about = machine()
    with tempfile.TemporaryDirectory() as folder:
        model = asked.model or make_model(Path(folder), bytes_llama(asked.hidden, asked.layers))
        begin = time.monotonic()
        setup = Setup(str(model), asked.dtype, asked.slots, asked.scale, asked.longest, asked.clock)
        found = compare(asked, setup)
    print(f"\n{(time.monotonic() - begin) / 60:.0f} min")
    write(asked.json, {"machine": about, **found})
    return 0


if __name__ == "__main__":
    sys.exit(main())
