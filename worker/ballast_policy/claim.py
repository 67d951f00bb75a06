"""Which job the feeder claims items of next, in the same order as requests in the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from ballast_policy.fairness import Ledger
from ballast_policy.order import ranking


@dataclass(frozen=True, slots=True)
class Candidate:
    """A job as the claim sees it."""

    job_id: str
    tenant: str
    priority: int
    laxity: float
    """Seconds, from `laxity`, as of now."""
    prefix_group: int
    seq: float
    """Time or number of its submission; earlier goes first."""
    waiting: int
    """Items that could be claimed now."""


def choose(candidates: Sequence[Candidate], ledger: Ledger) -> Candidate | None:
    """Pick the job whose items go next; None if no job has an item to give."""
    rank = ranking(ledger)
    return min(
        (candidate for candidate in candidates if candidate.waiting > 0),
        key=lambda candidate: (rank(candidate), candidate.job_id),
        default=None,
    )


def laxity(deadline: float | None, now: float, remaining_items: int, rate: float | None) -> float:
    """Give the seconds a job can lose before its deadline is at risk: `deadline - now - remaining_items / rate`.

    `rate` is items per second over all workers. Without one (nothing finished yet) the work counts as none: the
    deadline alone orders the jobs. Without a deadline the laxity is infinite.
    """
    if deadline is None:
        return inf
    work = remaining_items / rate if rate else 0.0
    return deadline - now - work
