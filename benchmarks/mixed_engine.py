"""Compare Ballast with baselines on the real CPU engine, in a small version of the table of `ballast bench mixed`.

    python benchmarks/mixed_engine.py [--load 20,40] [--seconds N] [--turns N] [--model DIR] [--json FILE] [--quick]

Online requests follow the Azure conversation trace, and offline requests have the arXiv lengths. All lengths are
divided by `--scale`. The engine has the model that ships with Ballast, and there is no HTTP: one thread submits
requests, and one computes. Online requests arrive at the times of the trace, also during a step. Offline work never
runs out.

A load is a share of the SLO-bound throughput, which is measured first: offline alone with every step within the TPOT.
All policies run alternately on the same engine and requests, as replacements of the engine's planner. The prefix cache
and the counters start empty. Tokens count when they are computed for the first time. Repetitions are pooled.

All times are CPU time of the computing thread, and the engine uses the same clock, so other work on the machine does
not count. When nothing is left to do, time jumps to the next request.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from random import Random

from engine_integrity import check_integrity
from replay import Clock, machine, parser, percentile, scaled, write

from ballast_cli.demo.traffic import OFFLINE_TRACE, ONLINE_TRACE
from ballast_engine.build import build_engine
from ballast_engine.engine import BallastEngine
from ballast_engine.options import EngineOptions
from ballast_engine.request import GenerationRequest, SamplingParams
from ballast_policy.host import Planner
from ballast_policy.plan import StepPlan
from ballast_policy.request import RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan
from ballast_sim.comparison.baselines import PEERS
from ballast_sim.replay.policies import Fill, held_to
from ballast_sim.replay.traffic import Arrival, excerpt, read, read_lengths

LONGEST = 481
"""Prompt and answer have fewer tokens. Longer requests of the traces are cut."""
ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE


def requests(arrivals: Iterator[Arrival], request_class: RequestClass, seed: int) -> Iterator[GenerationRequest]:
    """Return requests of these lengths, with tokens drawn from the seed."""
    random = Random(seed)
    for number, arrival in enumerate(arrivals):
        yield GenerationRequest(
            request_id=f"{request_class} {number}",
            prompt=tuple(random.choices(range(5, 4000), k=arrival.num_prompt)),
            sampling=SamplingParams(temperature=0.0, max_tokens=arrival.num_output, ignore_eos=True),
            request_class=request_class,
            stream=request_class is ONLINE,
        )


@dataclass
class Outcome:
    """The result of one run, or of several pooled runs. Times are in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    tokens: dict[RequestClass, int] = field(default_factory=lambda: dict.fromkeys(RequestClass, 0))
    suspended: int = 0
    seconds: float = 0.0

    def pool(self, other: Outcome) -> None:
        """Add another run."""
        self.ttft += other.ttft
        self.tpot += other.tpot
        self.suspended += other.suspended
        self.seconds += other.seconds
        for request_class, tokens in other.tokens.items():
            self.tokens[request_class] += tokens


@dataclass
class Bench:
    """One engine, one SLO, one traffic."""

    engine: BallastEngine
    clock: Clock
    config: PolicyConfig
    online: list[Arrival]
    offline: list[Arrival]

    def run(self, planner: Planner, online: list[Arrival], seconds: float, seed: int, *, fills: bool) -> Outcome:
        """Replay `seconds` of traffic. With `fills`, twice as many offline requests as slots are present."""
        engine = self.engine
        engine.reset()
        engine.host.planner = planner
        pool = requests((self.offline[i % len(self.offline)] for i in count(97 * seed)), OFFLINE, seed)
        asked_requests = [
            one for one in zip(online, requests(iter(online), ONLINE, seed), strict=True) if one[0].seconds < seconds
        ]
        first: dict[str, float] = {}
        last: dict[str, tuple[float, int]] = {}
        clock = self.clock
        begin = clock()
        thread = threading.Thread(target=self._ask, args=(asked_requests, begin))
        thread.start()
        while clock() - begin < seconds:
            for _ in range(self.config.slots * 2 - engine.stats().offline.waiting if fills else 0):
                engine.submit(next(pool))
            before = engine.last_step
            outputs = engine.step()
            now = clock() - begin
            if engine.last_step is before and not engine.is_suspended:
                clock.jump(0.0002)  # nothing could run
                time.sleep(0.0002)  # for the thread that submits
            for output in outputs:
                if output.request_id.startswith("online"):
                    assert not output.error, output.error
                    first.setdefault(output.request_id, now)
                    last[output.request_id] = (now, output.num_output)
        stats, elapsed = engine.stats(), clock() - begin
        thread.join()
        self._clear()
        found = Outcome(suspended=stats.suspended_steps, seconds=elapsed)
        for request_class in RequestClass:
            of = stats.of(request_class)
            found.tokens[request_class] = of.prefill_tokens + of.decode_tokens
        for arrival, request in asked_requests:
            name = request.request_id
            # A request that waits at the end has waited at least this long.
            found.ttft.append(first.get(name, elapsed) - arrival.seconds)
            at, num = last.get(name, (0.0, 0))
            if num > 1:
                found.tpot.append((at - first[name]) / (num - 1))
        return found

    def _ask(self, asked_requests: list[tuple[Arrival, GenerationRequest]], begin: float) -> None:
        for arrival, request in asked_requests:
            while self.clock() < begin + arrival.seconds:
                time.sleep(0.0005)
            self.engine.submit(replace(request, arrival=begin + arrival.seconds))

    def _clear(self) -> None:
        """Give back all requests in flight."""
        engine = self.engine
        while engine.has_work:
            if not engine.is_suspended:
                engine.give_back(list(engine.requests))
            engine.step()
        check_integrity(engine)


