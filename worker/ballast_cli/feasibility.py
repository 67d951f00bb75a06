"""Can a job meet its deadline? Answered from the rates that workers publish; no rate, no answer. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ballast_cli.console import duration
from ballast_queue.status import WorkerStatus


@dataclass(frozen=True, slots=True)
class Work:
    """What has to be done before the deadline."""

    items: int
    output_tokens: int
    """Upper bound: the sum of the items' output limits; 0 where an item states none."""
    items_ahead: int
    """Items of other jobs that wait or run."""


@dataclass(frozen=True, slots=True)
class Feasibility:
    """`unknown` is an answer of its own: a missing signal never reads as an idle cluster."""

    verdict: Literal["yes", "no", "unknown"]
    because: str
    seconds_needed: float | None = None


def assess(work: Work, workers: Sequence[WorkerStatus], seconds_left: float) -> Feasibility:
    """Compare the time the work needs at the measured offline rates with the time there is.

    needed = output tokens / offline decode rate + items ahead / offline item rate, over all ready workers; where
    the output is unbounded, (items + items ahead) / offline item rate.
    """
    ready = [w for w in workers if w.is_ready and not w.is_draining]
    if not ready:
        return Feasibility("unknown", "no ready worker has published its rates to this queue")
    tokens_rate = sum(w.offline.decode_tokens_per_second for w in ready)
    items_rate = sum(w.offline.requests_per_second for w in ready)
    needs_items_rate = work.items_ahead > 0 or not work.output_tokens
    if (work.output_tokens and tokens_rate <= 0) or (needs_items_rate and items_rate <= 0):
        return Feasibility("unknown", f"{_workers(len(ready))} published no offline rate yet: none was measured")
    if work.output_tokens:
        ahead = work.items_ahead / items_rate if work.items_ahead else 0.0
        needed = work.output_tokens / tokens_rate + ahead
        rate = f"{tokens_rate:,.0f} offline tokens/s"
    else:
        needed = (work.items + work.items_ahead) / items_rate
        rate = f"{items_rate:,.1f} offline items/s"
    sentence = (
        f"{_workers(len(ready))} at {rate} and {work.items_ahead:,} items ahead need at most {duration(needed)} "
        f"of the {duration(seconds_left)} left"
    )
    return Feasibility("yes" if needed <= seconds_left else "no", sentence, needed)


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"
