"""An engine in virtual time: it carries out the plans of a policy exactly as they are, and asserts that they can be.

The policy host decides, as in a real engine. Only the time of a step and the tokens are made up, by a step model and by
the lengths of the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from math import exp
from random import Random
from typing import NamedTuple, Protocol

from ballast_policy.host import Dispatch, Host
from ballast_policy.learning.cost import CostModel, StepWork, attended
from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, RUNNING, RequestClass
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig
from ballast_sim.clock import Clock
from ballast_sim.errors import IllegalPlan
from ballast_sim.fairness import Samples
from ballast_sim.flight import Flight
from ballast_sim.guarantees import Guarantees
from ballast_sim.item import Item
from ballast_sim.kv import Kv
from ballast_sim.step_model import BatchWork, StepModel

CHECK_EVERY = 512
"""Steps between two audits of all counts; they are audited whenever a replica falls idle, too."""

STALLED = 1000
"""Plans in a row that run nothing although work waits: the policy has forgotten it (G3)."""
LOOK_AGAIN_SECONDS = 0.001
SAMPLE_EVERY = 16
"""Steps between two samples of the tenants' service."""


class Policy(Protocol):
    """What decides: Ballast's `plan`, or one of the baselines."""

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Decide the next step."""


class Step(NamedTuple):
    """The log of one step: its time, the slots by class, and the tokens computed by class and phase."""

    start: float
    seconds: float
    predicted: float
    online_slots: int
    offline_slots: int
    parked: int
    online_waiting: int
    offline_present: int
    """Offline requests that wait, run or are parked here."""
    ceiling: int | None
    """Largest decode batch within the SLO, as the policy knew it."""
    online_prefill: int
    offline_prefill: int
    online_decode: int
    offline_decode: int
    is_nested: bool = False
    """It was computed while the step before it in the log was suspended."""


@dataclass
class Replica:
    """One engine. `receive` gives it work; it steps as long as it has any."""

    name: str
    clock: Clock
    config: PolicyConfig
    policy: Policy
    model: StepModel
    random: Random
    cost: CostModel | None = None
    """What the policy plans by; None: fitted to the run's own steps, as a real engine does."""
    noise: float = 0.0
    """Standard deviation of the logarithm of a step's time around the model's."""
    has_prefix_cache: bool = False
    num_layers: int = 32
    """Of the model: a step can be suspended between two of them."""
    guarantees: Guarantees | None = None
    refill: Callable[[Replica], None] = lambda _: None
    """Called before each step to top up the offline work."""
    on_admit: Callable[[Item], None] = lambda _: None
    """An offline request got its first slot."""
    on_finish: Callable[[Item], None] = lambda _: None
    host: Host = field(init=False)
    kv: Kv = field(init=False)
    items: dict[int, Item] = field(init=False, default_factory=dict)
    """Every request here that has not finished, by `seq`."""
    steps: list[Step] = field(init=False, default_factory=list)
    num_preempted: int = field(init=False, default=0)
    num_parked: int = field(init=False, default=0)
    """Park decisions carried out."""
    num_suspended: int = field(init=False, default=0)
    """Steps that were suspended for newcomers."""
    is_busy: bool = field(init=False, default=False)
    _is_resting: bool = field(init=False, default=False)
    """Busy with waiting only: the plan was to begin later."""
    _num_begins: int = field(init=False, default=0)
    _stalled: int = field(init=False, default=0)
    _flight: Flight | None = field(init=False, default=None)
    """The step that is being computed, or is suspended."""
    samples: dict[RequestClass, Samples] = field(init=False)
    """Service of tenants over time, by class."""

    def __post_init__(self) -> None:
        self.host = Host(self.config, cost=self.cost, planner=self.policy.plan)
        sizes = self.config.num_blocks, self.config.block_tokens
        self.kv = Kv(*sizes, self.items, has_prefix_cache=self.has_prefix_cache)
        self.samples = {request_class: Samples() for request_class in RequestClass}

    @property
    def load(self) -> int:
        """Online requests that wait or run here: what the router compares."""
        return self.host.backlog.count(ONLINE) + self.host.held[ONLINE][RUNNING]

    def receive(self, items: Iterable[Item]) -> None:
        """Take requests in; an idle replica begins a step once everything due at this time has arrived."""
        self.take(items)
        self.wake()

    def take(self, items: Iterable[Item]) -> None:
        """Let requests wait."""
        for item in items:
            request = item.request
            self.items[request.seq] = item
            self.host.enter(request, self.clock.now)
            if request.request_class is ONLINE:
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
        snapshot = self.host.snapshot(self.kv, self.clock.now)
        plan = self.policy.plan(snapshot)
        flight = self._lay_out(self.host.dispatch(snapshot, plan, self.kv))
        if self.guarantees:
            self.guarantees.check(snapshot, plan, self._num_running)
        if not plan.grants:
            self._rest(plan.wait_until)
            return
        self._stalled = 0
        self._flight = flight
        flight.suspendable = plan.suspendable_seconds
        self._go_on(flight)

    @property
    def _num_running(self) -> dict[RequestClass, int]:
        return {request_class: held[RUNNING] for request_class, held in self.host.held.items()}

    def _go_on(self, flight: Flight) -> None:
        """Compute a step from where it was suspended to its end."""
        flight.run_from = self.clock.now
        self.host.began(flight.plan, self.clock.now)
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
        """Nest a step for newcomers in a suspended one, and resume it if there is none."""
        flight.is_interrupted = False
        if self._flight is not flight:
            return
        nested = None
        if flight.suspendable > 0 and self.host.backlog.count(ONLINE):
            in_flight = [item.request for item in flight.items]
            dispatch = self.host.nest(self.kv, self.clock.now, in_flight, flight.suspendable)
            nested = self._lay_out(dispatch) if dispatch.plan.grants else None
        if nested is None:
            if not flight.is_running:
                self._go_on(flight)
            return
        self.num_suspended += flight.is_running
        flight.stand(self.clock.now)
        self.host.began(nested.plan, self.clock.now)
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
            self._check()
            return
        is_owed = self.guarantees or self.host.residents or self.host.backlog.count(ONLINE)
        self._stalled += 1 if is_owed else 0  # a gateway may hold offline work back
        if self._stalled > STALLED:
            raise IllegalPlan(f"{len(self.items)} requests wait or are resident, and no plan runs any of them")
        again = until if until > self.clock.now else self.clock.now + LOOK_AGAIN_SECONDS
        self._is_resting = True
        self._begin_at(again)

    def _lay_out(self, dispatch: Dispatch) -> Flight:
        """Check that the plan could be carried out, and sum up the work of the step."""
        plan, host = dispatch.plan, self.host
        self.num_parked += len(plan.park)
        self.num_preempted += len(plan.preempt)
        num_running = sum(self._num_running.values())
        if num_running > self.config.slots:
            raise IllegalPlan(f"{num_running} requests hold a slot, there are {self.config.slots}")
        if dispatch.num_deferred and not self.has_prefix_cache:
            raise IllegalPlan(f"{dispatch.num_deferred} grants found no block, {self.kv.num_free} KV blocks are free")
        for admission in dispatch.admissions:
            if admission.request.request_class is OFFLINE:
                self.on_admit(self.items[admission.request.seq])
        items, work, tokens = self._sum_up(dispatch)
        seconds = self.model.seconds(work)
        if self.noise:
            seconds *= exp(self.random.gauss(0.0, self.noise))
        if items:
            held = host.held
            self.steps.append(
                Step(
                    self.clock.now,
                    seconds,
                    plan.predicted_seconds,
                    held[ONLINE][RUNNING],
                    held[OFFLINE][RUNNING],
                    held[ONLINE][PARKED] + held[OFFLINE][PARKED],
                    host.backlog.count(ONLINE),
                    host.count(OFFLINE),
                    host.ceiling,
                    *tokens,
                    dispatch.is_nested,
                )
            )
        return Flight(plan, items, work, seconds, self.num_layers)

    def _sum_up(self, dispatch: Dispatch) -> tuple[list[Item], BatchWork, tuple[int, int, int, int]]:
        """Return the requests of a step, its work (one token costs what a decode does), and tokens by class."""
        items = self.items
        prefill = {ONLINE: 0, OFFLINE: 0}
        decode = {ONLINE: 0, OFFLINE: 0}
        pairs, num_prefill, before, num_decode, context, chunks = 0.0, 0, 0, 0, 0, 0
        taking_part: list[Item] = []
        for request, tokens in dispatch.grants:
            computed = request.num_computed
            remaining = request.num_tokens - computed
            item = items[request.seq]
            if request.phase is not RUNNING or not 0 < tokens <= remaining or item.num_granted:
                raise IllegalPlan(f"{tokens} tokens granted to {request}, {item.num_granted} before in this plan")
            item.num_granted = tokens
            taking_part.append(item)
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
        work = BatchWork(num_prefill, pairs, before, num_decode, context, chunks)
        return taking_part, work, (prefill[ONLINE], prefill[OFFLINE], decode[ONLINE], decode[OFFLINE])

    def _end(self, flight: Flight, turn: int) -> None:
        """A step has come to its end, unless it was suspended on the way and will end later."""
        if turn != flight.num_turns:
            return
        self._flight = None
        self.host.ended(self.clock.now)
        self._deliver(flight)
        self._begin()

    def _deliver(self, flight: Flight) -> None:
        """Take note of what a step computed."""
        now, host = self.clock.now, self.host
        for item in flight.items:
            request, tokens = item.request, item.num_granted
            item.num_granted = 0
            request.num_computed += tokens
            _, num_recomputed = host.computed(request, tokens, now)
            item.num_recomputed += num_recomputed
            if item.prefix_tokens:
                self.kv.publish(item)
            if request.num_computed == request.num_tokens:
                self._emit(item, now)
        host.settle()
        work = flight.work
        done = StepWork(work.num_prefill, work.prefill_context, work.num_decode, work.decode_context)
        host.observed(done, flight.seconds)
        if len(self.steps) % SAMPLE_EVERY == 0:
            self._sample()
        if len(self.steps) % CHECK_EVERY == 0:
            self._check()

    def _emit(self, item: Item, now: float) -> None:
        """One more token; the last one ends the request."""
        request = item.request
        if now > request.next_deadline:
            item.num_late += 1
        request.num_output += 1
        if request.num_output < item.num_output:
            request.num_tokens += 1
            return
        item.last_token = now
        self.host.leave(request, now, is_complete=True)
        self.kv.free(item)
        del self.items[request.seq]
        self.on_finish(item)

    def _sample(self) -> None:
        """Record the service of the tenants that wait, if several do."""
        for request_class, samples in self.samples.items():
            waiting = self.host.backlog.tenants(request_class)
            if len(waiting) > 1:
                ledger = self.host.ledgers[request_class]
                samples.times.append(self.clock.now)
                samples.service.append({tenant: ledger.service(tenant) for tenant in waiting})

    def _check(self) -> None:
        """Audit all counts (G8)."""
        self.kv.check([self.items[seq] for seq in self.host.residents])
        if imbalance := self.host.imbalance():
            raise IllegalPlan(imbalance)
