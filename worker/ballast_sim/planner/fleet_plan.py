"""The plan of a fleet: its premises, its options with their figures, and its reasons."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ballast_sim.planner.deployment import Deployment
from ballast_sim.replay.traffic import Arrival, Trace, excerpt, repeated

MOST_SIMULATED = 16
"""Most GPUs of a fleet that are simulated, with their part of the traffic."""
FEWEST_REQUESTS = 20
"""Fewest online requests of a simulation, unless one of today's online GPUs has fewer."""
FEWEST_APART, FEWEST_MIXED = "apart, fewest", "mixed, fewest"


@dataclass(frozen=True, slots=True)
class MaximumThroughputs:
    """The maximum throughput of one GPU with one kind of lengths, in tokens per second."""

    online_full: float
    """Online lengths in full batches without an SLO: a utilization of 100 % for online."""
    offline_full: float
    """Offline lengths in full batches."""
    offline_bound: float
    """Offline lengths with every step within the TPOT: the maximum while online decodes are resident."""

    @property
    def bound_share(self) -> float:
        """Share of a GPU's throughput that remains with steps within the TPOT."""
        return self.offline_bound / self.offline_full


@dataclass(frozen=True, slots=True)
class Option:
    """One fleet that serves the traffic."""

    name: str
    gpus: int
    utilization: float
    mfu: float
    ttft_attainment: float
    tpot_attainment: float
    online_tokens: float
    """Tokens per second over all GPUs."""
    offline_tokens: float
    dollars_per_hour: float
    online_dollars: float
    """Dollars per million tokens."""
    offline_dollars: float
    kilowatts: float
    note: str = ""
    step_share: float = 0.0
    """Share of the TPOT to which mixed steps are filled."""

    @property
    def kilowatt_hours(self) -> float:
        """Kilowatt hours per million tokens of both classes."""
        return per_million(self.kilowatts, self.online_tokens + self.offline_tokens)


@dataclass(frozen=True, slots=True)
class FleetTraffic:
    """The online traffic of a part of a fleet: of at most `MOST_SIMULATED` of today's online GPUs."""

    part: float
    """The simulated share of the traffic."""
    online: Trace
    seconds: float
    """Length of a simulation."""
    tokens: float
    """Tokens per second of the whole fleet."""
    source: str
    """Sentence about the load and the rows of the trace."""
    least: float = 0.0
    """Smallest share of `online` that a simulation has. GPUs with less of it get it, too, so that latency is known."""

    def of(self, simulated: int, gpus: int) -> list[Arrival]:
        """Return the traffic of `simulated` of `gpus` GPUs: an evenly spaced part of the requests, or repeated ones."""
        kept, rate = max(simulated / gpus / self.part, self.least), self.tokens * simulated / gpus
        if kept > 1:
            return excerpt(repeated(self.online, rate * self.seconds), rate, self.seconds)
        return [a for i, a in enumerate(self.online) if int((i + 1) * kept) > int(i * kept)]


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The plan of a fleet, with its premises and reasons."""

    deployment: Deployment
    traffic: FleetTraffic
    maximums: MaximumThroughputs
    offline_tokens: float
    work: float
    """Work of both classes, in GPUs at 100 %."""
    batch_ceiling: int
    batch_ceiling_because: str
    options: tuple[Option, ...]
    because: tuple[str, ...]
    offline: Sequence[Arrival]
    """Offline requests that fit the context of the model."""

    @property
    def mixed(self) -> Option | None:
        """The option with the fewest mixed GPUs that do the work; None without one."""
        return next((option for option in self.options if option.name.startswith(FEWEST_MIXED)), None)


def per_million(per_hour: float, tokens_per_second: float) -> float:
    """Convert an amount per hour into the amount per million tokens."""
    return per_hour / 3600 / tokens_per_second * 1e6 if tokens_per_second else 0.0
