"""Which job the feeder claims items of next, in the same order as requests in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from ballast_policy.fairness import Ledger
from ballast_policy.order import ranking
from ballast_policy.tenant_slots import TenantSlots


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job as the claim sees it."""

    job_id: str
    tenant: str
    priority: int
    laxity: float
    """Seconds, from `laxity`, as of now."""
    prefix_group: int
    """Jobs of one tenant with the same value share a prompt prefix; 0 is no group. See `in_submission_order`."""
    seq: float
    """Unix seconds of its submission; earlier goes first."""
    waiting: int
    """Items that could be claimed now."""


def in_submission_order(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Number prefix groups by the submission of their first job, in microseconds.

    Groups then go in the order in which they began, and a job without a group is a group of its own. Once the first
    job of a group is over the group stands where its next one was submitted, so that nobody is overtaken without end.
    """
    first: dict[tuple[str, int, int], float] = {}
    for candidate in candidates:
        key = (candidate.tenant, candidate.priority, candidate.prefix_group)
        first[key] = min(first.get(key, inf), candidate.seq)
    return [
        replace(candidate, prefix_group=int(1e6 * (first[key] if candidate.prefix_group else candidate.seq)))
        for candidate in candidates
        for key in [(candidate.tenant, candidate.priority, candidate.prefix_group)]
    ]


def choose(candidates: Sequence[Candidate], ledger: Ledger, slots: TenantSlots | None = None) -> Candidate | None:
    """Pick the job whose items go next; None if no job has an item to give.

    With `slots` a tenant below its reservation goes before the others of its priority. Whoever claims counts
    what was picked, in the ledger and in the slots, before it picks again.
    """
    rank = ranking(ledger)
    able = [candidate for candidate in candidates if candidate.waiting > 0]
    if slots is not None and able:
        highest = max(candidate.priority for candidate in able)
        below = slots.below({candidate.tenant for candidate in able if candidate.priority == highest})
        if below is not None:
            able = [candidate for candidate in able if (candidate.priority, candidate.tenant) == (highest, below)]
    return min(able, key=lambda candidate: (rank(candidate), candidate.job_id), default=None)


def laxity(deadline: float | None, now: float, remaining_items: int, rate: float | None) -> float:
    """Give the seconds a job can lose before its deadline is at risk: `deadline - now - remaining_items / rate`.

    `rate` is items per second over all workers. Without one (nothing finished yet) the work counts as none: the
    deadline alone orders the jobs. Without a deadline the laxity is infinite.
    """
    if deadline is None:
        return inf
    work = remaining_items / rate if rate else 0.0
    return deadline - now - work
