"""Run an encoder with online requests and offline work: Ballast, vLLM's priorities, and a fixed batch.

A request ends with its prefill, and has one latency as its SLO. A load of x % means online requests at x % of the rate
of offline work alone in full batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import inf

from ballast_policy.snapshot import PolicyConfig
from ballast_sim.errors import BadInput
from ballast_sim.planner.encoder import EncoderSlo, encoder_limit
from ballast_sim.replay import hardware, model_shape
from ballast_sim.replay.arrivals import generate, lognormal_answers
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.step_model import Roofline, profile
from ballast_sim.replay.traffic import Arrival

OURS = ("online-only", "ballast", "ballast-fitted")
POLICIES = ("online-only", "naive-priority", "fixed-32", "ballast", "ballast-fitted")
"""The rows: Ballast without offline work; vLLM's priorities; the same in batches of 32; Ballast with known step times,
and with a cost model that it fits to the run's own steps."""
STEP_TOKENS = 16_384
"""Most tokens in a step, as vLLM's `--max-num-batched-tokens`."""
FIXED_BATCH = 32
WARMUP_SHARE = 0.25
"""Share of a run that does not count."""
PRECISION = 0.02
"""Width of the search for the highest rate, as a share of the rate of offline work alone."""
NUM_LENGTHS = 1000


@dataclass(frozen=True, slots=True)
class EncoderRow:
    """The result of one policy at one load. Latencies are in seconds, and rates are per second."""

    policy: str
    load: float
    online_rate: float
    offline_rate: float
    p50: float
    p95: float
    p99: float
    attainment: float
    num_online: int
    ceiling: int | None
    """Batch ceiling of Ballast at the end of the run; None until its cost model is trusted."""


@dataclass
class EncoderBench:
    """One encoder on one GPU, and its SLO. Prompts are drawn."""

    model: str
    gpu: str
    prompt: int
    """Mean tokens from which prompts are drawn."""
    slo: EncoderSlo
    slots: int = 256
    reservation: float = 0.0
    seconds: float = 20.0
    seed: int = 0
    noise: float = 0.0

    def __post_init__(self) -> None:
        """Resolve the names, and draw the prompts; raise BadInput or Impossible if model, prompt or SLO do not fit."""
        shape = model_shape.shape(self.model)
        self.roofline = Roofline(shape, hardware.gpu(self.gpu), shape.weights())
        if not shape.is_encoder:
            raise BadInput(f"{shape.name} generates text: `ballast bench mixed` compares policies on it")
        most = shape.max_context // 2
        if not 2 <= self.prompt <= most:
            raise BadInput(f"prompts of {self.prompt} tokens on average: {shape.name} needs 2 to {most}")
        drawn = lognormal_answers(
            1, mean=self.prompt, deviation=self.prompt / 2, most=shape.max_context, number=NUM_LENGTHS, seed=self.seed
        )
        self.lengths = [Arrival(0.0, max(2, arrival.num_output), 1) for arrival in drawn]
        self.mean_prompt = sum(arrival.num_prompt for arrival in self.lengths) / NUM_LENGTHS
        self.computed = encoder_limit(self.roofline, round(self.mean_prompt), self.slo, most=self.slots)

    @cached_property
    def maximum(self) -> float:
        """Requests per second of offline work alone, in full batches."""
        scenario = replace(self._scenario("naive-priority", ()), config=replace(self._config(), ttft=inf))
        return self._row("offline-only", 0.0, simulate(scenario)).offline_rate

    def highest(self) -> EncoderRow:
        """Search for the highest load at which online alone meets its SLO. The row has load 0 if none does."""
        low, high = 0.0, 1.0
        best = replace(self.row("online-only", PRECISION), load=0.0)
        while high - low > PRECISION:
            middle = (low + high) / 2
            row = self.row("online-only", middle)
            low, high = (middle, high) if row.attainment >= self.slo.share else (low, middle)
            best = row if low == middle else best
        return best

    def row(self, policy: str, load: float) -> EncoderRow:
        """Run one policy at one load; raise BadInput if it is unknown."""
        if policy not in POLICIES:
            raise BadInput(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")
        rate = load * self.maximum
        online = generate(rate, seconds=self.seconds, lengths=self.lengths, seed=self.seed)
        return self._row(policy, load, simulate(self._scenario(policy, online)))

    def _config(self) -> PolicyConfig:
        return PolicyConfig(
            slots=self.slots,
            num_blocks=self.slots * self.roofline.shape.max_context,
            chunk_tokens=STEP_TOKENS,
            ttft=self.slo.latency,
            objective=self.slo.share,
            batch_window=self.slo.window,
            offline_share=self.reservation,
            can_suspend=False,
            is_encoder=True,
        )

    def _scenario(self, policy: str, online: Sequence[Arrival]) -> Scenario:
        slots = FIXED_BATCH if policy == "fixed-32" else self.slots
        return Scenario(
            config=replace(self._config(), slots=slots),
            model=self.roofline,
            policy=Ballast if policy in OURS else partial(Fill, chunk_tokens=STEP_TOKENS, kv_watermark=0.0),
            online=online,
            offline=list if policy == "online-only" else lambda: [SimulatedJob.endless("offline", self.lengths)],
            seconds=self.seconds,
            warmup_seconds=WARMUP_SHARE * self.seconds,
            seed=self.seed,
            noise=self.noise,
            cost=None if policy == "ballast-fitted" else profile(self.roofline),
        )

    def _row(self, policy: str, load: float, run: Run) -> EncoderRow:
        found = report(run)
        return EncoderRow(
            policy,
            load,
            online_rate=found.online.decode,  # one token stands for the answer
            offline_rate=found.offline.decode,
            **asdict(found.ttft),
            attainment=found.ttft_attainment,
            num_online=found.num_online,
            ceiling=run.replicas[0].host.ceiling if policy in OURS else None,
        )
