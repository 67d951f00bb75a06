"""The counters of one EngineCore, beside those that every engine has."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from ballast_engine.counters import EngineCounters
from ballast_engine.stats import StepRecord
from ballast_policy.learning.cost import StepWork
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import Request, RequestClass

MOST_STEPS = 4096
"""Steps that are kept for the next reader. Bounds memory: a reader asks once a second."""


@dataclass(slots=True)
class Counters:
    """Counters since EngineCore started."""

    tokens: EngineCounters = field(default_factory=EngineCounters)
    steps: int = 0
    records: deque[StepRecord] = field(default_factory=lambda: deque(maxlen=MOST_STEPS))
    """The last steps; the last of them has the number `steps`."""
    exact_steps: int = 0
    """Steps in which vLLM computed exactly the grants, apart from drafts."""
    deferred_grants: int = 0
    """Grants that vLLM did not carry out, for want of KV blocks or of another resource of its own."""
    short_grants: int = 0
    """Grants of which vLLM carried out a part."""
    draft_tokens: int = 0
    """Tokens that vLLM added to grants as drafts."""
    in_step: Mapping[RequestClass, int] = field(default_factory=dict)
    """Requests of the last step of an encoder. Each holds a slot within its step only."""
    unplanned_preemptions: int = 0
    """Preemptions by vLLM itself."""

    def note_preemptions(self, plan: StepPlan) -> None:
        """Count the preemptions of a plan by reason."""
        reasons = {because.request: because.reason for because in plan.because}
        for request in plan.preempt:
            self.note_preemption(request, reasons.get(request, Reason.KV_RECLAIMED))

    def note_preemption(self, request: Request, reason: Reason) -> None:
        """Count a preemption."""
        preemptions = self.tokens.classes[request.request_class].preemptions
        preemptions[reason] = preemptions.get(reason, 0) + 1

    def note_admission(self, num_tokens: int, num_cached: int) -> None:
        """Count the prefix lookup of a request that got its first slot."""
        self.tokens.prefix_query_tokens += num_tokens
        self.tokens.prefix_hit_tokens += num_cached

    def note_work(self, work: StepWork, *, num_decodes: int, ends: int) -> None:
        """Count the work of a step by phase. `ends`: the sum of the contexts of its chunks."""
        share = work.num_decode / (work.num_decode + work.num_prefill)
        if work.num_decode:
            decode = self.tokens.work["decode"]
            decode.passes += share
            decode.tokens += work.num_decode
            decode.attended += work.decode_context
            decode.context += work.decode_context
            decode.draws += num_decodes
        if work.num_prefill:
            prefill = self.tokens.work["prefill"]
            prefill.passes += 1 - share
            prefill.tokens += work.num_prefill
            prefill.attended += work.prefill_context
            prefill.context += ends

    def note_step(self, record: StepRecord) -> None:
        """Count a step that ended."""
        self.steps += 1
        self.records.append(record)

    def since(self, number: int) -> Iterable[StepRecord]:
        """Return the kept steps after the step with this number."""
        num_new = min(max(0, self.steps - number), len(self.records))
        return islice(self.records, len(self.records) - num_new, None)
