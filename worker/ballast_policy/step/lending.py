"""The phase that lends to offline what online and the reservation leave: slots, KV, and time up to the budget."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, floor, inf

from ballast_policy.plan import Reason
from ballast_policy.request import OFFLINE, RUNNING, WAITING, Request, computed
from ballast_policy.reservation import most_slots
from ballast_policy.step.decode_growth import reclaim_from_offline
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.gate import AdmissionGate, candidates
from ballast_policy.step.kv_peak import KvPeak
from ballast_policy.step.reserved import Reserved

STATIC_SHARE = 0.25
"""Share of slots and of the prefill chunk that is lent beside online while the cost model is not trusted. Half or twice
changes nothing."""


def lend(step: StepDraft, reserved: Reserved, *, growth_blocks: int, budget: float, expects_online: bool) -> None:
    """Grant offline what is left while the budget allows: decodes, parked decodes, prefill, then admissions.

    `growth_blocks` are set aside for covered decodes. `expects_online`: an online request is present or expected.
    """
    config, coverage, offline = step.config, step.coverage, step.offline
    chunk, most, held_blocks = config.chunk_tokens, step.most_offline_slots, reserved.held_blocks
    if expects_online and not step.cost.is_trusted and min(config.ttft, config.tpot) < inf:
        most = min(most, coverage.slots_in_use + most_slots(STATIC_SHARE, config.slots))
        if step.time.num_tokens or not config.is_encoder:  # a longer whole prompt starts in a step of its own
            chunk = ceil(STATIC_SHARE * chunk)
    num_covered = coverage.slots_in_use
    seconds = budget - step.time.seconds - reserved.seconds(step)
    if (excess := offline.num_held - most) > 0:
        step.park(coverage.running[-excess:], Reason.SLOT_RECLAIMED)
    _park_above_budget(step, seconds, num_covered)
    step.blocks.free += growth_blocks
    _grow(step)
    step.count_decodes(offline)
    offline.waiting = [request for request in offline.waiting if request not in offline.started]
    if expects_online:
        held_blocks += floor(config.watermark * config.num_blocks)
    left = config.chunk_tokens - (step.time.num_tokens - step.time.num_decodes)
    chunk = max(0, min(chunk, left - reserved.tokens_without(step.draft.gone)))
    gate = AdmissionGate(step, offline, lambda: most - offline.num_held, step.num_rows)
    _Lending(step, gate, budget, reserved, chunk, held_blocks).fill()


def preempt_above_caps(step: StepDraft) -> None:
    """Preempt the requests of tenants whose cap was lowered, beyond the cap. Parked, they would hold KV for long."""
    free, offline = step.tenant_slots_left, step.offline
    if min(free.values(), default=0) < 0:
        over = [request for request in offline.parked if free.get(request.tenant, 0) < 0]
        for request in reversed(offline.ranked(offline.running)):
            if free.get(request.tenant, 0) < 0:
                free[request.tenant] += 1
                over.append(request)
        step.preempt(over, Reason.TENANT_CAP)


def _park_above_budget(step: StepDraft, seconds: float, num_covered: int) -> None:
    """Park the last decodes that the reservation does not cover until the others take at most `seconds`."""
    offline, cost = step.offline, step.cost
    beside, num_decodes = step.time.num_tokens, len(offline.decodes)
    if cost.k3 * num_decodes + cost.k4 * offline.context + cost.experts(num_decodes, beside) <= seconds:
        return
    running = step.coverage.running
    for index, request in enumerate(running):
        if request.num_tokens - request.num_computed > 1:
            continue
        takes = cost.decode(request.num_tokens, beside)
        if index >= num_covered and takes > seconds:
            over = [other for other in running[index:] if other.num_tokens - other.num_computed == 1]
            step.park(over, Reason.STEP_BUDGET)
            return
        seconds -= takes
        beside += 1


def _grow(step: StepDraft) -> None:
    """Find blocks for decodes that need a new one: preempt offline requests, never the first, or park decodes."""
    offline, blocks = step.offline, step.blocks
    if len(offline.growing) > blocks.free:
        reclaim_from_offline(step, offline.growing)
        growing = set(offline.growing)
        ordered = [request for request in step.coverage.running if request in growing]
        step.park(ordered[blocks.free :], Reason.NO_KV)


@dataclass(slots=True)
class _Lending:
    step: StepDraft
    gate: AdmissionGate
    budget: float
    reserved: Reserved
    chunk: int
    """Prefill tokens that may still be lent."""
    held_blocks: int
    """Free blocks that admissions leave."""
    reserved_seconds: float = 0.0
    peak: KvPeak | None = None
    """The peak of all residents; None until an admission needs it."""

    @property
    def remaining(self) -> float:
        """Return the seconds of the budget that are neither granted nor reserved."""
        return self.budget - self.step.time.seconds - self.reserved_seconds

    def fill(self) -> None:
        """Continue prefill and lend free slots; in each priority decodes go before prefill."""
        offline, grants = self.step.offline, self.step.draft.prefill_grants
        self._keep_time()
        if self.gate.has_free_slot():
            self._resume_decodes()
        begun = [request for request in grants if request.request_class is OFFLINE]
        for request in self.gate.in_order(offline.prefills + begun):
            if request.phase is RUNNING or request in grants:
                self._continue(request)
            elif not self.gate.stops(request):
                self._start_or_close(request)

    def _resume_decodes(self) -> None:
        """Resume parked decodes until a waiting request is next in order."""
        offline = self.step.offline
        for request in candidates(offline, offline.waiting[:1]):
            if request.phase is WAITING or self.gate.is_closed or not self.gate.has_free_slot():
                return
            if request.num_tokens - request.num_computed == 1:
                self._start_or_close(request)

    def _continue(self, request: Request) -> None:
        """Prefill a request that has a slot, or park it if it is neither covered nor gets tokens."""
        step, draft, blocks = self.step, self.step.draft, self.step.blocks
        granted = draft.prefill_grants.get(request, 0)
        done = computed(request) + granted
        is_covered = request in self.reserved.requests
        reserved = min(request.remaining, self.reserved.tokens_without(draft.gone)) if is_covered else 0
        lent = self._lent_tokens(request.num_tokens - done - reserved, done + reserved)
        tokens = min(reserved + lent, blocks.capacity(request, granted))
        if tokens > 0:
            self.chunk -= max(0, tokens - reserved)
            step.grant(request, tokens)
        elif not granted:
            reason = Reason.NO_KV if reserved + lent else Reason.STEP_BUDGET if self.chunk else Reason.CHUNK_SPENT
            if is_covered:
                draft.explain(request, reason)
            else:
                step.park([request], reason)
        if is_covered:
            others = [other for other in self.reserved.requests if other is not request]
            self.reserved = replace(self.reserved, tokens=self.reserved.tokens - min(reserved, tokens), requests=others)
            self._keep_time()

    def _start_or_close(self, request: Request) -> None:
        """Resume or admit a request, or close the gate behind it for the reason that prevents it."""
        step = self.step
        if step.tenant_slots_left.get(request.tenant, 1) < 1:
            step.draft.explain(request, Reason.TENANT_CAP)
            return
        done = computed(request)
        left = request.num_tokens - done
        if left == 1:
            tokens = int(step.cost.decode(request.num_tokens, step.time.num_tokens) <= self.remaining)
        else:
            tokens = self._lent_tokens(left, done)
        reason = None
        if not self.gate.has_slot_for(request):
            reason = Reason.NO_SLOT
        elif tokens < 1:
            least = left if step.is_whole(request.num_tokens) else 1
            reason = Reason.CHUNK_SPENT if left > 1 and self.chunk < least else Reason.STEP_BUDGET
        elif not self._has_kv(request):
            reason = Reason.NO_KV
        if reason:
            shut = step.draft.explain if reason is Reason.STEP_BUDGET and self._never_fits(request) else self.gate.close
            shut(request, reason)
            return
        self.chunk -= tokens if left > 1 else 0
        if self.peak is not None:
            self.peak.add(request, step.blocks.whole(request))
        self.gate.start(request, tokens, Reason.LENT)
        self._keep_time()

    def _keep_time(self) -> None:
        """Keep time for the reserved prefill tokens that are not granted yet and find blocks."""
        self.reserved_seconds = self.reserved.seconds(self.step, self.step.blocks.free) if self.reserved.tokens else 0.0

    def _lent_tokens(self, wanted: int, num_computed: int) -> int:
        limit, step = min(wanted, self.chunk), self.step
        tokens = step.cost.largest_chunk(self.remaining, num_computed, limit, step.time.num_tokens)
        return 0 if tokens < wanted and step.is_whole(num_computed + wanted) else tokens

    def _never_fits(self, request: Request) -> bool:
        """Return whether the prompt of an encoder takes longer than the whole step: shorter ones need not wait."""
        cost = self.step.cost
        return self.step.config.is_encoder and cost.k0 + cost.prefill(0, request.num_tokens) > self.budget

    def _has_kv(self, request: Request) -> bool:
        """Return whether a request finds all its blocks, and a newcomer beside others also those of the peak."""
        step, blocks = self.step, self.step.blocks
        whole = blocks.whole(request)
        free = blocks.free - blocks.num_promised - whole
        if request.phase is not WAITING or free < 0:
            return free >= 0
        free -= self.held_blocks
        if self.peak is None:
            residents = [r for group in (step.online, step.offline) for r in (*group.residents, *group.started)]
            if not residents and not step.snapshot.num_leaving:
                return True
            if free < 0:
                return False
            self.peak = step.kv_peak(residents)
        return free >= 0 and self.peak.missing(request, whole, free) <= free
