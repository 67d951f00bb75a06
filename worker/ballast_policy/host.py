"""The policy of one engine with its state: waiting requests, residents, service of tenants, and learned values.

An engine reports every event to its `Host` and asks it for every step. The engine brings KV blocks (`Kv`), tensors, and
the clock. The host decides, carries the decision out on the KV, and learns from the result.

    enter, leave            a request arrives, or ends for any reason
    schedule, nest          plan a step, or a step nested in a suspended step, and carry the plan out
    began, ended            a step starts or resumes computing, and stops
    computed, settle        tokens of a request are computed; the tenants are charged
    observed                the time of the step
    configure, forget       use another configuration; forget everything except the cost model

An engine that carries plans out itself calls `snapshot`, then `preempt`, `park`, `resume` and `admit` for the requests
of the plan, and then `admissions` and `dispatched`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from typing import Protocol

from ballast_policy.backlog import Backlog
from ballast_policy.fairness.ledger import INPUT_COST, OUTPUT_COST, Ledger
from ballast_policy.fairness.tenant_slots import tenant_slots
from ballast_policy.learning.cost import CostModel, Fit, StepWork
from ballast_policy.learning.expectation import ExpectationLearner
from ballast_policy.learning.interference import Interference
from ballast_policy.plan import Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, WAITING, Phase, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_policy.step.planner import plan as plan_step
from ballast_policy.step.suspension import plan_nested

Planner = Callable[[EngineSnapshot], StepPlan]
NestedPlanner = Callable[[EngineSnapshot, Collection[Request], float], StepPlan]

REFIT_STEPS = 32
"""Steps between two fits of a trusted cost model; a quarter while it, or the cost of decodes, is not known. A fit takes
some hundred microseconds."""
CONTEXT_DRIFT = 0.05
"""Weight of a new step in the mean context of decodes. Half or twice changes nothing."""
MOST_KEPT = 1000
"""Most prefix keys, after which all are forgotten, and most idle tenants of a ledger. Bounds memory."""
PER_PLACE = 64
"""Offline requests with one prefix key that keep the place of the first, so that others wait for these at most."""
HINTED = 32
"""Waiting requests per class whose cached prefix is looked up. Bounds the cost: a step seldom admits more."""


class IllegalPlan(ValueError):
    """A plan that no engine can carry out, which is a defect of the planner."""


class Kv(Protocol):
    """The KV blocks of an engine. Each method updates the block counts of the request."""

    @property
    def num_free(self) -> int:
        """Return the blocks that no request uses, including cached blocks."""

    def hint(self, request: Request) -> None:
        """Set `num_cached` and `num_cached_idle` of a waiting request."""

    def admit(self, request: Request) -> None:
        """Share the cached blocks of its prefix with a request: set `num_blocks` and `num_computed`."""

    def extend(self, request: Request, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` more tokens; return False and change nothing if too few are free."""

    def release(self, request: Request) -> None:
        """Free all blocks of a preempted request: `num_blocks` and `num_computed` become 0."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """A plan after it was carried out: the work of one step."""

    plan: StepPlan
    grants: list[tuple[Request, int]]
    """Requests that compute, with their tokens; decodes first. Their blocks are allocated."""
    admissions: list[Request] = field(default_factory=list)
    """Requests that got their first slot."""
    num_deferred: int = 0
    """Grants of the plan whose blocks were not free."""
    is_nested: bool = False


class Host:
    """The policy of one engine. One thread calls it. Times are seconds on the engine's monotonic clock."""

    def __init__(
        self,
        config: PolicyConfig,
        *,
        cost: CostModel | None = None,
        planner: Planner = plan_step,
        nested_planner: NestedPlanner = plan_nested,
    ) -> None:
        """`cost` is a known cost model; without it the host fits one to the steps it observes."""
        self.config = config
        self.backlog = Backlog()
        self.residents: dict[int, Request] = {}
        """By `seq`, in the order of admission."""
        self.held = {c: Counter[Phase]() for c in RequestClass}
        self.reservation = config.reservation()
        self.ceiling: int | None = None
        """Largest batch that the SLO allows; None until the cost model is trusted."""
        self.fit = None if cost else Fit(expert_share=config.expert_share, is_encoder=config.is_encoder)
        self.cost = cost or CostModel()
        self.planner = planner
        self.nested_planner = nested_planner
        self._present: dict[RequestClass, dict[str, int]] = {c: {} for c in RequestClass}
        """Requests by tenant, from `enter` to `leave`."""
        self._bills: dict[RequestClass, dict[str, float]] = {c: {} for c in RequestClass}
        """What the step computed for each tenant and is not charged yet."""
        self._places: dict[int, tuple[int, int]] = {}
        """By prefix key: the `seq` of the request whose place in the order others share, and the requests since."""
        self._mean_context = 0.0
        self._num_observed = 0
        self._num_ahead = 0
        """Offline tokens of an encoder beyond its reservation, which later steps leave out; at most a whole step's."""
        self._stopped: Request | None = None
        """The online prompt that did not fit into the last step."""
        self.forget()

    def enter(self, request: Request, now: float) -> None:
        """Add a request to those that wait. Offline requests with one prefix key share a place in the order."""
        request_class, tenant = request.request_class, request.tenant
        present = self._present[request_class]
        if tenant not in present:
            self.ledgers[request_class].lift(tenant, present)
        present[tenant] = present.get(tenant, 0) + 1
        if request_class is OFFLINE and (key := request.prefix_key) is not None:
            first, num = self._places.get(key, (request.seq, 0))
            if num == PER_PLACE:
                first, num = request.seq, 0
            elif not num and len(self._places) == MOST_KEPT:
                self._places.clear()
            self._places[key] = first, num + 1
            request.prefix_seq = first
        self.backlog.add(request)
        self.expectations.arrived(request, now)
        self.interference.arrived(request, now)

    def leave(self, request: Request, now: float, *, is_complete: bool) -> None:
        """Remove a request that waits or is resident, but not its blocks. `is_complete`: it has its whole answer."""
        if request.phase is WAITING:
            self.backlog.remove(request)
        else:
            self._move(request, WAITING, RUNNING, PARKED)
            del self.residents[request.seq]
        present = self._present[request.request_class]
        present[request.tenant] -= 1
        if not present[request.tenant]:
            del present[request.tenant]
        if request.request_class is OFFLINE and not self.count(OFFLINE):
            self.reservation = self.reservation.used_by(0, 0)  # no later step updates it
        self.interference.finished(request, now, self.cost.decode(request.num_tokens, num=request.num_output - 1))
        if is_complete:
            self.expectations.finished(request)

    def count(self, request_class: RequestClass) -> int:
        """Return the requests of a class that wait or are resident."""
        return self.backlog.count(request_class) + sum(self.held[request_class].values())

    @property
    def num_entitled(self) -> int:
        """Return the offline requests that wait or are resident, counted up to the slot caps of their tenants."""
        if caps := self.config.tenant_caps:
            return sum([min(number, caps.get(tenant, number)) for tenant, number in self._present[OFFLINE].items()])
        return self.count(OFFLINE)

    def configure(self, config: PolicyConfig) -> None:
        """Use another configuration from the next step on."""
        self.config = config
        weights = {name: share.weight for name, share in config.tenants.items()}
        reserved = {name: share.reserved for name, share in config.tenants.items()}
        for ledger in self.ledgers.values():
            ledger.weights = weights
            ledger.reserve(reserved)
        self.interference.configure(config.max_interference, config.objective, (config.ttft, config.tpot))
        self._refit()

    def forget(self) -> None:
        """Forget the service of tenants, and everything learned except the cost model."""
        self.ledgers = {c: Ledger() for c in RequestClass}
        self.expectations = ExpectationLearner()
        self.interference = Interference()
        self.configure(self.config)

    def schedule(self, kv: Kv, now: float) -> Dispatch:
        """Plan a step and carry the plan out, up to the computing."""
        snapshot = self.snapshot(kv, now)
        return self.dispatch(snapshot, self.planner(snapshot), kv)

    def nest(self, kv: Kv, now: float, in_flight: Collection[Request], seconds: float) -> Dispatch:
        """Plan a step of at most `seconds` for new online requests while the step of `in_flight` is suspended."""
        snapshot = self.snapshot(kv, now)
        nested = self.nested_planner(snapshot, in_flight, seconds)
        return replace(self._carry_out(nested, kv, now), is_nested=True)

    def snapshot(self, kv: Kv, now: float) -> EngineSnapshot:
        """Return everything that a plan may depend on. The private blocks of residents must be up to date."""
        residents = list(self.residents.values())
        self.backlog.defer(now)
        waiting = self._first_waiting(residents) if len(self.backlog) else []
        for request_class in RequestClass:
            for request in islice((r for r in waiting if r.request_class is request_class), HINTED):
                kv.hint(request)
        reserved, ahead, config = self.reservation, self._num_ahead, self.config
        if not (self.cost.is_trusted or config.is_encoder or (self._num_observed + 1) % (REFIT_STEPS // 4)):
            # From full steps alone, their fixed cost stays unknown.
            config = replace(config, chunk_tokens=max(reserved.chunk, -(-config.chunk_tokens // 2)))
        return EngineSnapshot(
            now=now,
            residents=residents,
            waiting=waiting,
            free_blocks=kv.num_free,
            config=config,
            cost=self.cost,
            reservation=replace(reserved, chunk=max(0, reserved.chunk - ahead)) if ahead else reserved,
            ledgers=self.ledgers,
            typical_prompt=int(self.expectations.typical_prompt),
            allowance=self.interference.allowance,
            expectation=self.expectations.expectation,
        )

    def _first_waiting(self, residents: Sequence[Request]) -> list[Request]:
        """Return the waiting requests that a step could admit, in order, and the next one of each class."""
        config, backlog = self.config, self.backlog
        running = [request for request in residents if request.phase is RUNNING]
        free = config.tenant_slots_left(request for request in running if request.request_class is OFFLINE)
        held = min(self.held[c][RUNNING] for c in RequestClass if backlog.count(c))
        slots = {c: tenant_slots(self.ledgers[c], (r for r in running if r.request_class is c)) for c in RequestClass}
        return backlog.head(config.slots - held + 1, self.ledgers, free, config.chunk_tokens, slots)

    def dispatch(self, snapshot: EngineSnapshot, plan: StepPlan, kv: Kv) -> Dispatch:
        """Carry out the plan of a step that begins now."""
        dispatch = self._carry_out(plan, kv, snapshot.now)
        self.dispatched(plan, snapshot.waiting, snapshot.now)
        return dispatch

    def dispatched(self, plan: StepPlan, waiting: Iterable[Request], now: float) -> None:
        """Count the step of those in `waiting` that still wait, and update the use of the reservation."""
        if plan.wait_until > now:
            return  # in a batch window no request misses a step
        for request in waiting:
            if request.phase is WAITING:
                request.steps_waited += 1
        num_prefill, running = 0, self.held[OFFLINE][RUNNING]
        if self.config.is_encoder and self.count(ONLINE):
            num_prefill = self._count_ahead(plan)
        elif running < self.reservation.slots:  # otherwise it is met in any case
            num_prefill = sum([n for request, n in plan.grants if n > 1 and request.request_class is OFFLINE])
        self.reservation = self.reservation.used_by(running, self.num_entitled, num_prefill)

    def _count_ahead(self, plan: StepPlan) -> int:
        """Return the tokens of offline in this step and in advance: it may take a whole step (`_takes_turn`)."""
        online = sum([tokens for request, tokens in plan.grants if request.request_class is ONLINE])
        granted = sum([tokens for _, tokens in plan.grants]) - online
        spent = (because.request for because in plan.because if because.reason is Reason.CHUNK_SPENT)
        stopped = next((request for request in spent if request.request_class is ONLINE), None)
        if granted and stopped and (not online or stopped is self._stopped):  # it does not fit beside offline
            granted = max(granted, self.config.chunk_tokens - online)  # a prompt of one token takes none of the chunk
        self._stopped = stopped
        num_prefill = self._num_ahead + granted
        self._num_ahead = min(max(0, num_prefill - self.reservation.chunk), self.config.chunk_tokens)
        return num_prefill

    def _carry_out(self, plan: StepPlan, kv: Kv, now: float) -> Dispatch:
        for request in plan.preempt:
            self.preempt(request)
            kv.release(request)
        for request in plan.park:
            self.park(request)
        for request in plan.resume:
            self.resume(request)
        for request in plan.admit:
            self.admit(request)
            kv.admit(request)
        grants: list[tuple[Request, int]] = []
        num_deferred = 0
        for request, granted in plan.grants:
            num_tokens = min(granted, request.remaining)  # the cache may hold more than the hint
            if num_tokens < 1 or request.phase is not RUNNING or (num_tokens < granted and request not in plan.admit):
                raise IllegalPlan(f"{granted} tokens granted to {request}")
            if kv.extend(request, num_tokens):
                grants.append((request, num_tokens))
                continue
            # A victim's blocks that the plan counted as free belong to the cached prefix of an admitted prompt.
            num_deferred += 1
            if request in plan.admit:
                kv.release(request)
                self.preempt(request)
        return Dispatch(plan, grants, self.admissions(plan, now), num_deferred)

    def admissions(self, plan: StepPlan, now: float) -> list[Request]:
        """Return the requests that got their first slot, and note when. Their `num_computed` are cached tokens."""
        admissions = [r for r in plan.admit if r.phase is RUNNING and r.admitted == inf]
        for request in admissions:
            request.admitted = now
            request.num_prompt_cached = min(request.num_computed, request.num_prompt)
            self.expectations.admitted(request, request.remaining)
        return admissions

    def admit(self, request: Request) -> None:
        self._move(request, RUNNING, WAITING)
        self.backlog.remove(request)
        self.residents[request.seq] = request

    def preempt(self, request: Request) -> None:
        self._move(request, WAITING, RUNNING, PARKED)
        del self.residents[request.seq]
        request.steps_waited = 0
        self.backlog.add(request)

    def park(self, request: Request) -> None:
        self._move(request, PARKED, RUNNING)

    def resume(self, request: Request) -> None:
        self._move(request, RUNNING, PARKED)

    def _move(self, request: Request, phase: Phase, *before: Phase) -> None:
        if request.phase not in before:
            raise IllegalPlan(f"{request} cannot become {phase.name}: it is {request.phase.name}")
        held = self.held[request.request_class]
        if request.phase is not WAITING:
            held[request.phase] -= 1
        if phase is not WAITING:
            held[phase] += 1
        request.phase = phase

    def began(self, plan: StepPlan, now: float) -> None:
        self.interference.began(plan, now)

    def ended(self, now: float) -> None:
        self.interference.ended(now)

    def computed(self, request: Request, num_tokens: int, now: float) -> tuple[int, int]:
        """Charge the last `num_tokens` of `request.num_computed`. Call it before the request gets its new token.

        Return how many of them are new prompt tokens, and how many were computed before, which are not charged again.
        """
        end, before = request.num_computed, request.most_computed
        is_drawn = end == request.num_tokens
        cost = OUTPUT_COST if is_drawn and end > before and not self.config.is_encoder else 0.0
        found = 0, 0
        if end > before:
            request.most_computed = end
        if num_tokens > 1 or end <= before or end <= request.num_prompt:
            start = end - num_tokens
            num_new = max(0, min(end, request.num_prompt) - max(start, before))
            cost += INPUT_COST * num_new
            found = num_new, max(0, min(end, before) - start)
        if cost:
            bills, tenant = self._bills[request.request_class], request.tenant
            bills[tenant] = bills.get(tenant, 0.0) + cost
        if is_drawn and request.first_token == inf:
            request.first_token = now
            own = self.cost.k0 + self.cost.prefill(done := request.num_prompt_cached, request.num_prompt - done)
            self.interference.answered(request, now, own)
        return found

    def settle(self) -> Iterable[tuple[RequestClass, Mapping[str, float]]]:
        """Charge what the step computed to the tenants; return the charges by class and tenant."""
        charged = [(request_class, bills) for request_class, bills in self._bills.items() if bills]
        for request_class, bills in charged:
            for tenant, cost in bills.items():
                self.ledgers[request_class].charge(tenant, cost)
            self._bills[request_class] = {}
        return charged

    def observed(self, work: StepWork, seconds: float) -> None:
        """Learn from the time that a step took, without the time that it was suspended."""
        if self.fit:
            self.fit.add(work, seconds)
        if work.num_decode:
            mean = work.decode_context / work.num_decode
            self._mean_context += (mean - self._mean_context) * (CONTEXT_DRIFT if self._mean_context else 1.0)
        self._num_observed += 1
        knows_decodes = not work.num_decode or self.cost.k3 + self.cost.k4 > 0
        if self._num_observed % (REFIT_STEPS if self.cost.is_trusted and knows_decodes else REFIT_STEPS // 4) == 0:
            self._refit()
            for request_class, ledger in self.ledgers.items():
                if len(ledger.services) > MOST_KEPT:
                    ledger.forget_idle(self._present[request_class], MOST_KEPT)

    def _refit(self) -> None:
        if self.fit:
            was_trusted, self.cost = self.cost.is_trusted, self.fit.refit()
            if self.cost.is_trusted and not was_trusted:
                self.interference.restart()
        self.ceiling = None
        if self.cost.is_trusted:
            config, prompt = self.config, int(self.expectations.typical_prompt)
            self.ceiling = self.cost.batch_ceiling(
                slots=config.slots, mean_context=self._mean_context, tpot=config.tpot, ttft=config.ttft, prompt=prompt
            )
        size = self.config.reservation(self.ceiling)
        self.reservation = replace(self.reservation, slots=size.slots, blocks=size.blocks, chunk=size.chunk)

    def imbalance(self) -> str:
        """Return the counts that disagree; empty if none do."""
        held = {c: Counter(r.phase for r in self.residents.values() if r.request_class is c) for c in RequestClass}
        present = {c: sum(tenants.values()) for c, tenants in self._present.items()}
        pairs = (
            ("waiting requests", len(self.backlog), len({r.seq for r in self.backlog} - self.residents.keys())),
            ("residents by phase", self.held, held),
            ("requests present", present, {c: self.count(c) for c in RequestClass}),
        )
        return "; ".join(f"{name}: {kept} counted, {found} found" for name, kept, found in pairs if kept != found)
