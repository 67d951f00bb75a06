"""The online part of a step: prefill continues, and requests are resumed and admitted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import ceil, inf

from ballast_policy.learning.cost import attended
from ballast_policy.plan import Reason, StepParts
from ballast_policy.request import ONLINE, PARKED, RUNNING, WAITING, Request, computed
from ballast_policy.step.budget import SPENT, OnlineStep, prefill_limits
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.gate import AdmissionGate
from ballast_policy.step.kv_peak import KvPeak
from ballast_policy.step.reserved import Reserved
from ballast_policy.step.triage import Pace, all_in_time, find_late, in_time_first

LEAST_SHARE = 1 / 8
"""Share of the prefill chunk that online may compute in any step, even if the decodes beside it cannot wait: with a
wrong cost model, prompts could queue indefinitely (`benchmarks/llm_d_protocol.py --replicas 2`)."""
DEFERRED_SHARE = 0.1
"""Share of the prefill of a step that the first deferred request gets before all others. Half or twice costs 1.4
or 1.1 points of TTFT (bursts-40-32)."""


def online_step(step: StepDraft, reserved: Reserved, late: Collection[Request] = ()) -> OnlineStep:
    """Return the part of the step that no budget limits. `late` requests do not count."""
    online, offline, time, cost = step.online, step.offline, step.time, step.cost
    fixed, seconds = time.fixed_seconds, time.seconds + reserved.seconds(step)
    if offline.decodes:
        num_prompts = sum([request not in step.draft.gone for request in reserved.requests])
        num_covered = min(max(0, step.coverage.slots_in_use - num_prompts), len(offline.decodes))
        context = offline.context // len(offline.decodes)
        fixed += cost.decode(context, time.num_decodes, num_covered)
        seconds += cost.decode(context, time.num_tokens, num_covered)
    pending = chain(online.ranked(online.prefills), [r for r in online.started if r.phase is PARKED], online.waiting)
    return OnlineStep(
        decodes=online.decodes,
        pending=pending if not late else (request for request in pending if request not in late),
        seconds=seconds,
        fixed=fixed,
        experts=cost.experts(inf, time.num_tokens),
    )


def online_parts(step: StepDraft) -> tuple[float, StepParts]:
    """Return the predicted time of the step without offline, 0 if online has no part in it, and the work of online."""
    cost, draft = step.cost, step.draft
    contexts = [request.num_tokens for request in draft.decodes if request.request_class is ONLINE]
    num, context = len(step.online.decodes) + len(contexts), step.online.context + sum(contexts)
    chunks = [(computed(r), tokens) for r, tokens in draft.prefill_grants.items() if r.request_class is ONLINE]
    prefill = sum([cost.k1 * tokens + cost.k2 * attended(done, tokens) for done, tokens in chunks])
    prefill += cost.experts(sum([tokens for _, tokens in chunks]), num)
    decodes = cost.k3 * num + cost.k4 * context + cost.experts(num)
    return cost.k0 + decodes + prefill if num or chunks else 0.0, StepParts(decodes=decodes, prefill=prefill)


def serve_online(step: StepDraft, reserved: Reserved) -> tuple[Reserved, Collection[Request]]:
    """Grant prefill tokens in order of priority: to residents first, then to requests that take a slot.

    Requests that can have their first token in time go first. They take free slots, slots that offline borrows (`lend`
    parks the holders), slots of lower priorities. Return `reserved` with blocks that online awaits, and late requests.
    """
    online = step.online
    if not (online.prefills or online.parked or online.waiting):
        return reserved, ()
    # Some newcomers wait for the rows of leaving requests instead of preempting parked ones.
    num_rows = max(step.num_rows, min(len(online.waiting), step.num_free_online_slots) - step.snapshot.num_leaving)
    service = _Service(step, AdmissionGate(step, online, lambda: step.num_free_online_slots, num_rows), reserved)
    if step.cost.is_trusted:
        service.triage(online_step(step, reserved))
    for request in online.prefills:
        step.blocks.promise(request)
    service.run()
    return service.reserved, service.deferred


@dataclass(slots=True)
class _Service:
    step: StepDraft
    gate: AdmissionGate
    reserved: Reserved
    order: Sequence[Request] = ()
    """All online requests to serve, before triage; empty if none is deferred."""
    deferred: Collection[Request] = ()
    """Requests that cannot have their first token in time."""
    until: float = inf
    """Seconds of the step, with those of the reservation, at which prefill ends."""
    reserved_seconds: float = 0.0
    """Seconds of the reservation, which `StepTime.seconds` does not contain yet."""
    peak: KvPeak | None = None
    """The peak of online; None until an admission needs it."""

    def triage(self, part: OnlineStep) -> None:
        """Set the end of prefill by the decodes beside it, and defer requests that are late in any case."""
        snapshot, online, cost = self.step.snapshot, self.step.online, self.step.cost
        self.reserved_seconds = part.seconds - self.step.time.seconds
        everyone = [*online.prefills, *online.parked, *online.waiting]
        for patience, spent in ((0, SPENT), (1, 1.0)) if part.decodes else ((1, 1.0),):
            self.until, usual = prefill_limits(snapshot, part, patience)
            start = snapshot.now - (self.until - usual if usual < inf else 0.0)
            pace = Pace(snapshot.now + part.fixed, start, 1 - part.fixed / usual, self.step.time.num_tokens)
            if all_in_time(everyone, cost, pace._replace(speed=spent * pace.speed)):
                return
        self.order = list(self.gate.in_order(online.prefills))
        self.deferred = find_late(self.order, cost, pace)
        if self.deferred:
            patient, _ = prefill_limits(snapshot, part, 2)
            if patient > self.until and all_in_time(everyone, cost, pace._replace(start=start + self.until - patient)):
                self.until, self.deferred = patient, ()

    def run(self) -> None:
        draft, gate = self.step.draft, self.gate
        order: Iterable[Request] = gate.in_order(self.step.online.prefills)
        if self.deferred:
            self._serve_deferred()
            order = in_time_first(self.order, self.deferred)
        for request in order:
            if request in draft.gone:
                continue
            if request.phase is RUNNING or request in draft.prefill_grants:
                self._continue(request, self._tokens(request))
            elif not gate.stops(request):
                is_decode = request.num_tokens - computed(request) == 1
                reason = self._start(request, 1 if is_decode else self._tokens(request))
                if reason is Reason.NO_KV:
                    held_blocks = self.reserved.held_blocks + self.step.blocks.whole(request)
                    self.reserved = replace(self.reserved, held_blocks=held_blocks)
                if reason:
                    gate.close(request, reason)
            if not request.num_output and self.step.cost.is_trusted and not self.step.config.is_encoder:
                self._end_in_time(request)

    def _end_in_time(self, request: Request) -> None:
        """End prefill when a prompt that this step finishes is due: all first tokens come at the end of the step.

        A large step of an encoder computes more prompts per second, so there, later prompts would pay.
        """
        step, draft, time = self.step, self.step.draft, self.step.time
        left = request.num_tokens - computed(request) - draft.prefill_grants.get(request, 0)
        if left < 1 or draft.decodes[-1:] == [request]:
            seconds = request.arrival + request.ttft - step.snapshot.now
            if time.seconds + self.reserved_seconds <= seconds:
                self.until = min(self.until, seconds / (1 + step.cost.error))

    def _serve_deferred(self) -> None:
        """Prefill a part of the first deferred request, unless a higher priority is first."""
        first = next(request for request in self.order if request in self.deferred)
        tokens = 0 if first.priority < self.order[0].priority else self._tokens(first, DEFERRED_SHARE)
        if tokens and first.phase is RUNNING:
            self._continue(first, tokens)
        elif tokens:
            self._start(first, tokens)

    def _tokens(self, request: Request, share: float = 1.0) -> int:
        """Return the tokens that a request may prefill beyond its grants, within a share of the remaining step."""
        step, time, draft = self.step, self.step.time, self.step.draft
        done = computed(request) + draft.prefill_grants.get(request, 0)
        chunk = max(0, time.chunk - self.reserved.tokens_without(draft.gone))
        wanted = request.num_tokens - done
        limit = min(wanted, int(share * chunk))
        least = ceil(LEAST_SHARE * step.config.chunk_tokens) - (time.num_tokens - time.num_decodes)
        seconds = share * (self.until - self.reserved_seconds - time.seconds)
        granted = step.cost.largest_chunk(seconds, done, limit, time.num_tokens)
        if share == 1:
            granted = max(granted, min(least, limit))
        if granted < wanted and step.is_whole(request.num_tokens):
            return wanted if limit == wanted and least > 0 else 0
        return granted

    def _start(self, request: Request, tokens: int) -> Reason | None:
        """Resume or admit a request. Return the reason if it cannot start."""
        if not self.gate.has_slot_for(request):
            return Reason.NO_SLOT
        if tokens < 1:
            return Reason.CHUNK_SPENT
        if not self._find_kv(request):
            return Reason.NO_KV
        if self.peak is not None and request.phase is WAITING:
            self.peak.add(request, self.step.blocks.whole(request))
        self.gate.start(request, tokens, Reason.ONLINE_FIRST)
        return None

    def _continue(self, request: Request, tokens: int) -> None:
        """Prefill a request that holds a slot as far as it finds blocks, on top of its grants of this step."""
        step, blocks = self.step, self.step.blocks
        granted = step.draft.prefill_grants.get(request, 0)
        needed = blocks.more(request, granted, tokens)
        reason = Reason.CHUNK_SPENT
        if tokens > 0 and needed > blocks.free and not step.reclaim(step.coverage.reclaimable, blocks.missing(needed)):
            reason = Reason.NO_KV
            tokens = min(tokens, blocks.capacity(request, granted))
        if tokens > 0:
            step.grant(request, tokens)
        elif not granted:
            step.draft.explain(request, reason)

    def _find_kv(self, request: Request) -> bool:
        """Free the blocks for all of a request; return whether that succeeded.

        A newcomer leaves one block for each running online request and the held blocks, and must fit at the peak.
        """
        step, blocks = self.step, self.step.blocks
        whole = blocks.needed(request, request.num_tokens)
        needed = whole + blocks.num_promised
        if request.phase is WAITING:
            if not self._fits_at_peak(request, whole):
                return False
            needed += self.reserved.held_blocks + len(step.online.running)
        elif not whole:
            return True
        if blocks.free >= needed:
            return True
        missing, lent, lower = blocks.missing(needed, request), step.coverage.reclaimable, step.online.below(request)
        for candidates in (lent, lent + lower):
            if step.reclaim(candidates, missing):
                return True
            if step.untie(candidates, missing):
                return False
        return False

    def _fits_at_peak(self, request: Request, whole: int) -> bool:
        """Return whether online answers of the usual length will find free or reclaimable KV beside this request."""
        step, blocks, online = self.step, self.step.blocks, self.step.online
        if ONLINE not in step.snapshot.expectation.outputs or not (online.started or online.residents):
            return True
        if self.peak is None:
            self.peak = step.kv_peak(online.residents + online.started)
        free = blocks.free - whole - blocks.num_promised - self.reserved.held_blocks
        missing = self.peak.missing(request, whole, free)
        return missing <= free or missing - free <= step.freed_by(step.coverage.reclaimable + online.below(request))
