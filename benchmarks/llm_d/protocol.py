"""The protocol: traffic in cycles, three jobs, and the result of one run of a scenario."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import ceil, inf, log, sqrt
from random import Random

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import SimError
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.replica import Policy
from ballast_sim.replay.simulated import SimulatedRequest
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.step_model import StepModel
from ballast_sim.replay.traffic import Arrival
from llm_d.experts import GPT_OSS_A100
from llm_d.first_come import FirstCome
from llm_d.prefix_cache import CachedKv

SCENARIOS = {
    "S0": "interactive only",
    "S1": "batch as ordinary requests",
    "S6": "small fixed concurrency",
    "priorities": "vLLM's priorities",
    "ballast-alone": "Ballast, interactive only",
    "ballast": "Ballast",
    "ballast-unsuspended": "Ballast, no step is suspended",
}
"""In the order of the table."""
ALONE = ("S0", "ballast-alone")
"""Scenarios without jobs."""
UNSUSPENDED = "ballast-unsuspended"
"""As inside vLLM, which cannot suspend a step."""
WINDOWS = (1800.0, 7200.0, 86400.0)
"""Seconds that each job has."""
PROMPT, ANSWER = 512, 128
MEAN, DEVIATION, MOST = 500.0, 400.0, 2048
"""Mean, standard deviation and maximum of the lognormal answers of the jobs, in tokens."""
SYSTEM_PROMPTS, SYSTEM_TOKENS = 5, 64
"""How many there are is published. How long they are is assumed."""

MEMORY, MEMORY_SHARE, ACTIVATIONS = 80 * 2**30, 0.9, 2e9
"""Bytes of an A100 80GB, the share that vLLM takes by default, and what activations and CUDA graphs are assumed to
need."""
SLOTS, BLOCK_TOKENS = 1024, 16


def kv_tokens() -> int:
    """Return the tokens of KV cache beside the weights.

    The simulator counts every token alike. A layer with sliding-window attention keeps its window only, as in vLLM, so
    that a long request takes less per token. The tokens are those of a batch request halfway through a mean answer.
    """
    shape = GPT_OSS_A100.shape
    length = PROMPT + MEAN / 2
    layers = shape.layers - shape.windowed_layers * (1 - shape.window / length)
    left = MEMORY * MEMORY_SHARE - ACTIVATIONS - shape.weight_bytes
    return int(left / (shape.layer_kv_bytes * layers))


@dataclass(frozen=True, slots=True)
class Protocol:
    """Traffic and jobs of a run. Times are seconds, rates are requests per second."""

    burst_rate: float = 15.0
    idle_rate: float = 1.0
    phase_seconds: float = 90.0
    cycles: int = 10
    warmup_cycles: int = 2
    """Cycles that no latency is taken from."""
    items: int = 1000
    """Requests of each job."""
    is_poisson: bool = False
    seed: int = 0
    most_cycles: int = 24
    """A run ends there even if batch work is left."""

    @property
    def cycle_seconds(self) -> float:
        """An idle phase and a burst."""
        return 2 * self.phase_seconds

    def seconds(self, cycles: int) -> float:
        """Return how long a run of some cycles lasts. The last answers take some time."""
        return cycles * self.cycle_seconds + min(60.0, self.cycle_seconds)

    def is_burst(self, seconds: float) -> bool:
        """Return whether a time is in a burst."""
        return seconds % self.cycle_seconds >= self.phase_seconds

    def is_measured(self, item: SimulatedRequest) -> bool:
        """Return whether an interactive request arrived in a burst of the measured cycles."""
        arrival = item.request.arrival
        return self.warmup_cycles <= arrival // self.cycle_seconds < self.cycles and self.is_burst(arrival)

    def traffic(self, cycles: int) -> list[Arrival]:
        """Make the interactive requests. More cycles continue the same sequence."""
        random = Random(self.seed)
        arrivals = []
        for phase in range(2 * cycles):
            rate = self.burst_rate if phase % 2 else self.idle_rate
            start = phase * self.phase_seconds
            arrivals += [Arrival(start + offset, PROMPT, ANSWER) for offset in self._offsets(rate, random)]
        return arrivals

    def _offsets(self, rate: float, random: Random) -> list[float]:
        if not self.is_poisson:
            return [i / rate for i in range(ceil(rate * self.phase_seconds - 1e-9))]
        offsets = []
        offset = random.expovariate(rate)
        while offset < self.phase_seconds:
            offsets.append(offset)
            offset += random.expovariate(rate)
        return offsets

    def jobs(self) -> list[SimulatedJob]:
        """Make the three jobs."""
        random = Random(1000 + self.seed)
        sigma = sqrt(log(1 + (DEVIATION / MEAN) ** 2))
        mu = log(MEAN) - sigma**2 / 2

        def item(index: int) -> Arrival:
            answer = min(MOST, max(1, round(random.lognormvariate(mu, sigma))))
            return Arrival(0.0, PROMPT, answer, prefix_key=1 + index % SYSTEM_PROMPTS, prefix_tokens=SYSTEM_TOKENS)

        return [
            SimulatedJob.of(f"job {name}", [item(index) for index in range(self.items)], deadline=window)
            for name, window in zip("ABC", WINDOWS, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One scenario on a number of replicas."""

    scenario: str
    replicas: int
    protocol: Protocol
    ttft: float = inf
    """SLO of Ballast, in seconds."""
    tpot: float = inf
    model: StepModel = GPT_OSS_A100
    batch_rate: float = 4.0
    """Batch requests per second of S1."""
    concurrency: int = 10
    """Batch requests in flight of S6."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a run. Times are in seconds, rates are per second."""

    case: Case
    ttft: list[float]
    """TTFT of the measured requests. The next field has the same requests."""
    itl: list[float]
    ttft_beside: list[float]
    """TTFT of every request that arrived in a burst while a job was unfinished, including the warm-up. The next field
    has the same requests.
    """
    itl_beside: list[float]
    finished: tuple[float, ...]
    """When each job was done; inf if it was not."""
    idle_rate: float
    """Batch requests that were answered in idle phases, by the idle time until all jobs were done."""
    worst_ttft: list[float]
    """By second of arrival; 0 if none arrived."""
    offline_tokens: list[int]
    """Computed, by second."""
    num_steps: int
    num_preempted: int
    failure: str = ""
    """Why the run was given up: the policy returned a plan that cannot be carried out."""

    @property
    def done(self) -> float:
        """When all jobs were done."""
        return max(self.finished, default=0.0)

    @property
    def num_in_window(self) -> int:
        """Jobs that were done in time."""
        return sum(1 for seconds, window in zip(self.finished, WINDOWS, strict=False) if seconds <= window)


