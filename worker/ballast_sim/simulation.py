"""Put traffic, replicas and a router together and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import inf
from random import Random

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import Request, RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.arrivals import ClosedLoop
from ballast_sim.clock import Clock
from ballast_sim.errors import BadInput
from ballast_sim.fairness import Samples
from ballast_sim.guarantees import Guarantees
from ballast_sim.item import Item
from ballast_sim.pool import Job, Pool
from ballast_sim.replica import Policy, Replica
from ballast_sim.step_model import StepModel
from ballast_sim.traffic import Arrival

_OFFLINE_SEQ = 1 << 40
"""Online requests are numbered from 0, offline ones from here."""


@dataclass(frozen=True)
class Scenario:
    """Everything a run depends on; two runs of equal scenarios are equal."""

    config: PolicyConfig
    model: StepModel
    policy: Callable[[], Policy]
    """Makes one for each replica: baselines keep state."""
    online: Sequence[Arrival] | ClosedLoop = ()
    offline: Callable[[], list[Job]] = list
    seconds: float = inf
    """Until when; inf runs until everything is done."""
    warmup_seconds: float = 0.0
    """What finishes earlier is left out of the figures."""
    replicas: int = 1
    seed: int = 0
    noise: float = 0.0
    cost: CostModel | None = None
    """What the policy plans by; None: fitted on the run's own steps, as a real engine does."""
    has_prefix_cache: bool = False
    num_layers: int = 32
    """Of the model: a step can stand still between two of them."""
    declared_output: int | None = None
    """`max_tokens` of every request; None: the largest answer of its class's traffic (nobody knows lengths ahead)."""
    is_guaranteed: bool = False
    """Assert G1 and G2 at every step: for Ballast's own policy."""


@dataclass
class Run:
    """What came of a scenario."""

    scenario: Scenario
    replicas: list[Replica]
    online: list[Item]
    """In order of arrival."""
    offline: list[Item]
    """Every item that was claimed."""
    jobs: list[Job]
    service: Samples
    """What tenants got for their jobs over time, while they had items to claim."""
    seconds: float


def simulate(scenario: Scenario) -> Run:
    """Run a scenario to its end.

    Raises:
        BadInput: a request can never fit into the KV cache, or there is nothing to do.
        IllegalPlan: the policy broke the contract or a guarantee.
    """
    _check(scenario)
    return _Simulation(scenario).run()


def _check(scenario: Scenario) -> None:
    if scenario.replicas < 1:
        raise BadInput(f"a run needs at least one replica, found {scenario.replicas}")
    room = scenario.config.num_blocks * scenario.config.block_tokens
    lengths = scenario.online.lengths if isinstance(scenario.online, ClosedLoop) else scenario.online
    longest = max((arrival.num_tokens for arrival in lengths), default=0)
    if longest > room:
        raise BadInput(f"the longest online request has {longest} tokens, the KV cache holds {room}")


@dataclass
class _Simulation:
    scenario: Scenario
    clock: Clock = field(default_factory=Clock)
    online: list[Item] = field(default_factory=list)

    def run(self) -> Run:
        scenario = self.scenario
        jobs = scenario.offline()
        pool = Pool(jobs, scenario.declared_output, _OFFLINE_SEQ)
        self._seqs = count()
        self._declared = self._largest_answer()
        replicas = [self._replica(index, pool) for index in range(scenario.replicas)]
        self._replicas = replicas
        if isinstance(scenario.online, ClosedLoop):
            for arrival in scenario.online.start():
                self.clock.at(arrival.seconds, partial(self._arrive, arrival))
        elif scenario.online:
            self.clock.at(scenario.online[0].seconds, partial(self._replay, 0))
        if jobs:
            for replica in replicas:
                replica.wake()
        self.clock.run(scenario.seconds)
        return Run(scenario, replicas, self.online, pool.items, jobs, pool.samples, self.clock.now)

    def _largest_answer(self) -> int:
        source = self.scenario.online
        lengths = source.lengths if isinstance(source, ClosedLoop) else source
        return self.scenario.declared_output or max((arrival.num_output for arrival in lengths), default=1)

    def _replica(self, index: int, pool: Pool) -> Replica:
        scenario = self.scenario
        replica = Replica(
            name=f"replica-{index}",
            clock=self.clock,
            config=scenario.config,
            policy=scenario.policy(),
            model=scenario.model,
            cost=scenario.cost,
            random=Random(scenario.seed * 1000 + index),
            noise=scenario.noise,
            has_prefix_cache=scenario.has_prefix_cache,
            num_layers=scenario.num_layers,
            guarantees=Guarantees() if scenario.is_guaranteed else None,
            on_finish=partial(self._finished, pool),
        )
        if pool.jobs:
            replica.refill = pool.refill
            replica.on_admit = partial(pool.admitted, replica)
        return replica

    def _replay(self, index: int) -> None:
        arrivals = self.scenario.online
        assert not isinstance(arrivals, ClosedLoop)
        self._arrive(arrivals[index])
        if index + 1 < len(arrivals):
            self.clock.at(arrivals[index + 1].seconds, partial(self._replay, index + 1))

    def _arrive(self, arrival: Arrival) -> None:
        config = self.scenario.config
        request = Request(
            seq=next(self._seqs),
            request_class=RequestClass.ONLINE,
            arrival=self.clock.now,
            num_prompt=arrival.num_prompt,
            max_output=max(self._declared, arrival.num_output),
            tenant=arrival.tenant,
            ttft=config.ttft,
            tpot=config.tpot,
            prefix_key=arrival.prefix_key,
            prefix_seq=arrival.prefix_key,
            num_tokens=arrival.num_prompt,
        )
        item = Item(request, arrival.num_output, arrival.prefix_tokens)
        self.online.append(item)
        least_loaded(self._replicas).receive((item,))

    def _finished(self, pool: Pool, item: Item) -> None:
        if item.job:
            pool.finished(item)
        elif isinstance(self.scenario.online, ClosedLoop):
            arrival = self.scenario.online.after(self.clock.now)
            if arrival:
                self.clock.at(arrival.seconds, partial(self._arrive, arrival))


def least_loaded(replicas: Sequence[Replica]) -> Replica:
    """Route an online request: the replica with the fewest online requests, the first of equals."""
    return min(replicas, key=lambda replica: replica.load)
