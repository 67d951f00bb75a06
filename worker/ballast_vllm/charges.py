"""What a step of vLLM charges to its requests: computed tokens, drawn tokens, and accepted drafts.

With asynchronous scheduling, the next step begins before the output of a step is there. So each request that draws a
token counts it as known at once, and the charge corrects the counts afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ballast_engine.counters import EngineCounters
from ballast_engine.stats import AdmissionRecord, StepKind, StepRecord
from ballast_policy.host import Host
from ballast_policy.learning.cost import StepWork
from ballast_policy.plan import StepPlan
from ballast_policy.request import Request

Pairs = Sequence[tuple[Request, int]]


@dataclass(slots=True)
class Flight:
    """A step that vLLM runs."""

    plan: StepPlan
    pairs: Pairs
    """Requests that compute, with their known tokens; drafts are not counted."""
    ends: Sequence[int]
    """The computed tokens of each request after this step."""
    work: StepWork
    started: float
    admissions: tuple[AdmissionRecord, ...] = ()
    num_drafts: int = 0
    with_drafts: bool = True
    """Whether drafts are on, so that vLLM's drafter proposes some in this step."""

    def record(self, seconds: float) -> StepRecord:
        """Return the record of the step, which took some seconds."""
        work = self.work
        num_decode = work.num_decode - self.num_drafts
        return StepRecord(
            kind=StepKind.DECODE if not work.num_prefill else StepKind.MIXED if num_decode else StepKind.PREFILL,
            seconds=seconds,
            predicted_seconds=self.plan.predicted_seconds,
            num_prefill=work.num_prefill,
            num_decode=num_decode,
            admissions=self.admissions,
        )


class Charges:
    """Charges the steps of one EngineCore to a host and to counters."""

    def __init__(self, host: Host, live: Mapping[int, Any], counters: EngineCounters) -> None:
        """`live`: vLLM's requests by `seq`."""
        self._host, self._live, self._counters = host, live, counters

    def run_ahead(self, pairs: Pairs, *, resync: bool) -> None:
        """Count the token that each complete request draws in this step as known; the next plan may use it."""
        for record, _ in pairs:
            if resync:
                self._resync(record, self._live[record.seq])
            elif record.remaining == 0 and record.num_tokens + 1 - record.num_prompt < record.max_output:
                record.num_tokens += 1

    @staticmethod
    def _resync(record: Request, request: Any) -> None:
        """Read what vLLM knows of a request. A request that draws its last token now has no token left to compute."""
        num_drawing = request.num_output_placeholders
        record.num_computed = request.num_computed_tokens
        record.num_tokens = request.num_tokens + num_drawing
        if num_drawing and record.num_tokens - record.num_prompt >= record.max_output:
            record.num_tokens = record.num_computed

    def charge(self, flight: Flight, now: float) -> int:
        """Charge a step whose output vLLM added to its requests; return the accepted drafts.

        A request may be in a later step already. One that left during the step, e.g. by an abort, gets no new token.
        """
        num_accepted = 0
        live, host, counters = self._live, self._host, self._counters
        for (record, num_tokens), end in zip(flight.pairs, flight.ends, strict=True):
            request = live.get(record.seq)
            num_drawn = 0 if request is None else request.num_output_tokens - record.num_output
            if num_drawn:  # `end` may count drafts of the step before that were rejected meanwhile
                record.num_computed = record.num_tokens = record.num_prompt + record.num_output
            else:
                record.num_computed = end
                if request is None or not host.config.is_encoder:  # the answer of an encoder is no token
                    record.num_tokens = max(end + 1, record.num_tokens)
            is_new = record.num_computed > record.most_computed
            num_new, num_wasted = host.computed(record, num_tokens, now)
            if num_new or num_wasted:
                counters.note_tokens(record, num_new, num_wasted, is_generated=False)
            if num_drawn:
                counters.classes[record.request_class].decode_tokens += is_new
                num_accepted += num_drawn - 1
                self._charge_drafts(record, num_drawn - 1, now)
                record.num_output += num_drawn
            if request is not None:
                self._resync(record, request)
        counters.note_charges(host.settle())
        return num_accepted

    def _charge_drafts(self, record: Request, number: int, now: float) -> None:
        """Charge the accepted drafts of a request, each of which draws one more token."""
        for _ in range(number):
            record.num_computed = record.num_tokens = record.num_tokens + 1
            is_new = record.num_computed > record.most_computed
            _, num_wasted = self._host.computed(record, 1, now)
            self._counters.note_tokens(record, 0, num_wasted, is_generated=is_new)
