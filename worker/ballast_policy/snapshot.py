"""Everything a plan may depend on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from ballast_policy.cost import CostModel
from ballast_policy.request import Request


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What a tenant is entitled to."""

    weight: float = 1.0
    max_priority: int = 100
    max_slots: int | None = None
    """Most slots its offline requests hold at a time."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """What the policy is told. Shares are fractions of 1, times seconds, sizes tokens or blocks."""

    slots: int
    num_blocks: int
    block_tokens: int = 16
    chunk_tokens: int = 512
    """Most prefill tokens in a step."""
    offline_share: float = 0.1
    """Reservation of offline in slots, KV blocks and prefill chunk."""
    offline_max_share: float = 1.0
    """Most slots that offline may hold."""
    ttft: float = inf
    """SLO of online requests that bring none of their own."""
    tpot: float = inf
    tenants: Mapping[str, TenantShare] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One moment of an engine. The records are the engine's own: nothing is copied, `plan` writes to none of them."""

    now: float
    residents: Sequence[Request]
    """RUNNING and PARKED requests, in any order."""
    waiting: Sequence[Request]
    """The first that wait, in the order of `Backlog`; at least `slots` of each class where there are as many."""
    free_blocks: int
    """Blocks that nobody uses, cached ones among them."""
    config: PolicyConfig
    cost: CostModel
