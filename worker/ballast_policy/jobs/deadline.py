"""Predicts whether a job meets its deadline, at submission and while it waits and runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import inf


class Verdict(StrEnum):
    """The prediction. `Outlook` of the queue has the same values."""

    YES = "yes"
    """At the measured rates the job is done in time, beside all other jobs."""
    AT_RISK = "at_risk"
    """Alone the job would be done in time; beside other jobs perhaps not."""
    NO = "no"
    """Even alone, the job is not done in time."""
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Rates:
    """Offline work of all workers of a queue together, per second; 0 if not measured."""

    items: float = 0.0
    output_tokens: float = 0.0


@dataclass(frozen=True, slots=True)
class JobWork:
    tenant: str
    priority: int
    deadline: float | None
    items: int
    output_tokens: int = 0
    """Tokens that its items are expected to generate; 0 if unknown."""


@dataclass(frozen=True, slots=True)
class Feasibility:
    verdict: Verdict
    seconds_left: float
    seconds_needed: float | None = None
    """Upper bound, as long as rates, queue and estimates do not change; None if no rate is known."""
    seconds_ahead: float = 0.0
    """The part of `seconds_needed` that other jobs take."""


def feasible(
    job: JobWork, others: Iterable[JobWork], rates: Rates, now: float, weights: Mapping[str, float] | None = None
) -> Feasibility:
    """Compare the time a job needs with the time it has.

    `needed = higher + min(own / share, own + beside)`: higher priorities go first. Within a priority, a tenant gets at
    least the share of its weight, and everything once the others are done. Within a tenant, jobs that are due earlier
    or have less slack go first. All are seconds of all workers (`seconds_of`).
    """
    left = inf if job.deadline is None else job.deadline - now
    itself = seconds_of(job, rates)
    if itself is None:
        return Feasibility(Verdict.UNKNOWN, left)
    by_rate = (job.items, rates.items), (job.output_tokens, rates.output_tokens)
    alone = min([amount / rate for amount, rate in by_rate if rate and amount], default=0.0)
    higher, own, beside = 0.0, itself, 0.0
    tenants = {job.tenant}
    for other in others:
        if other.priority < job.priority or not other.items:
            continue
        seconds = seconds_of(other, rates)
        if seconds is None:
            return Feasibility(Verdict.UNKNOWN, left)
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
    return Feasibility(verdict, left, needed, needed - itself)


def seconds_of(work: JobWork, rates: Rates) -> float | None:
    """Return the time that work takes with all workers to itself; None if no rate is known.

    The expected output tokens count at their rate, or the items if none are known.
    """
    if not work.items:
        return 0.0
    if work.output_tokens and rates.output_tokens > 0:
        return work.output_tokens / rates.output_tokens
    return work.items / rates.items if rates.items > 0 else None


def _goes_first(other: JobWork, job: JobWork, more_seconds: float) -> bool:
    """Return whether a job of the same tenant that takes `more_seconds` longer is due earlier or has less slack."""
    due, own = (inf if work.deadline is None else work.deadline for work in (other, job))
    return due - max(0.0, more_seconds) <= own
