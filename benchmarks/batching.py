"""Compare continuous with static batching, on the lengths of real conversation traffic.

    python benchmarks/batching.py [--model DIR] [--requests N] [--slots N] [--scale X] [--json FILE] [--quick]

The benchmark has two parts, and runs both sides alternately in each. In the first part, all requests are present from
the start, and the figure is tokens per second. In the second part, requests arrive at the times of the trace, at 70 %
of the rate that continuous batching can serve, and the figure is the latency of the shorter half. Lengths are those of
the trace, divided by the printed factor. The static side is the same engine: a row that has ended is padding until the
longest row of its batch has ended. This favors the baseline: prompts are not padded, and each answer is sent as soon as
it is complete.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field, replace
from statistics import median

from replay import Seen, azure, build, drive, machine, parser, percentile, write
from replay.static_batch import build_static

from ballast_engine.build import build_engine
from ballast_engine.stats import EngineStats
from ballast_sim.replay.traffic import Arrival

LOAD = 0.7
MODES = {"continuous": build_engine, "static": build_static}


@dataclass
class Side:
    """The results of one mode, with one entry per round."""

    tokens_per_second: list[float] = field(default_factory=list)
    occupancy: list[float] = field(default_factory=list)
    mean_latency: list[float] = field(default_factory=list)
    p99_latency: list[float] = field(default_factory=list)
    mean_first: list[float] = field(default_factory=list)
    kv_wasted: float = 0.0
    """Blocks that hold no token, summed over the steps of the timed part."""
    kv_used: int = 0

    def note(self, stats: EngineStats) -> None:
        """Add the KV after a step."""
        self.kv_wasted += stats.kv_waste_ratio * stats.kv_used
        self.kv_used += stats.kv_used

    def figures(self) -> dict[str, float]:
        """Return the medians over the rounds."""
        return {
            "output_tokens_per_second": median(self.tokens_per_second),
            "slot_occupancy": median(self.occupancy),
            "short_latency_mean_seconds": median(self.mean_latency),
            "short_latency_p99_seconds": median(self.p99_latency),
            "short_ttft_mean_seconds": median(self.mean_first),
            "kv_waste_ratio": self.kv_wasted / self.kv_used,
        }


def main() -> int:
    """Run both sides and print them."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=160)
    options.add_argument("--slots", type=int, default=16)
    options.add_argument("--scale", type=float, default=8.0, help="divisor of the trace's lengths")
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    count, rounds = (60, 1) if asked.quick else (asked.requests, asked.rounds)
    about = machine()
    engines = {
        mode: build(asked.model, slots=asked.slots, maker=maker, prefix_cache=False) for mode, maker in MODES.items()
    }
    arrivals = azure(count, scale=asked.scale, longest=min(engine.max_tokens for engine in engines.values()))
    sides = {mode: Side() for mode in MODES}
    num_output = sum(arrival.num_output for arrival in arrivals)

    for turn in range(rounds):
        for mode in MODES:
            before = engines[mode].stats().steps
            _, seconds = drive(engines[mode], [replace(arrival, seconds=0.0) for arrival in arrivals], seed=turn)
            steps = engines[mode].stats().steps - before
            sides[mode].tokens_per_second.append(num_output / seconds)
            sides[mode].occupancy.append(num_output / steps / asked.slots)
    pace = LOAD * median(sides["continuous"].tokens_per_second)
    speed = pace * arrivals[-1].seconds / num_output
    timed = [replace(arrival, seconds=arrival.seconds / speed) for arrival in arrivals]
    for turn in range(rounds):
        for mode in MODES:
            seen, _ = drive(engines[mode], timed, seed=1000 + turn, after_step=sides[mode].note)
            short = shorter_half(seen, arrivals)
            sides[mode].mean_latency.append(sum(one.last for one in short) / len(short))
            sides[mode].p99_latency.append(percentile([one.last for one in short], 99))
            sides[mode].mean_first.append(sum(one.first for one in short) / len(short))

    figures = {mode: sides[mode].figures() for mode in MODES}
    print(
        f"{count} requests of the Azure conversation trace, lengths divided by {asked.scale:g}, {asked.slots} slots, "
        f"{rounds} rounds, medians; the timed part {speed:.2f} times as fast as recorded ({LOAD:.0%} load)"
    )
    print(f"{'':32}{'continuous':>12}{'static':>12}{'ratio':>8}")
    for name in figures["continuous"]:
        ours, theirs = (figures[mode][name] for mode in MODES)
        print(f"{name:32}{ours:12.4g}{theirs:12.4g}{ours / theirs:8.2f}")
    write(asked.json, {"machine": about, "requests": count, "scale": asked.scale, "speed": speed, **figures})
    return 0


def shorter_half(seen: list[Seen], arrivals: list[Arrival]) -> list[Seen]:
    """Return the requests with at most the median output."""
    limit = median([arrival.num_output for arrival in arrivals])
    return [one for one in seen if one.arrival.num_output <= limit]


if __name__ == "__main__":
    sys.exit(main())
