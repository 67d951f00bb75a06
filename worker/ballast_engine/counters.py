"""Count the work of the engine. Only its thread writes; any thread may read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace

from ballast_engine.footprint import PHASES, PhaseWork
from ballast_engine.running_step import RunningStep
from ballast_engine.scheduler import DispatchedStep, Scheduler
from ballast_engine.stats import OTHERS, ClassStats, EngineStats
from ballast_policy.host import Host
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, Phase, Request, RequestClass

Payer = tuple[RequestClass, str]
MOST_PAYERS = 1000
"""Tenants that are counted by name for good. Their names come from callers and submitters, who may invent any number.

Beside them, the offline tenants that were charged last have their names, at most twice as many: the shared ledger of
the queue charges by name what a tenant got in the last second. All others are counted together.
"""


@dataclass(slots=True)
class EngineCounters:
    """Counters of an engine."""

    classes: dict[RequestClass, ClassStats] = field(default_factory=lambda: {c: ClassStats() for c in RequestClass})
    """Counts since the engine started. `stats` adds the requests now."""
    service: dict[Payer, float] = field(default_factory=dict)
    _recent: dict[Payer, None] = field(default_factory=dict)
    """Offline tenants that are not counted by name for good. The last one was charged last."""
    work: dict[str, PhaseWork] = field(default_factory=lambda: {phase: PhaseWork() for phase in PHASES})
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    steps: int = 0
    failed_steps: int = 0
    suspended_steps: int = 0
    deferred_grants: int = 0

    def note_plan(self, step: DispatchedStep) -> None:
        """Count the effects of a plan on requests, even if its computation fails."""
        self.deferred_grants += step.dispatch.num_deferred
        if step.plan.preempt:
            self.note_preemptions(step.plan)
        for admission in step.admissions:
            self.note_admission(admission.num_tokens, admission.num_cached)

    def note_preemptions(self, plan: StepPlan) -> None:
        """Count the preemptions of a plan by reason."""
        reasons = {because.request: because.reason for because in plan.because}
        for request in plan.preempt:
            self.note_preemption(request, reasons.get(request, Reason.KV_RECLAIMED))

    def note_preemption(self, request: Request, reason: Reason) -> None:
        """Count a preemption."""
        preemptions = self.classes[request.request_class].preemptions
        preemptions[reason] = preemptions.get(reason, 0) + 1

    def note_admission(self, num_tokens: int, num_cached: int) -> None:
        """Count the prefix lookup of a request that got its first slot."""
        self.prefix_query_tokens += num_tokens
        self.prefix_hit_tokens += num_cached

    def note_tokens(self, request: Request, num_new: int, num_wasted: int, *, is_generated: bool) -> None:
        """Count computed tokens: new prompt tokens, tokens computed again, and the token that was generated."""
        counters = self.classes[request.request_class]
        counters.prefill_tokens += num_new
        counters.wasted_tokens += num_wasted
        counters.decode_tokens += is_generated

    def note_charges(self, charges: Iterable[tuple[RequestClass, Mapping[str, float]]]) -> None:
        """Add the service of the step by class and tenant."""
        service, recent = self.service, self._recent
        for request_class, by_tenant in charges:
            for tenant, cost in by_tenant.items():
                payer = (request_class, tenant)
                if payer in recent:
                    del recent[payer]
                    recent[payer] = None
                elif payer not in service and len(service) >= MOST_PAYERS:
                    if request_class is RequestClass.OFFLINE:
                        recent[payer] = None
                    else:
                        payer = (request_class, OTHERS)
                service[payer] = service.get(payer, 0.0) + cost
        if len(recent) > 2 * MOST_PAYERS:
            self._fold()

    def _fold(self) -> None:
        """Count the tenants that were charged first together. A reader sees the counters before or after it."""
        service, others = dict(self.service), (RequestClass.OFFLINE, OTHERS)
        for payer in list(self._recent)[:-MOST_PAYERS]:
            del self._recent[payer]
            service[others] = service.get(others, 0.0) + service.pop(payer)
        self.service = service

    def note_step(self, scheduler: Scheduler, running: RunningStep) -> None:
        """Count a step. Parked requests are not counted for a nested step, which is part of the suspended step."""
        self.steps += 1
        self._note_work(running)
        if not running.step.dispatch.is_nested:
            for request_class, held in scheduler.host.held.items():
                self.classes[request_class].parked_steps += held[Phase.PARKED]
        if running.suspended_seconds:
            self.suspended_steps += 1
            for sequence in running.step.members:  # parked in the middle of a step that it took part in
                if sequence.request.phase is Phase.PARKED:
                    self.classes[sequence.request.request_class].parked_steps -= 1

    def _note_work(self, running: RunningStep) -> None:
        work, ends = running.work, running.batch.context_lens
        num_decode = work.num_decode
        share = num_decode / (num_decode + work.num_prefill)
        if num_decode:
            decode = self.work["decode"]
            decode.passes += share
            decode.tokens += num_decode
            decode.attended += work.decode_context
            decode.context += work.decode_context
            decode.draws += num_decode
        if work.num_prefill:
            prefill = self.work["prefill"]
            prefill.passes += 1 - share
            prefill.tokens += work.num_prefill
            prefill.attended += work.prefill_context
            prefill.context += int(ends[num_decode:].sum())
            prefill.draws += len(running.batch.samples) - num_decode

    def stats(
        self,
        host: Host,
        *,
        kv_used: int,
        kv_cached: int,
        kv_free: int,
        kv_waste_ratio: float,
        num_blocked: Mapping[RequestClass, int] | None = None,
    ) -> EngineStats:
        """Return all counters as one value. `num_blocked`: waiting requests that the host does not know yet."""
        slots, reservation, blocked = host.config.slots, host.reservation, num_blocked or {}
        reserved = {RequestClass.ONLINE: slots - reservation.slots, RequestClass.OFFLINE: reservation.slots}
        online, offline = (self._class_stats(host, c, reserved[c], blocked.get(c, 0)) for c in reserved)
        return EngineStats(
            slots=slots,
            online=online,
            offline=offline,
            kv_used=kv_used,
            kv_cached=kv_cached,
            kv_free=kv_free,
            kv_offline=sum([r.num_private_blocks for r in list(host.residents.values()) if r.request_class is OFFLINE]),
            kv_waste_ratio=kv_waste_ratio,
            prefix_query_tokens=self.prefix_query_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            steps=self.steps,
            failed_steps=self.failed_steps,
            suspended_steps=self.suspended_steps,
            deferred_grants=self.deferred_grants,
            batch_ceiling=host.ceiling or slots,
            reservation=reservation,
            service=dict(self.service),
            work={phase: copy(work) for phase, work in self.work.items()},
            allowance=host.interference.allowance,
            interference=None if host.interference.cap is None else host.interference.inflation,
        )

    def _class_stats(self, host: Host, request_class: RequestClass, reserved: int, num_blocked: int) -> ClassStats:
        held, counts = host.held[request_class], self.classes[request_class]
        return replace(
            counts,
            running=held[Phase.RUNNING],
            parked=held[Phase.PARKED],
            waiting=host.backlog.count(request_class) + num_blocked,
            reserved=reserved,
            borrowed=max(0, held[Phase.RUNNING] - reserved),
            preemptions=dict(counts.preemptions),
        )
