"""Compare batch ceilings from latency SLOs: computed, and found by trying sizes. Measure the effect of a batch window.

The program prints three tables:

- Each case of the planner's inputs, with batch sizes around its ceiling: computed, with a million newcomers drawn one
  by one, and with a few thousand requests that the policy serves in the simulator (its 99th percentile is accurate to
  about a hundredth). The exit code is 1 if the first two give different ceilings.
- The ceiling by prompt length and rate.
- A small encoder at several rates, with batch windows of 0, 10 and 20 ms.

Run: `python benchmarks/ceilings.py` (minutes).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from statistics import fmean

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import Impossible
from ballast_sim.planner.batch_ceiling import CeilingCase, drawn, largest
from ballast_sim.planner.encoder import EncoderSlo, encoder_limit
from ballast_sim.planner.inputs import EngineInput, PlanInputs
from ballast_sim.replay.arrivals import generate
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.model_shape import SHAPES
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import BatchWork, Roofline, StepModel, profile
from ballast_sim.replay.traffic import Arrival


def measured(case: CeilingCase, batch: int, requests: int = 2000, seed: int = 0) -> float:
    """Simulate a policy that keeps the batch full, and return the seconds within which the share is answered."""
    seconds = max(10.0 * case.step(batch, 0), requests / case.rate)
    online = generate(case.rate, seconds=seconds, lengths=[Arrival(0.0, case.prompt, 1)], seed=seed)
    filler = Arrival(0.0, case.prompt, 1) if case.is_encoder else Arrival(0.0, 1, 1 << 40)
    tokens = batch * case.prompt if case.is_encoder else 1 << 30
    run = simulate(
        Scenario(
            config=PolicyConfig(slots=batch, num_blocks=1 << 50, chunk_tokens=tokens, offline_share=0.0),
            model=_AtContext(case.step_model, case.context),
            policy=lambda: Fill(chunk_tokens=tokens, is_parking=True, kv_watermark=0.0),
            online=online,
            offline=lambda: [SimulatedJob.endless("filler", [filler])],
            seconds=seconds,
            seed=seed,
            cost=profile(case.step_model),
        )
    )
    waits = sorted(min(item.first_token, inf) - item.request.arrival for item in run.online)
    return waits[min(len(waits) - 1, int(len(waits) * case.share))]


@dataclass(frozen=True, slots=True)
class _AtContext:
    """A step model with one context for all decodes, as the computed ceiling has."""

    step_model: StepModel
    context: int

    def predict(self, work: BatchWork) -> float:
        """Return the time of one step."""
        return self.step_model.predict(replace(work, decode_context=work.num_decode * self.context))


@dataclass(frozen=True, slots=True)
class Served:
    """The result of one GPU at a rate of requests."""

    latency: float
    """Seconds within which the wanted share is answered."""
    mean_batch: float
    busy_share: float


def serve(
    model: Roofline, prompt: int, slo: EncoderSlo, *, rate: float, most: int, requests: int = 4000, seed: int = 0
) -> Served:
    """Simulate an encoder with a batch of at most `most` and Poisson arrivals at a rate, without offline work."""
    seconds = requests / rate
    config = PolicyConfig(most, 1 << 50, chunk_tokens=most * prompt, offline_share=0.0, batch_window=slo.window)
    run = simulate(
        Scenario(
            config=config,
            model=model,
            policy=Ballast,
            online=generate(rate, seconds=seconds, lengths=[Arrival(0.0, prompt, 1)], seed=seed),
            seed=seed,
            cost=profile(model),
        )
    )
    waits = sorted(item.first_token - item.request.arrival for item in run.online)
    steps = run.replicas[0].steps
    return Served(
        latency=waits[min(len(waits) - 1, int(len(waits) * slo.share))],
        mean_batch=fmean(step.online_slots for step in steps),
        busy_share=sum(step.seconds for step in steps) / run.seconds,
    )


def highest_rate(keeps: Callable[[float], bool], high: float, precision: float = 0.02) -> float:
    """Bisect for the highest rate up to `high` that keeps the SLO, to a share of `high`."""
    low, step = 0.0, precision * high
    while high - low > step:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


def sweep(case: CeilingCase, requests: int, most_drawn: int) -> bool:
    """Print batch sizes around the ceiling; return whether drawn newcomers give the computed ceiling."""
    print(f"\n{case.name}: {1e3 * case.seconds:g} ms for {case.share:.0%}, prompts of {case.prompt}, {case.rate:g}/s")
    print("batch  computed     drawn  simulated by the policy, ms")
    ceiling = case.ceiling().batch
    for batch in range(max(2, ceiling - 3), ceiling + 4):
        seconds = (case.slowest(batch), drawn(case, batch, most_drawn), measured(case, batch, requests))
        print(f"{batch:5} " + " ".join(f"{1e3 * one:9.2f}" for one in seconds))
    found = largest(case, partial(drawn, case, requests=most_drawn), near=ceiling)
    print(f"ceiling: {ceiling} computed, {found} by trying sizes on {most_drawn:,} newcomers drawn")
    return found == ceiling


def lengths_and_rates(case: CeilingCase) -> None:
    """Print the ceiling by prompt length and rate."""
    rates = [case.rate * factor for factor in (0.25, 0.5, 1, 2, 4)]
    print(f"\n{case.name}: ceiling by prompt length (rows) and requests/s (columns); 0: no batch meets the SLO")
    print("prompt " + "".join(f"{rate:8g}" for rate in rates))
    for factor in (0.5, 0.75, 1, 1.25, 1.5):
        prompt = round(case.prompt * factor)
        print(f"{prompt:6} " + "".join(f"{_ceiling(replace(case, prompt=prompt, rate=rate)):8}" for rate in rates))


def _ceiling(case: CeilingCase) -> int:
    try:
        return case.ceiling().batch
    except Impossible:
        return 0


def windows(prompt: int, requests: int) -> None:
    """Print the effect of a batch window on a small encoder, and the highest rate within the latency."""
    model = Roofline(SHAPES["bge-base"], GPUS["a100"])
    print(f"\nbge-base on a100, prompts of {prompt}, 30 ms for 95%: a batch window of 0, 10 and 20 ms")
    print("req/s   " + "".join(f"{f'{window} ms: p95  batch  busy':>28}" for window in (0, 10, 20)))
    promises = [EncoderSlo(0.030, 0.95, window / 1e3) for window in (0, 10, 20)]
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
    parser.add_argument("--requests", type=int, default=3000, help="requests to simulate for each figure")
    parser.add_argument("--drawn", type=int, default=1_000_000, help="newcomers to draw for each figure")
    asked = parser.parse_args()
    is_found = True
    inputs = PlanInputs(engine=EngineInput(api_server_milliseconds=0))  # the GPU alone
    for entry in inputs.ceilings:
        case = CeilingCase.of(inputs, entry)
        lengths_and_rates(case)
        is_found &= sweep(case, asked.requests, asked.drawn)
    windows(256, asked.requests)
    sys.exit(0 if is_found else 1)


if __name__ == "__main__":
    main()
