"""Latencies of the online requests of a run: percentiles, attainment, and attainment by prompt length."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import ceil, isnan, nan
from typing import NamedTuple


class RequestLatency(NamedTuple):
    """The latencies of one online request of the measured part of a run."""

    num_prompt: int
    ttft: float
    """Seconds. For a request without a first token, the time that it has waited at the end of the run."""
    tpot: float
    """Seconds; nan if the request has not finished, or has only one output token."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a latency in seconds. They are nan if nothing was measured."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Compute nearest-rank percentiles."""
        ordered = sorted(values)
        if not ordered:
            return cls(nan, nan, nan)
        return cls(*(ordered[ceil(len(ordered) * share) - 1] for share in (0.50, 0.95, 0.99)))


@dataclass(frozen=True, slots=True)
class Third:
    """Attainment of the requests whose prompts are of similar length."""

    shortest: int
    """Tokens of the shortest prompt."""
    longest: int
    num_online: int
    ttft_attainment: float
    tpot_attainment: float


@dataclass(frozen=True, slots=True)
class Lost:
    """Attainment that the worst third loses against online alone, as a fraction of 1."""

    ttft: float
    tpot: float

    @property
    def worst(self) -> float:
        """Return the larger loss; nan if neither is known."""
        return _most((self.ttft, self.tpot))


def thirds(answers: Sequence[RequestLatency], *, ttft: float, tpot: float) -> tuple[Third, ...]:
    """Group requests by prompt length, and compute the attainment of each group.

    The requests are cut at a third and at two thirds of their number, ordered by prompt length. Prompts of equal length
    stay together, so groups can be uneven, and fewer than three. With three lengths or fewer, each length is a group:
    a few long prompts among many short ones do not disappear in a third.
    """
    lengths = sorted(answer.num_prompt for answer in answers)
    cuts = sorted(set(lengths))
    if len(cuts) > 3:
        cuts = sorted({lengths[-(-turn * len(lengths) // 3) - 1] for turn in (1, 2)})
    groups: list[list[RequestLatency]] = [[] for _ in range(len(cuts) + 1)]
    for answer in answers:
        groups[bisect_left(cuts, answer.num_prompt)].append(answer)
    return tuple(
        Third(
            shortest=min(answer.num_prompt for answer in group),
            longest=max(answer.num_prompt for answer in group),
            num_online=len(group),
            ttft_attainment=ttft_attainment(group, ttft),
            tpot_attainment=tpot_attainment(group, tpot),
        )
        for group in groups
        if group
    )


def worst_lost(mixed: Sequence[Third], alone: Sequence[Third]) -> Lost:
    """Return the most attainment that a third loses; nan if the groups differ because the traffic does."""
    pairs = list(zip(mixed, alone, strict=True)) if len(mixed) == len(alone) else []
    return Lost(
        _most(theirs.ttft_attainment - ours.ttft_attainment for ours, theirs in pairs),
        _most(theirs.tpot_attainment - ours.tpot_attainment for ours, theirs in pairs),
    )


def ttft_attainment(answers: Iterable[RequestLatency], slo: float) -> float:
    """Compute the share of the requests whose first token came within the SLO; nan without requests."""
    return share([answer.ttft <= slo for answer in answers])


def tpot_attainment(answers: Iterable[RequestLatency], slo: float) -> float:
    """Compute the share of the requests with a TPOT that kept the SLO; nan without such requests."""
    return share([answer.tpot <= slo for answer in answers if not isnan(answer.tpot)])


def share(met: Sequence[bool]) -> float:
    """Compute the share that is true; nan if there is nothing to judge."""
    return sum(met) / len(met) if met else nan


def _most(losses: Iterable[float]) -> float:
    return max((lost for lost in losses if not isnan(lost)), default=nan)
