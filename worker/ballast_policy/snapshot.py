"""The input of a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from sys import maxsize

from ballast_policy.backlog import Ledgers
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.expectation import UNKNOWN, Expectation
from ballast_policy.learning.interference import UNCHECKED, Allowance
from ballast_policy.request import ONLINE, Request
from ballast_policy.reservation import ROUNDING, Reservation, most_slots


@dataclass(frozen=True, slots=True)
class TenantShare:
    weight: float = 1.0
    max_priority: int = 0
    max_slots: int | None = None
    """Most slots that its offline requests hold at a time."""
    reserved: float = 0.0
    """Share of the slots of its class that this tenant gets first, see `tenant_slots`."""


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """The configuration of the policy. Shares are fractions of 1, times are seconds, sizes are tokens or blocks."""

    slots: int
    num_blocks: int
    block_tokens: int = 16
    chunk_tokens: int = 512
    """Most prefill tokens of a step beside lent prompts, or of unknown time; online may take `ONLINE_CHUNKS`."""
    offline_share: float = 0.1
    """Reservation of offline in slots, KV blocks and prefill chunk."""
    offline_max_share: float = 1.0
    ttft: float = inf
    """SLO of online requests without their own, and of the next request."""
    tpot: float = inf
    tenants: Mapping[str, TenantShare] = field(default_factory=dict)
    most_risk: float = 0.4
    """Risk that a burst of prompts makes a decode late, averaged over online decodes (`benchmarks/foresight.py`)."""
    tpot_share: float = 1.0
    """Most part of the TPOT of its decodes that a step takes because of offline work (`ballast plan` tries seven)."""
    batch_window: float = 0.0
    """Seconds that an idle engine waits after the first arrival for a whole batch."""
    max_interference: float | None = None
    """Most that offline work may add to TTFT and TPOT of online, median and 99th percentile, as a fraction of their
    values without it; None if only the SLO limits it."""
    objective: float = 0.0
    """Share of online requests that shall meet the SLO. Less is lent if offline causes half of the allowed misses."""
    can_suspend: bool = True
    """Whether the engine can suspend a step at a layer boundary."""
    most_residents: int = maxsize
    """Most requests that hold KV, running or parked, at least `slots`: a batch of vLLM's Model Runner V2 has all."""
    is_encoder: bool = False
    """Whether requests end with their prefill, as in a model that returns vectors. A prompt is computed in one step, if
    it fits into a chunk, and `ttft` is the SLO of the whole request."""
    expert_share: float = 0.0
    """Share of the experts of a layer that one token passes, `k / E`; 0 for a dense model."""
    watermark: float = 0.1
    """Share of the KV that lent admissions leave free while online is expected. Half of it computes 4 % more tokens
    again, twice of it costs 1 % of the tokens (`benchmarks/kv_admission.py --kv-tokens 110000 --load 40`)."""
    tail_tokens: int = 64
    """Least tokens that a request is expected to generate while lengths are unknown (`benchmarks/kv_admission.py`)."""

    @property
    def tenant_caps(self) -> dict[str, int]:
        """Return the most slots that offline requests may hold, of the tenants with a cap."""
        return {name: share.max_slots for name, share in self.tenants.items() if share.max_slots is not None}

    def tenant_slots_left(self, running: Iterable[Request]) -> dict[str, int]:
        """Return the slots that tenants with a cap may still take beside `running`; negative if a cap was lowered."""
        left = self.tenant_caps
        for request in running if left else ():
            if request.tenant in left:
                left[request.tenant] -= 1
        return left

    def set_slo(self, request: Request, ttft: float | None, tpot: float | None) -> None:
        """Set the SLO of a request: its own, else that of its class."""
        usual = (self.ttft, self.tpot) if request.request_class is ONLINE else (inf, inf)
        request.ttft, request.tpot = usual[0] if ttft is None else ttft, usual[1] if tpot is None else tpot

    def reservation(self, ceiling: int | None = None) -> Reservation:
        """Return the reservation; `ceiling` is the largest decode batch within the SLO, None if it is not known.

        One slot, one block and an eighth of the chunk stay for online, but none of a chunk of one token. A share of 0
        reserves nothing.
        """
        share, most = self.offline_share, min(self.slots - 1, most_slots(self.offline_max_share, self.slots))
        return Reservation(
            slots=max(0, min(ceil(share * min(self.slots, ceiling or self.slots) - ROUNDING), most)),
            blocks=max(0, min(ceil(share * self.num_blocks - ROUNDING), self.num_blocks - 1)),
            chunk=min(ceil(share * self.chunk_tokens - ROUNDING), max(1, self.chunk_tokens * 7 // 8)),
        )


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The state of an engine. The records are those of the engine, and `plan` writes to none of them."""

    now: float
    residents: Sequence[Request]
    """RUNNING and PARKED requests, in any order."""
    waiting: Sequence[Request]
    """The first waiting requests, in the order of `Backlog`: of each class one more than a step could admit."""
    free_blocks: int
    """Blocks that no request uses, including cached blocks."""
    config: PolicyConfig
    cost: CostModel
    reservation: Reservation
    ledgers: Ledgers = field(default_factory=dict)
    """Service of the tenants of each class; a class without one treats its tenants as equal."""
    typical_prompt: int = 0
    """Tokens that an online prompt usually has to compute; 0 while unknown."""
    allowance: Allowance = UNCHECKED
    """Limits that follow from measured latencies, see `Interference`."""
    num_leaving: int = 0
    """Requests that draw their last token now, and keep their slots and KV for one more step; not among `residents`."""
    expectation: Expectation = UNKNOWN
    """Lengths of answers and demand of online, see `ExpectationLearner`."""
