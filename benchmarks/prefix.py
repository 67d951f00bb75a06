"""Measure the cost of prompts that the prefix cache saves if requests share a system prompt.

    python benchmarks/prefix.py [--model DIR] [--requests N] [--shared N] [--own N] [--json FILE] [--quick]

Both sides run alternately: the same requests with and without the cache. The cost of prompts is the number of computed
tokens, and the time of the steps that computed prompts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np
from replay import build, drive, machine, parser, write

from ballast_engine.engine import BallastEngine
from ballast_engine.request import Output
from ballast_sim.replay.traffic import Arrival

SIDES = {"with cache": True, "without": False}


class Timed:
    """Adds up the seconds that an engine spends in steps with prompts."""

    def __init__(self, engine: BallastEngine) -> None:
        self.seconds = 0.0
        self._step: Callable[[], list[Output]] = engine.step
        self._engine = engine
        engine.step = self  # type: ignore[method-assign,assignment]  # the driver calls it as it calls the engine's

    def __call__(self) -> list[Output]:
        outputs = self._step()
        if self._engine.last_step.num_prefill:
            self.seconds += self._engine.last_step.seconds
        return outputs


def main() -> int:
    """Run both sides and print them."""
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=64)
    options.add_argument("--shared", type=int, default=512, help="tokens of the system prompt")
    options.add_argument("--own", type=int, default=64, help="tokens that each request adds")
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    count, rounds = (16, 1) if asked.quick else (asked.requests, asked.rounds)
    about = machine()
    engines = {name: build(asked.model, slots=16, prefix_cache=is_on) for name, is_on in SIDES.items()}
    timed = {name: Timed(engine) for name, engine in engines.items()}
    found: dict[str, dict[str, list[float]]] = {
        name: {"prompt_tokens_computed": [], "prompt_seconds": [], "ttft_mean_seconds": []} for name in SIDES
    }
    for turn in range(rounds):
        shared = np.random.default_rng(turn + 500).integers(5, 4000, asked.shared).tolist()
        for name, engine in engines.items():
            tokens, seconds = engine.stats().online.prefill_tokens, timed[name].seconds
            seen, _ = drive(engine, [Arrival(0.0, asked.own, 4)] * count, seed=turn, prefix=shared)
            found[name]["prompt_tokens_computed"].append(engine.stats().online.prefill_tokens - tokens)
            found[name]["prompt_seconds"].append(timed[name].seconds - seconds)
            found[name]["ttft_mean_seconds"].append(sum(one.first for one in seen) / count)

    figures: dict[str, Any] = {name: {k: median(v) for k, v in values.items()} for name, values in found.items()}
    print(
        f"{count} requests at once, {asked.shared} shared and {asked.own} other prompt tokens, {rounds} rounds, medians"
    )
    print(f"{'':28}{'with cache':>14}{'without':>14}{'saved':>9}")
    for key in figures["without"]:
        ours, theirs = figures["with cache"][key], figures["without"][key]
        print(f"{key:28}{ours:14.4g}{theirs:14.4g}{1 - ours / theirs:9.1%}")
    stats = engines["with cache"].stats()
    print(f"hit rate of the prefix cache {stats.prefix_hit_tokens / stats.prefix_query_tokens:.1%}")
    write(asked.json, {"machine": about, "requests": count, **figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
