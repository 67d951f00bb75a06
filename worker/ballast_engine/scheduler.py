"""The scheduling half of a step: look, ask the policy, and do as it says."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from math import inf

from ballast_engine.errors import IntegrityError
from ballast_engine.intake import set_slo
from ballast_engine.residency import Residency
from ballast_engine.sequence import Sequence
from ballast_engine.stats import Admission
from ballast_policy.backlog import Backlog
from ballast_policy.cost import Fit, Work
from ballast_policy.experience import Experience
from ballast_policy.fairness import Ledger
from ballast_policy.interference import Interference
from ballast_policy.plan import Plan
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.reservation import reserved_slots
from ballast_policy.snapshot import PolicyConfig, Snapshot, take_snapshot
from ballast_policy.suspension import plan_nested

Planner = Callable[[Snapshot], Plan]
NestedPlanner = Callable[[Snapshot, Collection[Request], float], Plan]

REFIT_STEPS = 32
MOST_IDLE = 1000
"""Tenants in a ledger beyond which those that have no claim left are let go."""
HINTED = 32
"""Waiting requests per class whose share of the prefix cache is looked up; a chunk seldom admits as many."""


@dataclass(frozen=True, slots=True)
class Step:
    """A plan as it was carried out."""

    plan: Plan
    decodes: list[Sequence]
    """They compute one token each."""
    chunks: list[tuple[Sequence, int]]
    admissions: tuple[Admission, ...]
    num_deferred: int
    is_floor_met: bool = True
    is_nested: bool = False
    """It belongs to the suspended step that it ran in."""

    @property
    def members(self) -> list[Sequence]:
        """Everybody who takes part, in the batch's order."""
        return [*self.decodes, *(sequence for sequence, _ in self.chunks)]