def policy(case: Case) -> Callable[[], Policy]:
    """Return what makes the policy of one replica."""
    if case.scenario == "S0":
        return FirstCome
    if case.scenario == "S1":
        return partial(FirstCome, rate=case.batch_rate / case.replicas)
    if case.scenario == "S6":
        return partial(FirstCome, concurrency=case.concurrency / case.replicas)
    if case.scenario == "priorities":
        return Fill
    return Ballast


def scenario(case: Case, cycles: int) -> Scenario:
    """Return the run of a case."""
    is_ours = case.scenario.startswith("ballast")
    config = PolicyConfig(
        slots=SLOTS,
        num_blocks=kv_tokens() // BLOCK_TOKENS,
        block_tokens=BLOCK_TOKENS,
        offline_share=0.0,
        ttft=case.ttft if is_ours else inf,
        tpot=case.tpot if is_ours else inf,
        expert_share=GPT_OSS_A100.shape.experts_per_token / GPT_OSS_A100.shape.experts,
        can_suspend=case.scenario != UNSUSPENDED,
    )
    return Scenario(
        config=config,
        model=case.model,
        policy=policy(case),
        online=case.protocol.traffic(cycles),
        offline=list if case.scenario in ALONE else case.protocol.jobs,
        replicas=case.replicas,
        seed=case.protocol.seed,
        kv=CachedKv,
        num_layers=GPT_OSS_A100.shape.layers,
    )


def run(case: Case, *, is_extended: bool = True) -> Outcome:
    """Run a case; if batch work outlasts the cycles, run it again with as many more as it needs (`is_extended`)."""
    cycles, most = case.protocol.cycles, case.protocol.most_cycles
    while True:
        try:
            found = simulate(replace(scenario(case, cycles), seconds=case.protocol.seconds(cycles)))
        except SimError as error:
            return Outcome(case, [], [], [], [], (), 0.0, [], [], 0, 0, f"{type(error).__name__}: {error}")
        done = sum(job.num_finished for job in found.jobs)
        wanted = case.protocol.items * len(found.jobs)
        if done == wanted or cycles >= most or not is_extended:
            return _outcome(case, found)
        cycles = min(most, max(cycles + 1, ceil(1.15 * cycles * wanted / max(done, 1))))


def _outcome(case: Case, found: Run) -> Outcome:
    protocol = case.protocol
    finished = tuple(job.finished_at for job in found.jobs)
    until = min(max(finished, default=0.0), found.seconds)
    answered = [item for item in found.online if item.last_token < inf]
    measured = [item for item in answered if protocol.is_measured(item)]
    beside = [item for item in answered if item.request.arrival < until and protocol.is_burst(item.request.arrival)]
    in_idle = sum(1 for item in found.offline if item.last_token < inf and not protocol.is_burst(item.last_token))
    length = ceil(found.seconds) + 1
    worst, tokens = [0.0] * length, [0] * length
    for item in answered:
        second = int(item.request.arrival)
        worst[second] = max(worst[second], ttft(item))
    for step in (step for replica in found.replicas for step in replica.steps):
        tokens[int(step.start)] += step.offline_prefill + step.offline_decode
    return Outcome(
        case=case,
        ttft=[ttft(item) for item in measured],
        itl=[itl(item) for item in measured],
        ttft_beside=[ttft(item) for item in beside],
        itl_beside=[itl(item) for item in beside],
        finished=finished,
        idle_rate=in_idle / idle_seconds(protocol, until) if until else 0.0,
        worst_ttft=worst,
        offline_tokens=tokens,
        num_steps=sum(len(replica.steps) for replica in found.replicas),
        num_preempted=sum(replica.num_preempted for replica in found.replicas),
    )


def ttft(item: SimulatedRequest) -> float:
    """Return the time to the first token of a request."""
    return item.first_token - item.request.arrival


def itl(item: SimulatedRequest) -> float:
    """Return the inter-token latency of a request: its mean gap between two tokens, as guidellm reports it."""
    return (item.last_token - item.first_token) / (item.num_output - 1)


def idle_seconds(protocol: Protocol, until: float) -> float:
    """Return the time in idle phases before `until`."""
    whole, rest = divmod(until, protocol.cycle_seconds)
    return whole * protocol.phase_seconds + min(rest, protocol.phase_seconds)
