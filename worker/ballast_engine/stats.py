"""The counters of an engine, as values that any thread may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ballast_engine.footprint import PhaseWork
from ballast_policy.learning.interference import Allowance
from ballast_policy.plan import Reason
from ballast_policy.request import RequestClass
from ballast_policy.reservation import Reservation

OTHERS = "*"
"""The tenants that are counted together in `EngineStats.service`. No tenant can have this name."""


class StepKind(StrEnum):
    """The kind of work in a step. A label of `ballast_step_seconds`."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class AdmissionRecord:
    """The first slot of a request."""

    request_id: str
    request_class: RequestClass
    queued_seconds: float
    steps_waited: int
    """Steps that the request waited among the first in the order."""
    num_tokens: int
    num_cached: int
    """Tokens that came from the prefix cache."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for metrics."""

    kind: StepKind
    seconds: float
    """From reading the inbox to recording the last token."""
    predicted_seconds: float
    """0 until the cost model has samples."""
    num_prefill: int
    """Prefill tokens."""
    num_decode: int
    """Requests that computed one token."""
    admissions: tuple[AdmissionRecord, ...] = ()


@dataclass(slots=True)
class ClassStats:
    """One class: its requests now, and its tokens and counts since the engine started."""

    running: int = 0
    parked: int = 0
    waiting: int = 0
    held_up: int = 0
    """Those waiting for a place of their adapter in vLLM, while online requests of other adapters hold all places."""
    reserved: int = 0
    """Slots kept for this class; online keeps what offline does not reserve."""
    borrowed: int = 0
    """Slots held beyond `reserved`."""
    prefill_tokens: int = 0
    """Prompt tokens computed for the first time."""
    decode_tokens: int = 0
    """Tokens generated."""
    wasted_tokens: int = 0
    """Tokens computed again after a preemption, or after an attempt of another worker."""
    preemptions: dict[Reason, int] = field(default_factory=dict)
    parked_steps: int = 0
    """Steps that a resident sat out parked, summed over residents."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Everything the engine counts. No field has a default: a figure that `EngineCounters` forgets is an error."""

    slots: int
    online: ClassStats
    offline: ClassStats
    kv_used: int
    kv_cached: int
    """Blocks that only the prefix cache still uses."""
    kv_free: int
    kv_offline: int
    """Used blocks that an offline request holds alone, so that its preemption frees them."""
    kv_waste_ratio: float
    """Share of the token positions in used blocks that hold no token, now."""
    prefix_query_tokens: int
    """Tokens of admitted requests that were looked up in the prefix cache."""
    prefix_hit_tokens: int
    steps: int
    failed_steps: int
    suspended_steps: int
    """Steps that were suspended for new requests."""
    deferred_grants: int
    """Grants of plans for which too few blocks were free."""
    batch_ceiling: int
    """Largest decode batch that the SLO allows; the slots until the cost model is trusted."""
    reservation: Reservation
    """The reservation of offline work, and whether it was met in the last step."""
    service: Mapping[tuple[RequestClass, str], float]
    """Service by class and tenant: tokens weighted as in the policy (input 1, output 2)."""
    work: Mapping[str, PhaseWork]
    """Work by phase; 0 inside vLLM, where nothing reads it."""
    allowance: Allowance
    """The limits of offline work, from the measured latencies."""
    interference: float | None
    """Under a cap: what offline added to online latency recently, the largest of TTFT and TPOT, median and p99."""

    def of(self, request_class: RequestClass) -> ClassStats:
        """Return the counters of one class."""
        return self.online if request_class is RequestClass.ONLINE else self.offline

    @property
    def is_reservation_met(self) -> bool:
        """Return whether the reservation was met in the last step, or no offline request is left for a further step."""
        offline = self.offline
        return self.reservation.is_met or not offline.running + offline.parked + offline.waiting


NO_STEP = StepRecord(StepKind.DECODE, 0.0, 0.0, 0, 0)
"""The `last_step` of an engine that has not computed a step."""
