"""An engine in virtual time: it carries out the plans of a policy exactly as they are, and asserts that they can be.

The backlog, the ledgers and the decision are those of `ballast_policy`; only the step's duration and the tokens are
made up, by a step model and by the trace's lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import exp
from random import Random
from typing import NamedTuple, Protocol

from ballast_policy.backlog import Backlog
from ballast_policy.cost import attended
from ballast_policy.experience import Experience
from ballast_policy.fairness import INPUT_COST, OUTPUT_COST, Ledger
from ballast_policy.holding import note_holding
from ballast_policy.interference import Interference
from ballast_policy.plan import Plan
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.snapshot import PolicyConfig, Snapshot, take_snapshot
from ballast_policy.suspension import plan_nested
from ballast_sim.clock import Clock
from ballast_sim.errors import IllegalPlan
from ballast_sim.fairness import Samples
from ballast_sim.flight import Flight
from ballast_sim.guarantees import Guarantees
from ballast_sim.item import Item
from ballast_sim.knowledge import Knowledge
from ballast_sim.kv import Kv
from ballast_sim.step_model import StepModel, Work

CHECK_EVERY = 512
"""Steps between two audits of the KV books; they are audited whenever a replica falls idle, too."""

STALLED = 1000
"""Looks in a row that find work and run none of it: the policy has forgotten it (G3)."""
LOOK_AGAIN_SECONDS = 0.001
SAMPLE_EVERY = 16
"""Steps between two looks at the tenants' service."""


class Policy(Protocol):
    """What decides: Ballast's `plan`, or one of the baselines."""

    def plan(self, snapshot: Snapshot) -> Plan:
        """Decide the next step."""


class Step(NamedTuple):
    """What one step was: its time, who held slots, and the tokens computed by class and phase."""

    start: float
    seconds: float
    predicted: float
    online_slots: int
    offline_slots: int
    parked: int
    online_waiting: int
    offline_at_hand: int
    """Offline requests that wait, run or are parked here."""
    ceiling: int
    """Slots that the SLO carries, as the policy knew it."""
    online_prefill: int
    offline_prefill: int
    online_decode: int
    offline_decode: int
    is_nested: bool = False
    """It was computed while the one before it in the log stood still."""


