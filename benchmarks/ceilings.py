"""Batch ceilings from latency SLOs: computed, found by trying sizes, and what a batch window does.

Three tables: each case of the planner's inputs with batch sizes around its ceiling, computed, with a million newcomers
drawn one by one, and as the policy serves a few thousand in the simulator, where a 99th percentile is good for a
hundredth (the first two must give one ceiling: exit code 1 if not); the ceiling by prompt length and rate; a small
encoder at several rates with windows of 0, 10 and 20 ms. Run: `python benchmarks/ceilings.py` (minutes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ballast_sim.ceiling import Case, drawn, largest, measured
from ballast_sim.encoder import Promise, encoder_limit, highest_rate, serve
from ballast_sim.errors import Impossible
from ballast_sim.hardware import GPUS
from ballast_sim.inputs import PlanInputs
from ballast_sim.shape import SHAPES
from ballast_sim.step_model import Roofline


def sweep(case: Case, requests: int, most_drawn: int) -> bool:
    """Batch sizes around the ceiling by all three; whether the newcomers drawn give the ceiling that was computed."""
    print(f"\n{case.name}: {1e3 * case.seconds:g} ms for {case.share:.0%}, prompts of {case.prompt}, {case.rate:g}/s")
    print("batch  computed     drawn  simulated by the policy, ms")
    ceiling = case.ceiling().batch
    for batch in range(max(2, ceiling - 3), ceiling + 4):
        seconds = (case.slowest(batch), drawn(case, batch, most_drawn), measured(case, batch, requests))
        print(f"{batch:5} " + " ".join(f"{1e3 * one:9.2f}" for one in seconds))
    found = largest(case, partial(drawn, case, requests=most_drawn), near=ceiling)
    print(f"ceiling: {ceiling} computed, {found} by trying sizes on {most_drawn:,} newcomers drawn")
    return found == ceiling


def lengths_and_rates(case: Case) -> None:
    """How far the ceiling depends on what comes in."""
    rates = [case.rate * factor for factor in (0.25, 0.5, 1, 2, 4)]
    print(f"\n{case.name}: ceiling by prompt length (rows) and requests/s (columns); 0: not even one")
    print("prompt " + "".join(f"{rate:8g}" for rate in rates))
    for factor in (0.5, 0.75, 1, 1.25, 1.5):
        prompt = round(case.prompt * factor)
        print(f"{prompt:6} " + "".join(f"{_ceiling(replace(case, prompt=prompt, rate=rate)):8}" for rate in rates))


def _ceiling(case: Case) -> int:
    try:
        return case.ceiling().batch
    except Impossible:
        return 0


def windows(prompt: int, requests: int) -> None:
    """What collecting a batch brings on a small encoder, and the highest rate within the latency."""
    model = Roofline(SHAPES["bge-base"], GPUS["a100"])
    print(f"\nbge-base on a100, prompts of {prompt}, 30 ms for 95%: a batch window of 0, 10 and 20 ms")
    print("req/s   " + "".join(f"{f'{window} ms: p95  batch  busy':>28}" for window in (0, 10, 20)))
    promises = [Promise(0.030, 0.95, window / 1e3) for window in (0, 10, 20)]
    limits = [encoder_limit(model, prompt, promise) for promise in promises]

    def run(index: int, rate: float) -> tuple[float, float, float]:
        served = serve(model, prompt, promises[index], rate=rate, most=limits[index].batch, requests=requests)
        return served.latency, served.mean_batch, served.busy_share

    for rate in (100, 300, 1000, 2000, 2500, 3000):
        figures = [run(index, rate) for index in range(3)]
        print(f"{rate:5}   " + "".join(f"{1e3 * p95:18.1f} {batch:6.1f} {busy:4.0%}" for p95, batch, busy in figures))
    for index, (limit, promise) in enumerate(zip(limits, promises, strict=True)):
        most = highest_rate(partial(_keeps, run, index), 1.5 * limit.requests_per_second)
        print(
            f"window {1e3 * promise.window:g} ms: {limit.because}; {limit.requests_per_second:,.0f} requests/s "
            f"computed, {most:,.0f} within the latency by simulation"
        )


def _keeps(run: Callable[[int, float], tuple[float, float, float]], index: int, rate: float) -> bool:
    return run(index, rate)[0] <= 0.030


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=3000, help="simulated for each figure")
    parser.add_argument("--drawn", type=int, default=1_000_000, help="newcomers drawn for each figure")
    asked = parser.parse_args()
    is_found = True
    for entry in PlanInputs().ceilings:
        case = Case.of(PlanInputs(), entry)
        lengths_and_rates(case)
        is_found &= sweep(case, asked.requests, asked.drawn)
    windows(256, asked.requests)
    sys.exit(0 if is_found else 1)


if __name__ == "__main__":
    main()
