"""Generate traffic without a trace: arrival times from a seed, lengths drawn from a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import log, sqrt
from random import Random

from ballast_sim.errors import BadInput
from ballast_sim.replay.traffic import Arrival


def bursts(quiet: float, *, every: float, lasting: float) -> Callable[[float], float]:
    """Return a share of the highest rate by time: 1 in the first `lasting` of every `every` seconds, `quiet` later."""
    return lambda now: 1.0 if now % every < lasting else quiet


def generate(
    rate: float,
    *,
    seconds: float,
    lengths: Sequence[Arrival],
    seed: int,
    share: Callable[[float], float] = lambda _: 1.0,
) -> list[Arrival]:
    """Draw Poisson arrivals at `rate` per second, or at a `share` of it by time, each with lengths from the pool.

    BadInput is raised if a figure is out of range, or no request arrives.
    """
    if rate <= 0 or seconds <= 0:
        raise BadInput(f"the rate and the time must be above 0, found {rate:g} requests/s for {seconds:g} s")
    random = Random(seed)
    arrivals = []
    now = random.expovariate(rate)
    while now < seconds:
        if random.random() < share(now):
            arrivals.append(replace(random.choice(lengths), seconds=now))
        now += random.expovariate(rate)
    if not arrivals:
        raise BadInput(f"no request arrives in {seconds:g} s at this rate: raise the rate or the time")
    return arrivals


def lognormal_answers(
    num_prompt: int, *, mean: float, deviation: float, most: int, number: int, seed: int
) -> list[Arrival]:
    """Draw offline lengths: one prompt length, and answers from a lognormal distribution that is cut at `most`."""
    variance = log(1 + (deviation / mean) ** 2)
    random = Random(seed)
    drawn = (random.lognormvariate(log(mean) - variance / 2, sqrt(variance)) for _ in range(number))
    return [Arrival(0.0, num_prompt, min(most, max(1, int(answer)))) for answer in drawn]