class Scheduler:
    """Requests that entered the engine, waiting and resident, and what the policy is told of them."""

    def __init__(self, residency: Residency, planner: Planner, policy: PolicyConfig) -> None:
        self.residency = residency
        self.backlog = Backlog()
        self.ledgers = {request_class: Ledger() for request_class in RequestClass}
        self.live: dict[int, Sequence] = {}
        """By number."""
        self.policy = policy
        self.ceiling: int | None = None
        """Largest decode batch that the SLO allows; None until the cost model is trusted."""
        self.fit = Fit()
        self.experience = self._no_experience()
        self.interference = Interference()
        self._planner = planner
        self._nested_planner: NestedPlanner = plan_nested
        self._last_online = -inf
        self._typical_prompt = 0.0
        self._mean_context = 0.0
        self._num_observed = 0
        self.configure(policy)

    def _no_experience(self) -> Experience:
        pool = self.residency.pool
        return Experience(pool.num_blocks * pool.block_tokens)

    # Coming and going

    def enter(self, sequence: Sequence, now: float) -> None:
        """Let a request wait."""
        request = sequence.request
        if request.request_class is RequestClass.ONLINE:
            self._last_online = now
        active = self._active(request.request_class)
        if request.tenant not in active:
            self.ledgers[request.request_class].lift(request.tenant, active)
        self.live[request.seq] = sequence
        self.backlog.add(request)
        self.experience.arrived(request, now)
        self.interference.arrived(request, now)

    def _active(self, request_class: RequestClass) -> set[str]:
        """Tenants that wait or hold KV."""
        active = self.backlog.tenants(request_class)
        active.update(
            resident.request.tenant
            for resident in self.residency.sequences()
            if resident.request.request_class is request_class
        )
        return active

    def leave(self, sequence: Sequence) -> None:
        """Take a request out, wherever it stands."""
        if sequence.request.phase is Phase.WAITING:
            self.backlog.remove(sequence.request)
        else:
            self.residency.release(sequence)
        del self.live[sequence.request.seq]

    def configure(self, policy: PolicyConfig) -> None:
        """Go by another configuration from now on. Sizes of KV stay what they are."""
        pool = self.residency.pool
        self.policy = replace(policy, num_blocks=pool.num_blocks, block_tokens=pool.block_tokens)
        weights = {name: share.weight for name, share in policy.tenants.items()}
        reserved = {name: share.reserved for name, share in policy.tenants.items()}
        self.interference.configure(policy.max_interference, policy.objective)
        for ledger in self.ledgers.values():
            ledger.reweigh(weights)
            ledger.reserve(reserved)
        for sequence in self.live.values():
            set_slo(sequence.request, sequence.generation, self.policy)
        self._refit()

    def forget(self) -> None:
        """Forget who was served, what was sent and how it went; the cost model stays."""
        self.ledgers = {request_class: Ledger() for request_class in RequestClass}
        self.experience = self._no_experience()
        self.interference = Interference()
        self._last_online = -inf
        self._typical_prompt = 0.0
        self.configure(self.policy)

    # One step

    def schedule(self, now: float) -> Step:
        """Plan a step and carry the plan out, up to the computing."""
        snapshot = self._look(now)
        step = self._carry_out(self._planner(snapshot), now)
        if step.plan.wait_until > now:
            return step  # the batch window: nobody is kept from a step
        for request in snapshot.waiting:
            if request.phase is Phase.WAITING:
                request.steps_waited += 1
        return replace(step, is_floor_met=self._is_floor_met(step))

    def nest(self, now: float, suspended: Step, seconds: float) -> Step:
        """Plan a step of so many seconds for newcomers beside a suspended one, and carry it out like any other.

        Nobody has waited a step longer for it.
        """
        in_flight = [sequence.request for sequence in suspended.members]
        step = self._carry_out(self._nested_planner(self._look(now), in_flight, seconds), now)
        return replace(step, is_floor_met=suspended.is_floor_met, is_nested=True)

    def _carry_out(self, plan: Plan, now: float) -> Step:
        live, residency = self.live, self.residency
        for request in plan.preempt:
            residency.release(live[request.seq])
            self.backlog.add(request)
        for request in plan.park:
            residency.park(live[request.seq])
        for request in plan.resume:
            residency.resume(live[request.seq])
            request.steps_waited = 0
        for request in plan.admit:
            self.backlog.remove(request)
            residency.admit(live[request.seq])
        decodes, chunks, num_deferred = self._make_room(plan)
        admissions = [self._note_admission(live[r.seq], now) for r in plan.admit if r.phase is Phase.RUNNING]
        return Step(
            plan=plan,
            decodes=decodes,
            chunks=chunks,
            admissions=tuple(admission for admission in admissions if admission is not None),
            num_deferred=num_deferred,
        )

    def _look(self, now: float) -> Snapshot:
        residency = self.residency
        if any(residency.held[RequestClass.ONLINE].values()) or self.backlog.count(RequestClass.ONLINE):
            self._last_online = now
        snapshot = take_snapshot(
            now=now,
            residents=residency.requests(),
            backlog=self.backlog,
            free_blocks=residency.pool.num_available,
            config=self.policy,
            cost=self.fit.model,
            ledgers=self.ledgers,
            last_online=self._last_online,
            typical_prompt=int(self._typical_prompt),
            ceiling=self.ceiling,
            allowance=self.interference.allowance,
            expectation=self.experience.expectation,
        )
        if residency.pool.has_prefix_cache:
            hinted = dict.fromkeys(RequestClass, 0)
            for request in snapshot.waiting:
                hinted[request.request_class] += 1
                if hinted[request.request_class] <= HINTED:
                    residency.hint(self.live[request.seq])
        return snapshot

    def _make_room(self, plan: Plan) -> tuple[list[Sequence], list[tuple[Sequence, int]], int]:
        """Allocate what the grants need. A grant that does not fit is put off: the next plan sees the true figures.

        That happens where a victim's blocks turn out to be part of an admitted prompt's cached prefix, which the plan
        counted as free.
        """
        decodes: list[Sequence] = []
        chunks: list[tuple[Sequence, int]] = []
        num_deferred = 0
        for request, granted in plan.grants:
            sequence = self.live[request.seq]
            num_tokens = min(granted, request.remaining)  # the cache may have given more than the plan knew of
            if not self.residency.extend(sequence, num_tokens):
                num_deferred += 1
                if request in plan.admit:
                    self.residency.release(sequence)
                    self.backlog.add(request)
            elif num_tokens == 1:
                decodes.append(sequence)
            else:
                chunks.append((sequence, num_tokens))
        return decodes, chunks, num_deferred

    def _note_admission(self, sequence: Sequence, now: float) -> Admission | None:
        """Learn from a first admission; a preempted request that returns is none."""
        request = sequence.request
        waited, request.steps_waited = request.steps_waited, 0
        if sequence.num_cached is not None:
            return None
        sequence.num_cached = min(request.num_computed, request.num_prompt)
        num_new = request.num_tokens - request.num_computed
        if request.request_class is RequestClass.ONLINE:
            self._typical_prompt += (num_new - self._typical_prompt) * (0.1 if self._typical_prompt else 1.0)
        return Admission(
            request_id=sequence.request_id,
            request_class=request.request_class,
            queued_seconds=max(0.0, now - request.arrival),
            steps_waited=waited,
            num_tokens=request.num_tokens,
            num_cached=request.num_computed,
        )

    @property
    def reserved(self) -> int:
        """Slots kept for offline."""
        slots = self.policy.slots
        return reserved_slots(self.policy.offline_share, slots, self.ceiling or slots)

    def _is_floor_met(self, step: Step) -> bool:
        offline = RequestClass.OFFLINE
        wanted = sum(self.residency.held[offline].values()) + self.backlog.count(offline)
        if not wanted:
            return True
        took = sum(sequence.request.request_class is offline for sequence in step.members)
        return took >= min(self.reserved, wanted)

    # Learning

    def observe(self, work: Work, seconds: float) -> None:
        """Take in what a step took; fit the cost model anew every so many steps."""
        self.fit.add(work, seconds)
        if work.num_decode:
            mean = work.decode_context / work.num_decode
            self._mean_context += (mean - self._mean_context) * (0.05 if self._mean_context else 1.0)
        self._num_observed += 1
        if self._num_observed % REFIT_STEPS == 0:
            self._refit()
            for request_class, ledger in self.ledgers.items():
                if len(ledger.services) > MOST_IDLE:
                    ledger.forget_idle(self._active(request_class))

    def _refit(self) -> None:
        model = self.fit.refit()
        self.ceiling = None
        if model.is_trusted:
            self.ceiling = model.batch_ceiling(
                slots=self.policy.slots,
                mean_context=self._mean_context,
                tpot=self.policy.tpot,
                ttft=self.policy.ttft,
                prompt=int(self._typical_prompt),
            )

    def check_integrity(self) -> None:
        """Compare residents, backlog and what entered.

        Raises:
            IntegrityError: says what does not balance.
        """
        self.residency.check_integrity(self.live.values())
        waiting = {request.seq for request in self.backlog}
        expected = {seq for seq, sequence in self.live.items() if sequence.request.phase is Phase.WAITING}
        if waiting != expected or len(self.backlog) != len(waiting):
            raise IntegrityError(f"the backlog holds {sorted(waiting)}, but {sorted(expected)} wait")
        counted = sum(self.backlog.count(request_class) for request_class in RequestClass)
        if counted != len(waiting):
            raise IntegrityError(f"the backlog counts {counted} requests and holds {len(waiting)}")