@dataclass
class Replica:
    """One engine. `receive` gives it work; it steps as long as it has any."""

    name: str
    clock: Clock
    config: PolicyConfig
    policy: Policy
    model: StepModel
    known: Knowledge
    random: Random
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time around the model's."""
    has_prefix_cache: bool = False
    is_fair: bool = True
    """False: the policy is not told who was served how much."""
    num_layers: int = 32
    """Of the model: between two of them a step can stand still."""
    guarantees: Guarantees | None = None
    refill: Callable[[Replica], None] = lambda _: None
    """Asked before each step to top up the offline work at hand."""
    on_admit: Callable[[Item], None] = lambda _: None
    """An offline request got its first slot."""
    on_finish: Callable[[Item], None] = lambda _: None
    kv: Kv = field(init=False)
    backlog: Backlog = field(init=False, default_factory=Backlog)
    ledgers: dict[RequestClass, Ledger] = field(init=False)
    items: dict[int, Item] = field(init=False, default_factory=dict)
    """Everything here that has not finished, by `seq`."""
    residents: dict[int, Request] = field(init=False, default_factory=dict)
    steps: list[Step] = field(init=False, default_factory=list)
    num_preempted: int = field(init=False, default=0)
    num_parked: int = field(init=False, default=0)
    """Park decisions carried out."""
    num_suspended: int = field(init=False, default=0)
    """Steps that stood still for newcomers."""
    num_running: dict[RequestClass, int] = field(init=False)
    is_busy: bool = field(init=False, default=False)
    _is_resting: bool = field(init=False, default=False)
    """Busy with nothing but waiting: a plan was to begin later."""
    _num_begins: int = field(init=False, default=0)
    experience: Experience = field(init=False)
    interference: Interference = field(init=False, default_factory=Interference)
    _stalled: int = field(init=False, default=0)
    _flight: Flight | None = field(init=False, default=None)
    """The step that is being computed, or stands still."""
    samples: dict[RequestClass, Samples] = field(init=False)
    """Service of tenants over time, by class."""
    _active: dict[RequestClass, dict[str, int]] = field(init=False)
    """Requests of each tenant that wait or run."""

    def __post_init__(self) -> None:
        weights = {tenant: share.weight for tenant, share in self.config.tenants.items()}
        self.kv = Kv(self.config.num_blocks, self.config.block_tokens, self.has_prefix_cache)
        reserved = {tenant: share.reserved for tenant, share in self.config.tenants.items()}
        self.ledgers = {request_class: Ledger(weights, reserved) for request_class in RequestClass}
        self.experience = Experience(self.config.num_blocks * self.config.block_tokens)
        self.interference.configure(self.config.max_interference, self.config.objective)
        self.num_running = dict.fromkeys(RequestClass, 0)
        self.samples = {request_class: Samples() for request_class in RequestClass}
        self._active = {request_class: {} for request_class in RequestClass}

    @property
    def load(self) -> int:
        """Online requests that wait or run here: what the router compares."""
        return self.backlog.count(RequestClass.ONLINE) + self.num_running[RequestClass.ONLINE]

    def receive(self, items: Iterable[Item]) -> None:
        """Take requests in; an idle replica begins a step once everything due at this time has arrived."""
        self.take(items)
        self.wake()

    def take(self, items: Iterable[Item]) -> None:
        """Let requests wait."""
        for item in items:
            request = item.request
            active = self._active[request.request_class]
            if request.tenant not in active:
                self.ledgers[request.request_class].lift(request.tenant, active)
            active[request.tenant] = active.get(request.tenant, 0) + 1
            self.items[request.seq] = item
            self.backlog.add(request)
            self.experience.arrived(request, self.clock.now)
            self.interference.arrived(request, self.clock.now)
            if request.request_class is RequestClass.ONLINE:
                self.known.last_online = self.clock.now
                self._interrupt()

    def wake(self) -> None:
        """Begin a step as soon as nothing else is due at this time, or look again where the last plan was to wait."""
        if not self.is_busy or self._is_resting:
            self.is_busy = True
            self._begin_at(self.clock.now)

    def _begin_at(self, seconds: float) -> None:
        """Begin a step then, unless another begin is set meanwhile."""
        self._num_begins += 1
        mine = self._num_begins
        self.clock.at(seconds, lambda: self._begin() if mine == self._num_begins else None, rank=1)

    def _begin(self) -> None:
        self._is_resting = False
        self.refill(self)
        snapshot = self._snapshot()
        plan = self.policy.plan(snapshot)
        flight = self._apply(plan)
        if self.guarantees:
            self.guarantees.check(snapshot, plan, self.num_running)
        if not plan.grants:
            self._rest(plan.wait_until)
            return
        self._stalled = 0
        self._flight = flight
        flight.suspendable = plan.suspendable_seconds
        self._go_on(flight)

    def _go_on(self, flight: Flight) -> None:
        """Compute a step from where it stands to its end."""
        flight.run_from = self.clock.now
        self.interference.began(flight.plan, self.clock.now)
        self.clock.at(self.clock.now + flight.left, partial(self._end, flight, flight.num_turns), rank=1)

    def _interrupt(self) -> None:
        """Let a step in flight stand still at the end of its layer, if it may."""
        flight = self._flight
        if flight and flight.suspendable > 0 and not flight.is_interrupted:
            at = flight.next_boundary(self.clock.now)
            if at is not None:
                flight.is_interrupted = True
                self.clock.at(at, lambda: self._suspend(flight), rank=1)

    def _suspend(self, flight: Flight) -> None:
        """Nest a step for newcomers in one that stands still, and let it go on where there is none."""
        flight.is_interrupted = False
        if self._flight is not flight:
            return
        nested = None
        if flight.suspendable > 0 and self.backlog.count(RequestClass.ONLINE):
            plan = plan_nested(self._snapshot(), [item.request for item in flight.items], flight.suspendable)
            nested = self._apply(plan, is_nested=True) if plan.grants else None
        if nested is None:
            if not flight.is_running:
                self._go_on(flight)
            return
        self.num_suspended += flight.is_running
        flight.stand(self.clock.now)
        self.interference.began(nested.plan, self.clock.now)
        flight.suspendable -= nested.seconds
        self.clock.at(self.clock.now + nested.seconds, lambda: self._resume(flight, nested), rank=1)

    def _resume(self, flight: Flight, nested: Flight) -> None:
        """Give out the first tokens of a nested step, and look for newcomers once more before going on."""
        self._deliver(nested)
        self._suspend(flight)

    def _rest(self, until: float) -> None:
        """Nothing to compute: sleep until work comes, or look again soon where the policy lets work wait."""
        if not self.items:
            self.is_busy = False
            self.kv.check(())
            return
        is_owed = self.guarantees or self.residents or self.backlog.count(RequestClass.ONLINE)
        self._stalled += 1 if is_owed else 0  # a gateway may hold offline work back
        if self._stalled > STALLED:
            raise IllegalPlan(f"{len(self.items)} requests wait or are resident, and no plan runs any of them")
        again = until if until > self.clock.now else self.clock.now + LOOK_AGAIN_SECONDS
        self._is_resting = True
        self._begin_at(again)

    def _snapshot(self) -> Snapshot:
        now, known = self.clock.now, self.known
        residents = list(self.residents.values())
        if self.num_running[RequestClass.ONLINE] or self.backlog.count(RequestClass.ONLINE):
            known.last_online = now
        snapshot = take_snapshot(
            now=now,
            residents=residents,
            backlog=self.backlog,
            free_blocks=self.kv.free,
            config=self.config,
            cost=known.cost,
            ledgers=self.ledgers if self.is_fair else {},
            last_online=known.last_online,
            typical_prompt=int(known.typical_prompt),
            ceiling=known.ceiling,
            allowance=self.interference.allowance,
            expectation=self.experience.expectation,
        )
        if self.has_prefix_cache:
            for request in snapshot.waiting:
                self.kv.look_up(self.items[request.seq])
        return snapshot

    def _apply(self, plan: Plan, *, is_nested: bool = False) -> Flight:
        """Carry out the decisions, allocate KV, and sum up the step's work."""
        running = self.num_running
        for request in plan.preempt:
            self._preempt(request)
        for request in plan.park:
            _expect(request, Phase.RUNNING, "park")
            request.phase = Phase.PARKED
            running[request.request_class] -= 1
            self.num_parked += 1
        for request in plan.resume:
            _expect(request, Phase.PARKED, "resume")
            request.phase = Phase.RUNNING
            running[request.request_class] += 1
        for request in plan.admit:
            self._admit(request)
        num_running = sum(running.values())
        if num_running > self.config.slots:
            raise IllegalPlan(f"{num_running} requests hold a slot, there are {self.config.slots}")
        items, work, tokens = self._grant(plan)
        note_holding(self.ledgers, self.residents.values(), self.backlog, now=self.clock.now, slots=self.config.slots)
        parked = len(self.residents) - num_running
        online, offline = running[RequestClass.ONLINE], running[RequestClass.OFFLINE]
        waiting = self.backlog.count(RequestClass.ONLINE)
        at_hand = len(self.items) - waiting - online
        seconds = self.model.seconds(work)
        if self.noise:
            seconds *= exp(self.random.gauss(0.0, self.noise))
        if items:
            ceiling = self.known.ceiling or self.config.slots
            log = (online, offline, parked, waiting, at_hand, ceiling, *tokens, is_nested)
            self.steps.append(Step(self.clock.now, seconds, plan.predicted_seconds, *log))
        return Flight(plan, items, work, seconds, self.num_layers)

    def _grant(self, plan: Plan) -> tuple[list[Item], Work, tuple[int, int, int, int]]:
        """Allocate what is granted; give who takes part, the work (one token costs what a decode does) and the log."""
        items, block_tokens = self.items, self.config.block_tokens
        prefill = {RequestClass.ONLINE: 0, RequestClass.OFFLINE: 0}
        decode = {RequestClass.ONLINE: 0, RequestClass.OFFLINE: 0}
        pairs, num_prefill, before, num_decode, context, chunks = 0.0, 0, 0, 0, 0, 0
        grants: list[Item] = []
        for request, tokens in plan.grants:
            computed = request.num_computed
            remaining = request.num_tokens - computed
            item = items[request.seq]
            if request.phase is not Phase.RUNNING or not 0 < tokens <= remaining or item.num_granted:
                raise IllegalPlan(f"{tokens} tokens granted to {request}, {item.num_granted} before in this plan")
            if computed + tokens > request.num_blocks * block_tokens and not self._extend(item, tokens):
                continue
            item.num_granted = tokens
            grants.append(item)
            log = prefill if remaining > 1 else decode
            log[request.request_class] += tokens
            if tokens == 1:
                num_decode += 1
                context += computed + 1
            else:
                num_prefill += tokens
                pairs += attended(computed, tokens)
                before += computed
                chunks += 1
        return (
            grants,
            Work(num_prefill, pairs, before, num_decode, context, chunks),
            (
                prefill[RequestClass.ONLINE],
                prefill[RequestClass.OFFLINE],
                decode[RequestClass.ONLINE],
                decode[RequestClass.OFFLINE],
            ),
        )

    def _extend(self, item: Item, tokens: int) -> bool:
        """Allocate KV for a grant; with a prefix cache a grant that does not fit is put off, as in the engine.

        There a victim's blocks may turn out to be part of an admitted prompt's prefix, which the plan counted as free.
        """
        if self.kv.extend(item, tokens):
            return True
        request = item.request
        if not self.has_prefix_cache:
            raise IllegalPlan(f"{tokens} tokens granted to {request}, {self.kv.free} KV blocks are free")
        if request.num_output == 0 and item.peak_computed == 0:
            self._preempt(request)
        return False

    def _admit(self, request: Request) -> None:
        _expect(request, Phase.WAITING, "admit")
        self.backlog.remove(request)
        item = self.items[request.seq]
        self.kv.admit(item)
        request.phase = Phase.RUNNING
        self.residents[request.seq] = request
        self.num_running[request.request_class] += 1
        if item.admitted > self.clock.now:
            item.admitted = self.clock.now
            if request.request_class is RequestClass.OFFLINE:
                self.on_admit(item)
            else:
                self.known.admitted(request.num_tokens - request.num_computed)

    def _preempt(self, request: Request) -> None:
        if request.seq not in self.residents:
            raise IllegalPlan(f"preempts {request}, which holds no KV")
        if request.phase is Phase.RUNNING:
            self.num_running[request.request_class] -= 1
        self.kv.release(self.items[request.seq], is_preempted=True)
        del self.residents[request.seq]
        request.phase = Phase.WAITING
        request.steps_waited = 0
        self.backlog.add(request)
        self.num_preempted += 1

    def _end(self, flight: Flight, turn: int) -> None:
        """A step has come to its end, unless it stood still on the way and will end later."""
        if turn != flight.num_turns:
            return
        self._flight = None
        self.interference.ended(self.clock.now)
        self._deliver(flight)
        self._begin()

    def _deliver(self, flight: Flight) -> None:
        """Take note of what a step computed."""
        now = self.clock.now
        charges: dict[tuple[RequestClass, str], float] = {}
        for item in flight.items:
            request, tokens = item.request, item.num_granted
            item.num_granted = 0
            computed = request.num_computed + tokens
            request.num_computed = computed
            cost = 0.0
            if computed > item.peak_computed:
                first = max(item.peak_computed, computed - tokens)
                item.num_recomputed += tokens - (computed - first)
                if first < request.num_prompt:
                    cost = INPUT_COST * (min(computed, request.num_prompt) - first)
                item.peak_computed = computed
            else:
                item.num_recomputed += tokens
            if item.prefix_tokens:
                self.kv.publish(item)
            if computed == request.num_tokens:
                cost += OUTPUT_COST
                self._emit(item, now)
            if cost:
                key = (request.request_class, request.tenant)
                charges[key] = charges.get(key, 0.0) + cost
        for (request_class, tenant), cost in charges.items():
            self.ledgers[request_class].charge(tenant, cost)
        self.known.stepped(flight.work, flight.seconds, self.config)
        if len(self.steps) % SAMPLE_EVERY == 0:
            self._sample()
        if len(self.steps) % CHECK_EVERY == 0:
            self.kv.check(self._resident_items())

    def _emit(self, item: Item, now: float) -> None:
        """One more token; the last one ends the request."""
        request = item.request
        if request.num_output == 0:
            item.first_token = request.first_token = now
            self.interference.answered(request, now)
        if now > request.next_deadline:
            item.num_late += 1
        request.num_output += 1
        if request.num_output < item.num_output:
            request.num_tokens += 1
            return
        item.last_token = now
        self.interference.finished(request, now)
        self.experience.finished(request)
        self.kv.release(item, is_preempted=False)
        self.kv.forget(request.seq)
        del self.residents[request.seq], self.items[request.seq]
        self.num_running[request.request_class] -= request.phase is Phase.RUNNING
        active = self._active[request.request_class]
        active[request.tenant] -= 1
        if not active[request.tenant]:
            del active[request.tenant]
        self.on_finish(item)

    def _sample(self) -> None:
        """Note the service of the tenants that wait, where several do."""
        for request_class, samples in self.samples.items():
            waiting = self.backlog.tenants(request_class)
            if len(waiting) > 1:
                ledger = self.ledgers[request_class]
                samples.times.append(self.clock.now)
                samples.service.append({tenant: ledger.service(tenant) for tenant in waiting})

    def _resident_items(self) -> list[Item]:
        return [self.items[seq] for seq in self.residents]


def _expect(request: Request, phase: Phase, verb: str) -> None:
    if request.phase is not phase:
        raise IllegalPlan(f"would {verb} {request}, which is {request.phase.name}")