def without_suspension(seen: EngineSnapshot) -> StepPlan:
    """Return the plan for an engine that cannot suspend steps."""
    return plan(replace(seen, config=replace(seen.config, can_suspend=False)))


def planners(config: PolicyConfig) -> dict[str, Callable[[], tuple[Planner, bool]]]:
    """Return each policy, and whether it runs with offline work."""
    return {
        "online-only": lambda: (Fill(config.chunk_tokens).plan, False),
        "naive-priority": lambda: (PEERS["naive-priority"](config).plan, True),
        "greedy": lambda: (PEERS["greedy"](config).plan, True),
        "ballast-no-suspension": lambda: (without_suspension, True),
        "ballast": lambda: (plan, True),
    }


def report(name: str, found: Outcome, alone: Outcome, config: PolicyConfig, bound: float) -> dict[str, float]:
    """Print one row, and return its figures."""
    row: dict[str, float] = {}
    for what, values, promise in (("ttft", found.ttft, config.ttft), ("tpot", found.tpot, config.tpot)):
        row |= {f"{what}_p{share}_ms": 1e3 * percentile(values, share) for share in (50, 95, 99)}
        row[f"{what}_attainment"] = sum(value <= promise for value in values) / len(values)
    row["offline_tokens_per_s"] = found.tokens[OFFLINE] / found.seconds
    row["total_tokens_per_s"] = sum(found.tokens.values()) / found.seconds
    row["suspended_steps"] = found.suspended
    rise = [percentile(found.ttft, share) / percentile(alone.ttft, share) - 1 for share in (50, 99)]
    print(
        f"{name:22}{row['ttft_p50_ms']:7.0f} ms {rise[0]:+6.0%} {row['ttft_p99_ms']:6.0f} ms {rise[1]:+6.0%} "
        f"{row['ttft_attainment']:7.1%}  {row['tpot_p50_ms']:5.1f} ms {row['tpot_p99_ms']:5.1f} ms "
        f"{row['tpot_attainment']:7.1%}  {row['offline_tokens_per_s']:9,.0f} {row['total_tokens_per_s']:8,.0f} "
        f"{row['total_tokens_per_s'] / bound:8.0%} {found.suspended:9}",
        flush=True,
    )
    return row


HEADER = (
    f"{'policy':22}{'TTFT p50':>10} {'alone':>6} {'p99':>9} {'alone':>6} {'met':>7}  "
    f"{'TPOT p50':>8} {'p99':>8} {'met':>7}  {'offline/s':>9} {'total/s':>8} {'of bound':>8} {'suspended':>9}"
)


def main() -> int:
    """Measure the maximum throughputs, then every policy at every load."""
    options = parser(__doc__)
    options.add_argument("--load", default="20,40", help="percent of the SLO-bound throughput")
    options.add_argument("--seconds", type=float, default=30.0, help="length of each run")
    options.add_argument("--turns", type=int, default=3)
    options.add_argument("--scale", type=float, default=8.0, help="divisor of the lengths")
    options.add_argument("--ttft-ms", type=float, default=300.0)
    options.add_argument("--tpot-ms", type=float, default=15.0)
    options.add_argument("--slots", type=int, default=32)
    asked = options.parse_args()
    seconds, turns = (10.0, 1) if asked.quick else (asked.seconds, asked.turns)
    about = machine()
    policy = {"chunk_tokens": 256, "ttft": asked.ttft_ms / 1e3, "tpot": asked.tpot_ms / 1e3}
    clock = Clock()
    engine = build_engine(
        EngineOptions(directory=asked.model, slots=asked.slots, threads=1, max_model_len=LONGEST + 31),
        PolicyConfig(slots=asked.slots, num_blocks=1, offline_share=0.0, **policy),
        clock=clock,
    )
    config = engine.policy
    trace, lengths = (
        scaled(each, asked.scale, longest=LONGEST) for each in (read(ONLINE_TRACE), read_lengths(OFFLINE_TRACE))
    )
    bench = Bench(engine, clock, config, trace, lengths)
    maximums = {}
    for name, step in (("unbounded", inf), ("SLO-bound", config.tpot)):
        planner = held_to(step, config.chunk_tokens).plan
        alone = [bench.run(planner, [], seconds, seed, fills=True) for seed in range(turns)]
        maximums[name] = max(found.tokens[OFFLINE] / found.seconds for found in alone)
        print(f"Offline alone, {name}: {maximums[name]:,.0f} tokens/s")
    bound = maximums["SLO-bound"]
    rows = []
    for load in (float(part) / 100 for part in asked.load.split(",")):
        found: dict[str, Outcome] = {name: Outcome() for name in planners(config)}
        for turn in range(turns):
            online = excerpt(trace[turn * 97 :], load * bound, seconds)
            online = [replace(one, seconds=one.seconds - online[0].seconds) for one in online]
            for name, make in planners(config).items():
                planner, fills = make()
                found[name].pool(bench.run(planner, online, seconds, turn, fills=fills))
        rate = len(found["ballast"].ttft) / found["ballast"].seconds
        print(
            f"\nLoad {load:.0%} ({rate:.1f} requests/s), TTFT {asked.ttft_ms:g} ms, TPOT {asked.tpot_ms:g} ms\n{HEADER}"
        )
        for name, outcome in found.items():
            row = report(name, outcome, found["online-only"], config, bound)
            rows.append({"policy": name, "load_percent": 100 * load, **row})
    write(asked.json, {"machine": about, "maximum_tokens_per_s": maximums, "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main())
