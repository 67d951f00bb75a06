"""An encoder on one GPU: one latency SLO from arrival to answer, the batch that it allows, and the batch window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

from ballast_policy.learning.cost import attended
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.arrivals import constant, generate
from ballast_sim.deployment import Ballast
from ballast_sim.errors import Impossible
from ballast_sim.simulation import Scenario, simulate
from ballast_sim.step_model import BatchWork, Roofline, profile
from ballast_sim.traffic import Arrival

MOST_BATCH = 4096


@dataclass(frozen=True, slots=True)
class EncoderLimit:
    """The largest batch within the latency, and what it brings."""

    batch: int
    seconds: float
    """Of one step with that batch."""
    because: str

    @property
    def requests_per_second(self) -> float:
        """With batches always full."""
        return self.batch / self.seconds


def batch_seconds(model: Roofline, batch: int, prompt: int) -> float:
    """Time of one step over a batch of prompts."""
    return model.seconds(BatchWork(batch * prompt, batch * attended(0, prompt), 0, 0, 0, batch))


@dataclass(frozen=True, slots=True)
class Promise:
    """What an encoder's requests are promised, and how long a batch is collected."""

    latency: float
    """Seconds from arrival to answer."""
    share: float = 0.95
    """Of the requests that must keep it."""
    window: float = 0.0
    """Seconds that the first request of a batch waits for others, unless the batch is full."""


def encoder_limit(model: Roofline, prompt: int, promise: Promise, most: int = MOST_BATCH) -> EncoderLimit:
    """Find the batch that the latency allows: `share * max(window, step) + step <= latency`.

    A request comes at any moment of a step, or of a window, and waits for its end and then for its own step.

    Raises:
        Impossible: not even a batch of one fits.
    """

    def slowest(batch: int) -> float:
        step = batch_seconds(model, batch, prompt)
        return promise.share * max(promise.window, step) + step

    one = batch_seconds(model, 1, prompt)
    if slowest(1) > promise.latency:
        waits = "one such step" if one >= promise.window else f"the batch window of {1e3 * promise.window:g} ms"
        raise Impossible(
            f"a latency of {1e3 * promise.latency:g} ms is below the fastest answer: {model.shape.name} takes "
            f"{1e3 * one:.1f} ms for one prompt of {prompt} tokens on one {model.gpu.name}, and a request may wait for "
            f"{waits} first: {1e3 * slowest(1):.1f} ms for {promise.share:.0%} of them"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if slowest(middle) <= promise.latency else (low, middle - 1)
    seconds = batch_seconds(model, low, prompt)
    return EncoderLimit(
        low,
        seconds,
        f"a batch of {low} prompts of {prompt} tokens takes {1e3 * seconds:.1f} ms; a newcomer waits for one and needs "
        f"another, {1e3 * slowest(low):.1f} ms of {1e3 * promise.latency:g} ms for {promise.share:.0%}",
    )


@dataclass(frozen=True, slots=True)
class Served:
    """What one GPU made of a rate of requests."""

    latency: float
    """Seconds within which the wanted share was answered."""
    mean_batch: float
    busy_share: float


def serve(
    model: Roofline, prompt: int, promise: Promise, *, rate: float, most: int, requests: int = 4000, seed: int = 0
) -> Served:
    """Simulate an encoder with a batch of at most `most` and this rate of Poisson arrivals, nothing else to do."""
    seconds = requests / rate
    config = PolicyConfig(most, 1 << 50, chunk_tokens=most * prompt, offline_share=0.0, batch_window=promise.window)
    run = simulate(
        Scenario(
            config=config,
            model=model,
            policy=Ballast,
            online=generate(constant(rate), peak=rate, seconds=seconds, lengths=[Arrival(0.0, prompt, 1)], seed=seed),
            seed=seed,
            cost=profile(model),
        )
    )
    waits = sorted(item.first_token - item.request.arrival for item in run.online)
    steps = run.replicas[0].steps
    return Served(
        latency=waits[min(len(waits) - 1, int(len(waits) * promise.share))],
        mean_batch=fmean(step.online_slots for step in steps),
        busy_share=sum(step.seconds for step in steps) / run.seconds,
    )


def highest_rate(keeps: Callable[[float], bool], high: float, precision: float = 0.02) -> float:
    """Highest rate, to a share of `high`, that keeps a promise, given that lower ones do."""
    low, step = 0.0, precision * high
    while high - low > step:
        middle = (low + high) / 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low
