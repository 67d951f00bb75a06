"""Make traffic where there is no trace: arrival times from a seed, lengths drawn from a pool.

A closed loop is not a list of times: its next request comes when an answer is read. `ClosedLoop` is asked by the
simulation whenever one of its requests ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log, sqrt
from random import Random

from ballast_sim.errors import BadInput
from ballast_sim.traffic import Arrival

Rate = Callable[[float], float]
"""Requests per second at a time."""


def constant(rate: float) -> Rate:
    """Poisson arrivals at one rate."""
    return lambda _: rate


def ramp(start: float, end: float, seconds: float) -> Rate:
    """From `start` to `end` requests per second over `seconds`, then flat."""
    return lambda now: start + (end - start) * min(1.0, now / seconds)


def bursts(base: float, burst: float, *, every: float, lasting: float) -> Rate:
    """`base` requests per second, and `burst` for the first `lasting` of every `every` seconds."""
    return lambda now: burst if now % every < lasting else base


def generate(rate: Rate, *, peak: float, seconds: float, lengths: Sequence[Arrival], seed: int) -> list[Arrival]:
    """Draw Poisson arrivals whose rate follows `rate` (thinning; `peak` bounds it), each with lengths from the pool."""
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
    """Return one request of these lengths at time 0, and one each `every` seconds after it."""
    if every <= 0 or seconds <= 0:
        raise BadInput(f"the spacing and the time must be above 0, found {every:g} s for {seconds:g} s")
    return [replace(lengths, seconds=turn * every) for turn in range(ceil(seconds / every))]


def lognormal_answers(
    num_prompt: int, *, mean: float, deviation: float, most: int, number: int, seed: int
) -> list[Arrival]:
    """Draw offline lengths: one prompt length, and answers of a lognormal distribution cut off at `most`."""
    variance = log(1 + (deviation / mean) ** 2)
    random = Random(seed)
    drawn = (random.lognormvariate(log(mean) - variance / 2, sqrt(variance)) for _ in range(number))
    return [Arrival(0.0, num_prompt, min(most, max(1, int(answer)))) for answer in drawn]


@dataclass
class ClosedLoop:
    """`users` people who each send the next request a think time after the answer to the last one."""

    users: int
    think_seconds: float
    lengths: Sequence[Arrival]
    seed: int
    until: float
    _random: Random = field(init=False)

    def __post_init__(self) -> None:
        if self.users < 1 or not self.lengths:
            raise BadInput("a closed loop needs at least one user and one request to draw from")
        self._random = Random(self.seed)

    def start(self) -> list[Arrival]:
        """The first request of every user, spread over one think time."""
        first = [self._draw(self._random.uniform(0.0, self.think_seconds)) for _ in range(self.users)]
        return sorted(first, key=lambda arrival: arrival.seconds)

    def after(self, finished: float) -> Arrival | None:
        """The request that follows an answer read at `finished`; None once the loop is over."""
        seconds = finished + (self._random.expovariate(1.0 / self.think_seconds) if self.think_seconds > 0 else 0.0)
        return self._draw(seconds) if seconds < self.until else None

    def _draw(self, seconds: float) -> Arrival:
        return replace(self._random.choice(self.lengths), seconds=seconds)
