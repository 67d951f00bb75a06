"""Workloads of `ballast bench mixed --setting`: online requests with their own times, and an SLO.

- sparse: one short request every few seconds. GPUs are idle, and no step may delay the next request much.
- long-prompts: many short prompts and a few long ones. The first token of a long prompt takes most of the SLO by
  itself.
- bursts-from-silence: bursts at the highest rate that the engine can serve, each after 100 s without a request.

All three have the offline work of llm-d's batch benchmark: prompts of 512 tokens, and answers of 500 on average.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil

from ballast_sim.comparison.bench import FITTED, STATIC_BUDGET, STATIC_CHUNKS, Bench
from ballast_sim.comparison.engine import BenchEngine
from ballast_sim.replay.arrivals import bursts, generate, lognormal_answers
from ballast_sim.replay.simulation import warmup_of
from ballast_sim.replay.traffic import Arrival, Trace

BOUND_TPOT = 0.05
"""TPOT of the SLO-bound throughput. Offline tokens are shares of offline alone with every step within it."""
CAPPED_SLO = (1.0, 0.05)
"""TTFT and TPOT for Ballast in a row with a cap: the defaults of the command."""
EVERY = (0.5, 2.0, 10.0)
"""Seconds between two sparse requests."""
SILENCE_SECONDS, BURST_SECONDS, BURST_RATE = 100.0, 20.0, 12.0
OURS = ("ballast", FITTED)
CAPPED = ("ballast=25", f"{FITTED}=25", "ballast=10", f"{FITTED}=10")
SHOWN_BUDGETS = tuple(f"{STATIC_BUDGET}={ms}x512" for ms in (20, 25, 30, 35))
BUDGETS = tuple(
    f"{STATIC_BUDGET}={ms:g}x{chunk}"
    for chunk in STATIC_CHUNKS
    for ms in (*(16 + turn / 2 for turn in range(12)), *range(22, 36), 37.5, 40, 45, 50)
)
"""Static budgets among which the best one is searched."""


@dataclass(frozen=True, slots=True)
class Point:
    """One table of a workload: online requests, and the SLO that judges them. Times are in seconds."""

    label: str
    online: Trace
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Points that share offline work, slots and policies."""

    name: str
    points: tuple[Point, ...]
    seconds: float
    offline: Sequence[Arrival]
    slots: int = 128
    policies: tuple[str, ...] = ("online-only", *OURS)
    """Rows of the tables."""
    budgets: tuple[str, ...] = ()
    """Static budgets that are also run. The best of them is the goal of Ballast."""

    def bench(self, point: Point, engine: BenchEngine) -> Bench:
        """Return the bench of one point."""
        return Bench(
            point.online,
            self.offline,
            engine.config,
            engine.model,
            self.seconds,
            num_layers=engine.num_layers,
            warmup_seconds=warmup_of(self.seconds),
            maximum_seconds=min(900.0, 3 * self.seconds),
            is_paced=True,
            bound_tpot=BOUND_TPOT,
            capped_slo=CAPPED_SLO,
        )

    def judged_by(self, *, ttft: float | None = None, tpot: float | None = None) -> Workload:
        """Return the workload with another SLO. Equal points become one."""
        points = (replace(point, ttft=ttft or point.ttft, tpot=tpot or point.tpot) for point in self.points)
        return replace(self, points=tuple(dict.fromkeys(points)))


def offline_lengths(seed: int) -> tuple[Arrival, ...]:
    """Draw the offline work."""
    return tuple(lognormal_answers(512, mean=500, deviation=400, most=2048, number=1000, seed=seed))


def sparse(*, seconds: float | None = None, seed: int = 0, every: Sequence[float] = EVERY) -> Workload:
    """Make requests of 512 tokens every few seconds, evenly spaced. The seed draws the offline work alone."""
    seconds = seconds or 300.0
    points = []
    for spacing in every:
        online = [Arrival(turn * spacing, 512, 128) for turn in range(ceil(seconds / spacing))]
        points.append(Point(f"a request every {spacing:g} s", tuple(online), 0.1, 0.03))
    return Workload(
        "sparse",
        tuple(points),
        seconds,
        offline_lengths(seed),
        policies=("online-only", *SHOWN_BUDGETS, *OURS, *CAPPED),
        budgets=BUDGETS,
    )


def long_prompts(*, seconds: float | None = None, seed: int = 0) -> Workload:
    """Make two requests of 400 tokens per second and one of 8,000 per 10 s (Poisson), with two SLOs of the TTFT."""
    seconds = seconds or 1800.0
    short = generate(2.0, seconds=seconds, lengths=[Arrival(0.0, 400, 128)], seed=2 * seed)
    long = generate(0.1, seconds=seconds, lengths=[Arrival(0.0, 8000, 128)], seed=2 * seed + 1)
    online = tuple(sorted((*short, *long), key=lambda arrival: arrival.seconds))
    label = "2 requests/s of 400 tokens and 0.1 of 8,000"
    points = tuple(Point(label, online, ttft, 0.05) for ttft in (1.5, 1.0))
    return Workload("long-prompts", points, seconds, offline_lengths(seed))


def bursts_from_silence(*, seconds: float | None = None, seed: int = 0) -> Workload:
    """Make bursts of 20 s with 12 requests of 400 tokens per second (Poisson), each after 100 s of silence."""
    seconds = seconds or 1200.0
    cycle = SILENCE_SECONDS + BURST_SECONDS
    drawn = generate(
        BURST_RATE,
        share=bursts(0.0, every=cycle, lasting=BURST_SECONDS),
        seconds=max(seconds - SILENCE_SECONDS, BURST_SECONDS),
        lengths=[Arrival(0.0, 400, 128)],
        seed=seed,
    )
    online = tuple(replace(arrival, seconds=arrival.seconds + SILENCE_SECONDS) for arrival in drawn)
    label = f"bursts of {BURST_RATE:g} requests/s for {BURST_SECONDS:g} s, after {SILENCE_SECONDS:g} s of silence"
    return Workload("bursts-from-silence", (Point(label, online, 1.0, 0.05),), seconds, offline_lengths(seed))


WORKLOADS: Mapping[str, Callable[..., Workload]] = {
    "sparse": sparse,
    "long-prompts": long_prompts,
    "bursts-from-silence": bursts_from_silence,
}
"""Workloads by the name that `--setting` takes."""
