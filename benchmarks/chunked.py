"""Measure the longest stall that a long prompt causes to running answers, with and without chunked prefill.

    python benchmarks/chunked.py [--model DIR] [--decodes N] [--prompt N] [--json FILE] [--quick]

A long prompt arrives while other requests decode. The output has the longest gap between two tokens of a running
answer, by the most prompt tokens that a step may compute. All chunk sizes run alternately.
"""

from __future__ import annotations

import sys
from statistics import median

from replay import build, drive, machine, parser, write

from ballast_sim.replay.traffic import Arrival


def main() -> int:
    """Run all chunk sizes and print them."""
    options = parser(__doc__)
    options.add_argument("--decodes", type=int, default=8)
    options.add_argument("--prompt", type=int, default=1900, help="tokens of the long prompt")
    options.add_argument("--rounds", type=int, default=5)
    asked = options.parse_args()
    rounds = 2 if asked.quick else asked.rounds
    about = machine()
    engines = {
        name: build(asked.model, slots=asked.decodes + 1, policy={"chunk_tokens": chunk}, prefix_cache=False)
        for name, chunk in {"64": 64, "128": 128, "512": 512, "whole prompt": asked.prompt}.items()
    }
    stalls: dict[str, list[float]] = {name: [] for name in engines}
    usual: dict[str, list[float]] = {name: [] for name in engines}
    first: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(rounds):
        for name, engine in engines.items():
            running = [Arrival(0.0, 16, 100)] * asked.decodes
            alone, _ = drive(engine, running, seed=2 * turn)
            half = median([one.last for one in alone]) / 2
            seen, _ = drive(engine, [*running, Arrival(half, asked.prompt, 2)], seed=2 * turn + 1)
            usual[name].append(max(one.longest_gap for one in alone))
            stalls[name].append(max(one.longest_gap for one in seen[:-1]))
            first[name].append(seen[-1].first)

    print(f"{asked.decodes} answers under way, then a prompt of {asked.prompt} tokens; {rounds} rounds, medians, ms")
    print(f"{'prompt tokens in a step':26}{'longest stall':>14}{'without prompt':>16}{'its own TTFT':>14}")
    whole = median(stalls["whole prompt"])
    figures = {}
    for name in engines:
        stall, quiet, ttft = (1e3 * median(values[name]) for values in (stalls, usual, first))
        print(f"{name:26}{stall:14.1f}{quiet:16.1f}{ttft:14.1f}   {1e3 * whole / stall:.1f} times less stall")
        figures[name] = {"longest_stall_ms": stall, "without_prompt_ms": quiet, "long_prompt_ttft_ms": ttft}
    write(asked.json, {"machine": about, "prompt": asked.prompt, "by_chunk": figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
