"""Connect traffic, replicas and a router, and run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from random import Random

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import ONLINE, Request
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import BadInput
from ballast_sim.replay.clock import Clock
from ballast_sim.replay.fairness import ServiceSamples
from ballast_sim.replay.jobs import JobPool, SimulatedJob
from ballast_sim.replay.kv import SimulatedKv
from ballast_sim.replay.replica import Policy, Replica
from ballast_sim.replay.simulated import SimulatedRequest
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
    kv: type[SimulatedKv] = SimulatedKv
    """Counts the KV blocks of a replica."""
    num_layers: int = 32
    """Layers of the model. A step can be suspended between two of them."""


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
        BadInput: a request can never fit into the KV cache.
        PolicyDefect: a plan could not be executed, or work waits indefinitely.
    """
    available = scenario.config.num_blocks * scenario.config.block_tokens
    longest = max((arrival.num_tokens for arrival in scenario.online), default=0)
    if longest > available:
        raise BadInput(f"the longest online request has {longest} tokens, the KV cache holds {available}")
    clock, jobs = Clock(), scenario.offline()
    pool = JobPool(jobs)
    replicas = [
        Replica(f"replica-{index}", clock, scenario, pool, Random(scenario.seed * 1000 + index))
        for index in range(scenario.replicas)
    ]
    online: list[SimulatedRequest] = []
    max_output = max((arrival.num_output for arrival in scenario.online), default=1)

    def arrive(seq: int, arrival: Arrival) -> None:
        request = Request(
            seq=seq,
            request_class=ONLINE,
            arrival=clock.now,
            num_prompt=arrival.num_prompt,
            max_output=max_output,  # the length of an answer is not known in advance
            tenant=arrival.tenant,
            ttft=scenario.config.ttft,
            tpot=scenario.config.tpot,
            prefix_key=arrival.prefix_key,
            num_tokens=arrival.num_prompt,
        )
        online.append(SimulatedRequest(request, arrival.num_output, arrival.prefix_tokens))
        replica = min(replicas, key=lambda replica: replica.load)  # of equals, the first
        replica.take(online[-1:])
        replica.wake()

    for seq, arrival in enumerate(scenario.online):
        clock.at(arrival.seconds, partial(arrive, seq, arrival))
    if jobs:
        for replica in replicas:
            replica.wake()
    clock.run(scenario.seconds)
    return Run(scenario, replicas, online, pool.items, jobs, pool.samples, clock.now)
