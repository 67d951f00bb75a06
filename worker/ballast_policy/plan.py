"""The decision for one step, as a value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import repeat
from typing import NamedTuple

from ballast_policy.request import Request


class Reason(StrEnum):
    """Why a request was treated as it was in one step; the metric label and the answer of `ballast explain`."""

    ONLINE_FIRST = "online_first"
    OFFLINE_RESERVATION = "offline_reservation"
    LENT = "lent"
    """Took capacity that another class reserves and does not use."""
    NO_SLOT = "no_slot"
    NO_KV = "no_kv"
    STEP_BUDGET = "step_budget"
    CHUNK_SPENT = "chunk_spent"
    SLOT_RECLAIMED = "slot_reclaimed"
    KV_RECLAIMED = "kv_reclaimed"
    PRIORITY = "priority"
    TENANT_CAP = "tenant_cap"
    BATCH_WINDOW = "batch_window"
    """The idle engine waits a moment for others to come."""


class Because(NamedTuple):
    """One request and the reason for what the plan does with it."""

    request: Request
    reason: Reason

    @classmethod
    def all_of(cls, requests: Iterable[Request], reason: Reason) -> Iterator[Because]:
        """Say the same of many, in half the time that the constructor takes."""
        return map(tuple.__new__, repeat(cls), zip(requests, repeat(reason), strict=False))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What the engine does next, in this order: preempt, park, resume, admit, then compute `grants`.

    Every request in `admit` or `resume`, and every resident that takes part, stands in `grants` exactly once with the
    tokens it may compute (at least one). The KV blocks that `grants` need are free once `preempt` is carried out, if
    the engine takes the cached blocks of everybody in `admit` before it allocates any other.

    A RUNNING request without a grant keeps its slot: it waits for prefill tokens or blocks. Whoever else takes no
    part is in `park`. What is preempted waits again, under the `seq` it had.
    """

    grants: tuple[tuple[Request, int], ...] = ()
    admit: tuple[Request, ...] = ()
    park: tuple[Request, ...] = ()
    resume: tuple[Request, ...] = ()
    preempt: tuple[Request, ...] = ()
    because: tuple[Because, ...] = ()
    predicted_seconds: float = 0.0
    """What the cost model expects the step to take."""
    budget_seconds: float = float("inf")
    """What offline work might bring the step to; inf while online is neither here nor expected, or the cost model is
    not trusted. Online and the reservation of offline may exceed it by themselves."""
    wait_until: float = float("-inf")
    """When an empty plan is worth another look, if nobody comes before; -inf where that is not known."""
    online_seconds: float = 0.0
    """What online alone would take for its part of the step, as far as the cost model can tell."""
    suspendable_seconds: float = 0.0
    """How long the step may stand still at layer boundaries for online newcomers (`plan_nested`); 0 is not at all."""
