"""Generate traffic without a trace: arrival times from a seed, lengths drawn from a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log, sqrt
from random import Random

from ballast_sim.errors import BadInput
from ballast_sim.replay.traffic import Arrival

Rate = Callable[[float], float]
"""A function from the time to the requests per second."""


def constant(rate: float) -> Rate:
    """Return a rate that does not change."""
    return lambda _: rate


def bursts(base: float, burst: float, *, every: float, lasting: float) -> Rate:
    """Return a rate of `base`, and of `burst` in the first `lasting` of every `every` seconds."""
    return lambda now: burst if now % every < lasting else base


def generate(rate: Rate, *, peak: float, seconds: float, lengths: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Draw Poisson arrivals at a rate that is never above `peak` (by thinning), each with lengths from the pool.

    Raises:
        BadInput: the pool is empty, a figure is out of range, or no request arrives.
    """
    if not lengths:
        raise BadInput("the pool of lengths is empty: give at least one request to draw from")
    if peak <= 0 or seconds <= 0:
        raise BadInput(f"the rate and the time must be above 0, found {peak:g} requests/s for {seconds:g} s")
    random = Random(seed)
    arrivals = []
    now = random.expovariate(peak)
    while now < seconds:
        wanted = rate(now)
        if wanted > peak:
            raise BadInput(f"the rate is {wanted:g} requests/s at {now:g} s, above the stated peak of {peak:g}")
        if random.random() * peak < wanted:
            arrivals.append(replace(random.choice(lengths), seconds=now))
        now += random.expovariate(peak)
    if not arrivals:
        raise BadInput(f"no request arrives in {seconds:g} s at this rate: raise the rate or the time")
    return arrivals


def evenly(lengths: Arrival, *, every: float, seconds: float) -> list[Arrival]:
    """Return one request of these lengths at time 0, and one every `every` seconds after it."""
    if every <= 0 or seconds <= 0:
        raise BadInput(f"the spacing and the time must be above 0, found {every:g} s for {seconds:g} s")
    return [replace(lengths, seconds=turn * every) for turn in range(ceil(seconds / every))]


def lognormal_answers(
    num_prompt: int, *, mean: float, deviation: float, most: int, number: int, seed: int
) -> list[Arrival]:
    """Draw offline lengths: one prompt length, and answers from a lognormal distribution that is cut at `most`."""
    variance = log(1 + (deviation / mean) ** 2)
    random = Random(seed)
    drawn = (random.lognormvariate(log(mean) - variance / 2, sqrt(variance)) for _ in range(number))
    return [Arrival(0.0, num_prompt, min(most, max(1, int(answer)))) for answer in drawn]
