"""Whether a job meets its deadline: asked at submission, and again while it waits and runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Verdict(StrEnum):
    """The answer, and the label it is counted under."""

    YES = "yes"
    """At the measured rates it is done in time, whatever the others' share of them."""
    AT_RISK = "at_risk"
    """Alone it would be done in time; with what goes before it or beside it, perhaps not."""
    NO = "no"
    """Alone, at the measured rates, it is not done in time."""
    UNKNOWN = "unknown"
    """No rate was measured: nothing is promised and nothing refused."""


@dataclass(frozen=True, slots=True)
class Rates:
    """What all workers of a queue do of offline work together, per second; 0 is not measured."""

    items: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class JobWork:
    """What is left to do of a job."""

    tenant: str
    priority: int
    deadline: float | None
    """On the clock of `now`."""
    items: int
    output_tokens: int = 0
    """Most that its items may generate; 0 where it is not known."""


@dataclass(frozen=True, slots=True)
class Feasibility:
    """A verdict and its figures; None where they are unknown."""

    verdict: Verdict
    seconds_left: float
    seconds_needed: float | None = None
    """At most, as long as the rates and what is in the queue stay as they are."""
    seconds_alone: float | None = None
    """With all workers to itself."""
    seconds_ahead: float = 0.0
    """The part of what is needed that higher priorities, other tenants and the tenant's own jobs take."""


def feasible(
    job: JobWork, others: Iterable[JobWork], rates: Rates, now: float, weights: Mapping[str, float] | None = None
) -> Feasibility:
    """Compare the time a job needs with the time it has.

    `needed = higher + min(own / share, own + beside)`: higher priorities go first; within the priority a tenant gets
    at least its weight's share, and everything once the others are done; within the tenant come first the jobs that
    are due earlier or have less slack. All in seconds of all workers: most output tokens at the measured rate, or
    items where no bound of their tokens is known.
    """
    left = inf if job.deadline is None else job.deadline - now
    itself = seconds_of(job, rates)
    if itself is None:
        return Feasibility(Verdict.UNKNOWN, left)
    known = [
        (done / rate)
        for done, rate in ((job.items, rates.items), (job.output_tokens, rates.output_tokens))
        if rate and done
    ]
    alone = min(known, default=0.0)
    higher, own, beside = 0.0, itself, 0.0
    tenants = {job.tenant}
    for other in others:
        if other.priority < job.priority or not other.items:
            continue
        seconds = seconds_of(other, rates)
        if seconds is None:
            return Feasibility(Verdict.UNKNOWN, left, seconds_alone=alone)
        if other.priority > job.priority:
            higher += seconds
        elif other.tenant != job.tenant:
            beside += seconds
            tenants.add(other.tenant)
        elif _goes_first(other, job, seconds - itself):
            own += seconds
    weight = weights or {}
    share = weight.get(job.tenant, 1.0) / sum(weight.get(tenant, 1.0) for tenant in tenants)
    needed = higher + min(own / share, own + beside)
    verdict = Verdict.YES if needed <= left else Verdict.NO if alone > left else Verdict.AT_RISK
    return Feasibility(verdict, left, needed, alone, needed - itself)


def seconds_of(work: JobWork, rates: Rates) -> float | None:
    """Return the time that work takes with all workers to itself; None if no rate for it is known."""
    if not work.items:
        return 0.0
    if work.output_tokens and rates.output_tokens > 0:
        return work.output_tokens / rates.output_tokens
    return work.items / rates.items if rates.items > 0 else None


def _goes_first(other: JobWork, job: JobWork, more_seconds: float) -> bool:
    """Tell whether a job of the same tenant is due earlier or can lose less time, `more_seconds` the longer one."""
    if other.deadline is None or job.deadline is None:
        return other.deadline is not None or job.deadline is None
    return other.deadline - max(0.0, more_seconds) <= job.deadline
