"""Connect traffic, replicas and a router, and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import inf
from random import Random

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import ONLINE, Request
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import BadInput
from ballast_sim.replay.clock import Clock
from ballast_sim.replay.fairness import ServiceSamples
from ballast_sim.replay.guarantees import Guarantees
from ballast_sim.replay.jobs import JobPool, SimulatedJob
from ballast_sim.replay.replica import Policy, Replica
from ballast_sim.replay.simulated_request import SimulatedRequest
from ballast_sim.replay.step_model import StepModel
from ballast_sim.replay.traffic import Arrival


@dataclass(frozen=True)
class Scenario:
    """Everything that a run depends on. Equal scenarios give equal runs."""

    config: PolicyConfig
    model: StepModel
    policy: Callable[[], Policy]
    """Makes a policy for each replica, because baselines have state."""
    online: Sequence[Arrival] = ()
    offline: Callable[[], list[SimulatedJob]] = list
    seconds: float = inf
    """End of the run; inf runs until all work is done."""
    warmup_seconds: float = 0.0
    """Start of the measured part. Work that ends earlier does not count."""
    replicas: int = 1
    seed: int = 0
    noise: float = 0.0
    cost: CostModel | None = None
    """Cost model of the policy. None fits it to the run's own steps, as an engine does."""
    has_prefix_cache: bool = False
    num_layers: int = 32
    """Layers of the model. A step can be suspended between two of them."""
    is_guaranteed: bool = False
    """Check G1 and G2 at every step. Only Ballast's own policy keeps them."""


def warmup_of(seconds: float) -> float:
    """Return the part of a run of traffic that does not count: a quarter, at most a minute."""
    return min(60.0, seconds / 4)


@dataclass
class Run:
    """The result of a scenario."""

    scenario: Scenario
    replicas: list[Replica]
    online: list[SimulatedRequest]
    """In order of arrival."""
    offline: list[SimulatedRequest]
    """Every claimed item."""
    jobs: list[SimulatedJob]
    service: ServiceSamples
    """Service of each tenant's jobs over time, while the tenant had items to claim."""
    seconds: float


def simulate(scenario: Scenario) -> Run:
    """Run a scenario to its end.

    Raises:
        BadInput: a request can never fit into the KV cache, or there is no replica.
        PolicyDefect: the policy broke the contract or a guarantee.
    """
    if scenario.replicas < 1:
        raise BadInput(f"a run needs at least one replica, found {scenario.replicas}")
    available = scenario.config.num_blocks * scenario.config.block_tokens
    longest = max((arrival.num_tokens for arrival in scenario.online), default=0)
    if longest > available:
        raise BadInput(f"the longest online request has {longest} tokens, the KV cache holds {available}")
    return _Simulation(scenario).run()


@dataclass
class _Simulation:
    scenario: Scenario
    clock: Clock = field(default_factory=Clock)
    online: list[SimulatedRequest] = field(default_factory=list)

    def run(self) -> Run:
        scenario = self.scenario
        jobs = scenario.offline()
        pool = JobPool(jobs)
        self._max_output = max((arrival.num_output for arrival in scenario.online), default=1)
        replicas = [self._replica(index, pool) for index in range(scenario.replicas)]
        self._replicas = replicas
        for seq, arrival in enumerate(scenario.online):
            self.clock.at(arrival.seconds, partial(self._arrive, seq, arrival))
        if jobs:
            for replica in replicas:
                replica.wake()
        self.clock.run(scenario.seconds)
        return Run(scenario, replicas, self.online, pool.items, jobs, pool.samples, self.clock.now)

    def _replica(self, index: int, pool: JobPool) -> Replica:
        scenario = self.scenario
        return Replica(
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
            refill=pool.refill,
            on_admit=pool.admitted,
            on_finish=pool.finished,
        )

    def _arrive(self, seq: int, arrival: Arrival) -> None:
        config = self.scenario.config
        request = Request(
            seq=seq,
            request_class=ONLINE,
            arrival=self.clock.now,
            num_prompt=arrival.num_prompt,
            max_output=self._max_output,  # the length of an answer is not known in advance
            tenant=arrival.tenant,
            ttft=config.ttft,
            tpot=config.tpot,
            prefix_key=arrival.prefix_key,
            num_tokens=arrival.num_prompt,
        )
        item = SimulatedRequest(request, arrival.num_output, arrival.prefix_tokens)
        self.online.append(item)
        min(self._replicas, key=lambda replica: replica.load).receive((item,))  # of equals, the first
