"""The choice of the jobs that the next items come from, in the order of requests in an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from ballast_policy.fairness.ledger import Ledger
from ballast_policy.fairness.order import place
from ballast_policy.fairness.tenant_slots import BelowReservation, TenantSlots
from ballast_policy.jobs.deadline import JobWork, Rates, seconds_of

LEAST_AHEAD = 2
"""Least number of prefetched items beyond the free slots: one may start while the next is claimed."""


@dataclass(frozen=True, slots=True)
class Candidate:
    job_id: str
    tenant: str
    priority: int
    slack: float
    prefix_key: int | None
    """Groups jobs of one tenant whose first items have the same prompt prefix; None if no group is known."""
    seq: float
    """Unix seconds of its submission; the earlier job goes first."""
    waiting: int
    prefix_seq: int = 0
    """Submission of the first job with its prefix key, in microseconds; see `in_submission_order`."""


def job_slack(work: JobWork, rates: Rates, now: float) -> float:
    """Return the seconds that a job can lose before its deadline is at risk: `deadline - now - work / rate`.

    The work counts as if the job had all workers to itself (`seconds_of`). Without a measured rate it counts as none,
    and the deadline alone orders the jobs. Without a deadline the slack is infinite.
    """
    return inf if work.deadline is None else work.deadline - now - (seconds_of(work, rates) or 0.0)


def in_submission_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Set `prefix_seq` of each job to the submission of the first job with its prefix key.

    Jobs with the same prefix key form a group. Groups go in the order in which they began. When the first job of a
    group is over, the group moves to the submission of its next job, so that no other group waits indefinitely.
    """
    first: dict[tuple[object, ...], float] = {}
    for job in candidates:
        first[_group(job)] = min(first.get(_group(job), inf), job.seq)
    return [replace(job, prefix_seq=int(1e6 * first[_group(job)])) for job in candidates]


def _group(job: Candidate) -> tuple[object, ...]:
    return (job.job_id,) if job.prefix_key is None else (job.tenant, job.priority, job.prefix_key)


def share_out(
    candidates: Sequence[Candidate],
    services: Mapping[str, float],
    weights: Mapping[str, float],
    *,
    count: int,
    cost: float,
    free_slots: Mapping[str, int] | None = None,
    slots: TenantSlots | None = None,
) -> dict[str, int]:
    """Return how many items to claim of each job: `count` in total, and of each tenant at most its `free_slots`.

    Each pick is charged the expected `cost` of an item. A tenant below its reservation goes first in its priority.
    """
    ledger = Ledger(weights, dict(services))
    queues: dict[tuple[int, str], list[Candidate]] = {}
    for job in sorted(candidates, key=lambda job: (place(job), job.job_id), reverse=True):  # the first job comes last
        if job.waiting > 0:
            queues.setdefault((job.priority, job.tenant), []).append(job)
    taken: dict[str, int] = {}
    left = dict(free_slots or {})
    for _ in range(count):
        heads = [queue[-1] for queue in queues.values() if queue and left.get(queue[-1].tenant, 1) > 0]
        if not heads:
            break
        job = _first(heads, ledger, slots)
        taken[job.job_id] = taken.get(job.job_id, 0) + 1
        ledger.charge(job.tenant, cost)
        if job.tenant in left:
            left[job.tenant] -= 1
        if slots is not None:
            slots.count(job.tenant)
        if taken[job.job_id] == job.waiting:
            queues[job.priority, job.tenant].pop()
    return taken


def _first(jobs: Sequence[Candidate], ledger: Ledger, slots: TenantSlots | None) -> Candidate:
    if slots is not None:
        highest = max(job.priority for job in jobs)
        tenants = {job.tenant for job in jobs if job.priority == highest}
        below = BelowReservation(slots, tenants).first(tenants)
        jobs = [job for job in jobs if (job.priority, job.tenant) == (highest, below)] or jobs
    return min(jobs, key=lambda job: (-job.priority, ledger.service(job.tenant), place(job), job.job_id))
