"""An engine in virtual time: it executes the plans of a policy exactly, and checks that they can be executed.

The policy host decides, as in a real engine. Only step times and tokens are simulated: from a step model, and from the
lengths in the trace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import exp
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ballast_policy.host import Dispatch, Host
from ballast_policy.learning.cost import attended
from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, ONLINE, RUNNING, RequestClass
from ballast_policy.snapshot import EngineSnapshot
from ballast_sim.errors import PolicyDefect
from ballast_sim.replay.clock import Clock
from ballast_sim.replay.fairness import ServiceSamples
from ballast_sim.replay.simulated import SimulatedRequest, SimulatedStep
from ballast_sim.replay.step_model import BatchWork

if TYPE_CHECKING:
    from ballast_sim.replay.jobs import JobPool
    from ballast_sim.replay.simulation import Scenario

CHECK_EVERY = 512
"""Steps between two audits of all counts. An idle replica audits its counts, too."""
STALLED = 1000
"""Most plans in a row that run nothing although work waits (G3)."""
RETRY_SECONDS = 0.001
"""Time until the next plan, if the last plan ran nothing."""
SAMPLE_EVERY = 16
"""Steps between two samples of the tenants' service."""


class Policy(Protocol):
    """Plans steps: Ballast's `plan`, or one of the baselines."""

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Plan the next step."""


class ReplayedStep(NamedTuple):
    """One computed step: its time, the slots by class, and the tokens computed by class and phase."""

    start: float
    seconds: float
    online_slots: int
    offline_slots: int
    offline_entitled: int
    """Offline requests that wait, run or are parked here, counted up to the slot caps of their tenants."""
    ceiling: int | None
    """Batch ceiling, as the policy knew it."""
    online_prefill: int
    offline_prefill: int
    online_decode: int
    offline_decode: int
    is_nested: bool = False
    """Whether the step was computed while the step before it in the log was suspended."""


@dataclass
class Replica:
    """One engine. `take` adds work, and `wake` starts steps, which go on as long as there is work."""

    name: str
    clock: Clock
    scenario: Scenario
    pool: JobPool
    """The jobs whose items it claims before each step."""
    random: Random
    items: dict[int, SimulatedRequest] = field(init=False, default_factory=dict)
    """Every request here that has not finished, by `seq`."""
    steps: list[ReplayedStep] = field(init=False, default_factory=list)
    num_prompt: Counter[RequestClass] = field(init=False, default_factory=Counter)
    """By class, the prompt tokens that were computed for the first time in the measured part."""
    num_output: Counter[RequestClass] = field(init=False, default_factory=Counter)
    """By class, the output tokens of the measured part."""
    num_preempted: int = field(init=False, default=0)
    num_suspended: int = field(init=False, default=0)
    """Steps that were suspended for newcomers."""
    samples: ServiceSamples = field(init=False, default_factory=ServiceSamples)
    """Service of online tenants over time."""
    is_busy: bool = field(init=False, default=False)
    _is_resting: bool = field(init=False, default=False)
    """Whether the last plan ran nothing, and the next plan is scheduled."""
    _num_begins: int = field(init=False, default=0)
    _stalled: int = field(init=False, default=0)
    _step: SimulatedStep | None = field(init=False, default=None)
    """The step that is being computed, or is suspended."""

    def __post_init__(self) -> None:
        scenario = self.scenario
        self.config, self.model = scenario.config, scenario.model
        self.policy: Policy = scenario.policy()
        self.host = Host(self.config, cost=scenario.cost, planner=self.policy.plan)
        self.kv = scenario.kv(self.config.num_blocks, self.config.block_tokens, self.items)

    @property
    def load(self) -> int:
        """Number of online requests that wait or run here. The router compares it."""
        return self.host.backlog.count(ONLINE) + self.host.held[ONLINE][RUNNING]

    def take(self, items: Iterable[SimulatedRequest]) -> None:
        """Add requests that wait."""
        for item in items:
            request = item.request
            self.items[request.seq] = item
            self.host.enter(request, self.clock.now)
            if request.request_class is ONLINE:
                self._interrupt()

    def wake(self) -> None:
        """Plan a step after everything that is due at this time, if no step is being computed."""
        if not self.is_busy or self._is_resting:
            self.is_busy = True
            self._begin_at(self.clock.now)

    def _begin_at(self, seconds: float) -> None:
        """Plan a step at that time, unless another time is set before."""
        self._num_begins += 1
        mine = self._num_begins
        self.clock.at(seconds, lambda: self._begin() if mine == self._num_begins else None, rank=1)

    def _begin(self) -> None:
        self._is_resting = False
        self.pool.refill(self)
        snapshot = self.host.snapshot(self.kv, self.clock.now)
        plan = self.policy.plan(snapshot)
        step = self._lay_out(self.host.dispatch(snapshot, plan, self.kv))
        if not plan.grants:
            self._rest(plan.wait_until)
            return
        self._stalled = 0
        self._step = step
        step.suspendable = plan.suspendable_seconds
        self._go_on(step)

    def _go_on(self, step: SimulatedStep) -> None:
        """Compute a step to its end, from its start or from where it was suspended."""
        step.run_from = self.clock.now
        self.host.began(step.plan, self.clock.now)
        left = step.seconds - step.done
        self.clock.at(self.clock.now + left, partial(self._end, step, step.num_suspensions), rank=1)

    def _interrupt(self) -> None:
        """Schedule the suspension of the current step at the end of its layer, if the plan allows it."""
        step = self._step
        if step and step.suspendable > 0 and not step.is_interrupted:
            at = step.next_boundary(self.clock.now)
            if at is not None:
                step.is_interrupted = True
                self.clock.at(at, lambda: self._suspend(step), rank=1)

    def _suspend(self, step: SimulatedStep) -> None:
        """Suspend a step for a nested step of newcomers. Without newcomers, the step goes on."""
        step.is_interrupted = False
        if self._step is not step:
            return
        nested = None
        if step.suspendable > 0 and self.host.backlog.count(ONLINE):
            in_flight = [item.request for item in step.items]
            dispatch = self.host.nest(self.kv, self.clock.now, in_flight, step.suspendable)
            nested = self._lay_out(dispatch) if dispatch.plan.grants else None
        if nested is None:
            if step.run_from is None:
                self._go_on(step)
            return
        self.num_suspended += step.run_from is not None
        step.suspend(self.clock.now)
        self.host.began(nested.plan, self.clock.now)
        step.suspendable -= nested.seconds
        self.clock.at(self.clock.now + nested.seconds, lambda: self._resume(step, nested), rank=1)

    def _resume(self, step: SimulatedStep, nested: SimulatedStep) -> None:
        """Deliver the tokens of a nested step, and check for further newcomers before the step goes on."""
        self._deliver(nested)
        self._suspend(step)

    def _rest(self, until: float) -> None:
        """Wait until work arrives, or plan again soon if the policy lets work wait."""
        if not self.items:
            self.is_busy = False
            self._check()
            return
        is_owed = self.host.residents or self.host.backlog.count(ONLINE)
        self._stalled += 1 if is_owed else 0  # a gateway may hold offline work back
        if self._stalled > STALLED:
            raise PolicyDefect(f"{len(self.items)} requests wait or are resident, and no plan runs any of them")
        again = until if until > self.clock.now else self.clock.now + RETRY_SECONDS
        self._is_resting = True
        self._begin_at(again)

    def _lay_out(self, dispatch: Dispatch) -> SimulatedStep:
        """Check that the plan could be executed, and sum up the work of the step."""
        plan, host = dispatch.plan, self.host
        self.num_preempted += len(plan.preempt)
        running = {request_class: held[RUNNING] for request_class, held in host.held.items()}
        if sum(running.values()) > self.config.slots:
            raise PolicyDefect(f"{sum(running.values())} requests hold a slot, there are {self.config.slots}")
        for request in dispatch.admissions:
            if request.request_class is OFFLINE:
                self.pool.admitted(self)
        items, work, tokens = self._sum_up(dispatch)
        seconds = self.model.predict(work)
        if self.scenario.noise:
            seconds *= exp(self.random.gauss(0.0, self.scenario.noise))
        if items:
            slots = running[ONLINE], running[OFFLINE], host.num_entitled, host.ceiling
            self.steps.append(ReplayedStep(self.clock.now, seconds, *slots, *tokens, dispatch.is_nested))
        return SimulatedStep(plan, items, work, seconds, self.scenario.num_layers)

    def _sum_up(self, dispatch: Dispatch) -> tuple[list[SimulatedRequest], BatchWork, tuple[int, int, int, int]]:
        """Return the requests of a step, its work, and its tokens by class. One token costs as much as a decode."""
        items = self.items
        prefill = {ONLINE: 0, OFFLINE: 0}
        decode = {ONLINE: 0, OFFLINE: 0}
        pairs, num_prefill, before, num_decode, context, chunks = 0.0, 0, 0, 0, 0, 0
        taking_part: list[SimulatedRequest] = []
        for request, tokens in dispatch.grants:
            computed = request.num_computed
            remaining = request.num_tokens - computed
            item = items[request.seq]
            if item.num_granted:
                raise PolicyDefect(f"{tokens} tokens granted to {request}, {item.num_granted} before in this plan")
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
        work = BatchWork(num_prefill, pairs, num_decode, context, before, chunks)
        return taking_part, work, (prefill[ONLINE], prefill[OFFLINE], decode[ONLINE], decode[OFFLINE])

    def _end(self, step: SimulatedStep, num_suspensions: int) -> None:
        """End a step, unless it was suspended after this end was scheduled."""
        if num_suspensions != step.num_suspensions:
            return
        self._step = None
        self.host.ended(self.clock.now)
        self._deliver(step)
        self._begin()

    def _deliver(self, step: SimulatedStep) -> None:
        """Record the results of a step."""
        now, host = self.clock.now, self.host
        for item in step.items:
            request, tokens = item.request, item.num_granted
            item.num_granted = 0
            request.num_computed += tokens
            num_prompt, num_recomputed = host.computed(request, tokens, now)
            item.num_recomputed += num_recomputed
            is_drawn = request.num_computed == request.num_tokens
            if now >= self.scenario.warmup_seconds:
                self.num_prompt[request.request_class] += num_prompt
                self.num_output[request.request_class] += is_drawn
            if item.prefix_tokens:
                self.kv.publish(item)
            if is_drawn:
                self._emit(item, now)
        host.settle()
        host.observed(step.work, step.seconds)
        if len(self.steps) % SAMPLE_EVERY == 0:
            self._sample()
        if len(self.steps) % CHECK_EVERY == 0:
            self._check()

    def _emit(self, item: SimulatedRequest, now: float) -> None:
        """Record one token. The last token ends the request."""
        request = item.request
        if now > request.next_deadline:
            item.num_late += 1
        request.num_output += 1
        if request.num_output < item.num_output:
            request.num_tokens += 1
            return
        item.last_token = now
        self.host.leave(request, now, is_complete=True)
        self.kv.free(request)
        del self.items[request.seq]
        if item.job:
            self.pool.finished(item)

    def _sample(self) -> None:
        """Record the service of the online tenants that wait, if there are several."""
        waiting = self.host.backlog.tenants(ONLINE)
        if len(waiting) > 1:
            ledger = self.host.ledgers[ONLINE]
            self.samples.times.append(self.clock.now)
            self.samples.service.append({tenant: ledger.service(tenant) for tenant in waiting})

    def _check(self) -> None:
        """Audit all counts (G8)."""
        self.kv.check()
        if imbalance := self.host.imbalance():
            raise PolicyDefect(imbalance)
