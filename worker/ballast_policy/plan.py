"""The decision for one step, as a value."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from ballast_policy.request import Request


class Reason(StrEnum):
    """Why a request was treated as it was in one step, which the laws check; a label of `ballast_preemptions_total`."""

    ONLINE_FIRST = "online_first"
    OFFLINE_RESERVATION = "offline_reservation"
    LENT = "lent"
    """Offline work borrows: it started beyond its reservation."""
    NO_SLOT = "no_slot"
    NO_KV = "no_kv"
    STEP_BUDGET = "step_budget"
    CHUNK_SPENT = "chunk_spent"
    SLOT_RECLAIMED = "slot_reclaimed"
    KV_RECLAIMED = "kv_reclaimed"
    PRIORITY = "priority"
    TENANT_CAP = "tenant_cap"
    BATCH_WINDOW = "batch_window"
    """The idle engine waits for more requests."""


class Because(NamedTuple):
    request: Request
    reason: Reason


class StepParts(NamedTuple):
    """Parts of the predicted seconds of a step: what offline adds, and the work of online. A nested step is prefill."""

    offline: float = 0.0
    decodes: float = 0.0
    prefill: float = 0.0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The actions of the engine, in this order: preempt, park, resume, admit, then compute `grants`.

    Each request that computes is in `grants` once, with its tokens, at least one. All of `admit` and `resume` compute.
    The KV blocks that `grants` need are free once `preempt` is carried out, if the engine takes the cached blocks of
    all requests in `admit` before it allocates any other. A preempted request waits again, with the same `seq`.

    A RUNNING request that is neither in `grants` nor in `park` keeps its slot: it waits for prefill tokens or blocks.
    """

    grants: tuple[tuple[Request, int], ...] = ()
    admit: tuple[Request, ...] = ()
    park: tuple[Request, ...] = ()
    resume: tuple[Request, ...] = ()
    preempt: tuple[Request, ...] = ()
    because: tuple[Because, ...] = ()
    predicted_seconds: float = 0.0
    budget_seconds: float = float("inf")
    """The time to which offline work may extend the step; inf while the cost model is not trusted. Online and the
    reservation of offline may exceed it by themselves."""
    wait_until: float = float("-inf")
    """Time of the next plan after an empty one, unless a request arrives earlier; -inf if unknown."""
    parts: StepParts = field(default_factory=StepParts)
    suspendable_seconds: float = 0.0
    """Time for which the step may be suspended for new online requests (`plan_nested`)."""
