"""What an engine counts, as values that any thread may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from ballast_engine.footprint import PhaseWork
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.interference import UNCHECKED, Allowance
from ballast_policy.plan import Because, Reason
from ballast_policy.request import RequestClass
from ballast_policy.reservation import Reservation


class StepKind(StrEnum):
    """What a step computed; the label of `ballast_step_seconds`."""

    DECODE = "decode"
    PREFILL = "prefill"
    MIXED = "mixed"


@dataclass(frozen=True, slots=True)
class AdmissionRecord:
    """A request got a slot for the first time."""

    request_id: str
    request_class: RequestClass
    queued_seconds: float
    steps_waited: int
    """Steps it stood among the first that wait."""
    num_tokens: int
    num_cached: int
    """Of these, what the prefix cache gave."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step, for metrics and `ballast explain`."""

    kind: StepKind
    seconds: float
    """From looking at the inbox to the last token's bookkeeping."""
    run_seconds: float
    """Of these, inside the executor."""
    predicted_seconds: float
    """0 while the cost model knows nothing."""
    budget_seconds: float
    """inf where nothing bounded the step."""
    num_prefill: int
    """Prefill tokens."""
    num_decode: int
    """Requests that computed one token."""
    admissions: tuple[AdmissionRecord, ...] = ()
    because: tuple[Because, ...] = ()
    """The plan's reasons; the records in it go on changing."""
    is_nested: bool = False
    """It ran while another step stood still."""
    stood_seconds: float = 0.0
    """How long it was suspended for newcomers; not part of `seconds`."""


@dataclass(frozen=True, slots=True)
class ClassStats:
    """One class, at one moment; the tokens and counts since the engine started."""

    running: int = 0
    parked: int = 0
    waiting: int = 0
    reserved: int = 0
    """Slots kept for this class; online keeps what offline does not reserve."""
    lent: int = 0
    """Slots held beyond `reserved`."""
    prefill_tokens: int = 0
    """Prompt tokens computed for the first time."""
    decode_tokens: int = 0
    """Tokens generated."""
    wasted_tokens: int = 0
    """Tokens computed again after a preemption or in another worker's stead."""
    preemptions: Mapping[Reason, int] = field(default_factory=dict)
    parked_steps: int = 0
    """Steps that a resident sat out parked, summed over residents."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Everything the engine counts."""

    slots: int
    online: ClassStats
    offline: ClassStats
    kv_used: int
    kv_cached: int
    """Blocks that nobody holds and that the prefix cache can still give."""
    kv_free: int
    kv_waste_ratio: float
    """Share of the used blocks' token positions that hold nothing, now."""
    kv_waste_mean_ratio: float
    """The same over all steps so far."""
    prefix_query_tokens: int
    """Tokens of admitted requests, asked of the prefix cache."""
    prefix_hit_tokens: int
    steps: int
    failed_steps: int
    suspended_steps: int
    """Steps that stood still for newcomers."""
    deferred_grants: int
    """Grants that a plan gave and that blocks did not suffice for."""
    batch_ceiling: int
    """Largest decode batch that the SLO allows; the slots until the cost model is trusted."""
    cost: CostModel
    cost_error_ratio: float
    """Median relative error of the cost model over the steps it was fitted to; inf before."""
    reservation: Reservation
    """What is reserved for offline, and whether offline had it in the last step."""
    service: Mapping[tuple[RequestClass, str], float]
    """Tokens by class and tenant, weighed as the policy weighs them (input 1, output 2)."""
    work: Mapping[str, PhaseWork] = field(default_factory=dict)
    """What was computed, by phase."""
    allowance: Allowance = UNCHECKED
    """What measured latencies leave to offline."""
    interference: float | None = None
    """Under a cap: what offline added to online latency lately, the largest of TTFT and TPOT, median and p99."""

    def of(self, request_class: RequestClass) -> ClassStats:
        """Give one class."""
        return self.online if request_class is RequestClass.ONLINE else self.offline


NO_STEP = StepRecord(StepKind.DECODE, 0.0, 0.0, 0.0, inf, 0, 0)
"""`last_step` of an engine that has not run."""
