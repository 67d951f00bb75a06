"""Compare the simulator's step times and TTFT with the engine, on traffic that the step times were not fitted to.

The trace is cut into two slices. The engine replays the first slice, and its step times give the coefficients. Then it
replays the second slice several times, and the simulator predicts these replays. Replays of both slices alternate, so
that a slow drift of the machine affects both.

**Step time**: mean of `|predicted - measured| / measured` over the steps of the second slice. Allowed are 10 % with
Ballast's own engine and 15 % with vLLM, or 1.5 times the **noise**: the difference between two replays of the same
steps, by the clock of a step model. **TTFT**: p95 of the simulated second slice against that of the replays. Allowed
are 20 %. With vLLM, this limit applies to replays with the step times of the simulation: they check the scheduling,
and the limit of the step times checks the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from ballast_policy.learning.cost import CostModel
from ballast_sim.errors import BadInput
from ballast_sim.replay.attainment import Percentiles
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Scenario, simulate
from ballast_sim.replay.step_model import fit
from ballast_sim.replay.traffic import Arrival, at_zero, excerpt
from ballast_sim.validation.engine_replay import EngineReplay, MeasuredStep, ReplayClock, Replays

STEP_ERROR, NOISE_FACTOR, TTFT_ERROR = 0.10, 1.5, 0.20
"""Largest allowed errors."""


@dataclass(frozen=True, slots=True)
class StepErrors:
    """The prediction errors of the steps of one kind."""

    name: str
    number: int
    mean: float
    """Mean of the measured seconds."""
    error: float
    """Mean of `|predicted - measured| / measured`."""
    bias: float
    """Sum of the predicted over sum of the measured seconds, less 1."""


@dataclass(frozen=True, slots=True)
class Validation:
    """The figures of a validation. Shares are fractions of 1, and times are in seconds."""

    model: CostModel
    kinds: list[StepErrors]
    """The first entry is all steps together."""
    noise: float
    """Mean difference of two replays of the same steps, over their mean."""
    structure: float
    """Relative difference of the TTFT p95 if engine and simulator use the same step times: the error of scheduling."""
    measured: list[Percentiles]
    """TTFT of each replay."""
    predicted: Percentiles
    wall_over_cpu: float
    """Wall time over processor time of the engine. Above 1, the engine waited for a core."""
    num_requests: int
    """Online requests of the second slice."""
    step_limit: float
    """Largest allowed mean error over all steps, if the noise is small."""
    is_ttft_limited: bool
    """Whether TTFT has a limit by the engine's own step times, too."""

    @property
    def step_error(self) -> float:
        """Mean error over all steps."""
        return self.kinds[0].error

    @property
    def most_step_error(self) -> float:
        """Largest allowed mean error over all steps."""
        return max(self.step_limit, NOISE_FACTOR * self.noise)

    @property
    def ttft(self) -> Percentiles:
        """TTFT of the engine: medians over the replays."""
        return Percentiles(*(median(getattr(one, name) for one in self.measured) for name in ("p50", "p95", "p99")))

    @property
    def ttft_error(self) -> float:
        """Error of the TTFT p95."""
        return abs(self.predicted.p95 / self.ttft.p95 - 1)

    @property
    def is_valid(self) -> bool:
        """Whether all errors are within their limits."""
        ttft_error = self.ttft_error if self.is_ttft_limited else self.structure
        return self.step_error <= self.most_step_error and ttft_error <= TTFT_ERROR


@dataclass(frozen=True, slots=True)
class Validator:
    """The engine and the traffic of a validation."""

    engine: Replays
    trace: Sequence[Arrival]
    offline: Sequence[Arrival]
    clock: str = "wall"
    load: float = 0.15
    """Online tokens per second, over those of the engine with offline work alone."""
    seconds: float = 40.0
    """Length of each slice."""
    turns: int = 2
    """Replays of each slice."""
    step_limit: float = STEP_ERROR
    is_ttft_limited: bool = True
    progress: Callable[[str], None] = lambda _: None

    def run(self) -> Validation:
        """Measure both slices, fit the step times, and compare the prediction."""
        first, second = self._slices()
        fitted: list[MeasuredStep] = []
        measured: list[EngineReplay] = []
        for turn in range(1, self.turns + 1):
            self.progress(f"Replay {turn} of {self.turns}: the slice for the fit")
            fitted += self._replay(first).steps
            self.progress(f"Replay {turn} of {self.turns}: the slice for the comparison")
            measured.append(self._replay(second))
        model = fit_steps(fitted, self.clock)
        self.progress("Measuring the noise: the same steps twice")
        same = [self.engine.replay(second, self.offline, ReplayClock("model", model)) for _ in range(2)]
        steps = [step for replay in measured for step in replay.steps]
        simulated = simulate(self._scenario(model, second)).online
        predicted = Percentiles.of(item.first_token - item.request.arrival for item in simulated)
        return Validation(
            model=model,
            kinds=kinds(model, steps, self.clock),
            noise=noise(same, self.clock),
            structure=abs(predicted.p95 / Percentiles.of(same[0].waits).p95 - 1),
            measured=[Percentiles.of(replay.waits) for replay in measured],
            predicted=predicted,
            wall_over_cpu=sum(step.wall for step in steps) / sum(step.cpu for step in steps),
            num_requests=len(second),
            step_limit=self.step_limit,
            is_ttft_limited=self.is_ttft_limited,
        )

    def _slices(self) -> tuple[list[Arrival], list[Arrival]]:
        """Return two parts of the trace that share no request, both at the load."""
        self.progress("Measuring the throughput of the engine")
        burst = [replace(arrival, seconds=0.0) for arrival in self.trace[: 4 * self.engine.config.slots]]
        scenario = self._scenario(fit_steps(self._replay(burst).steps, self.clock), ())
        rate = self.load * report(simulate(replace(scenario, policy=Fill))).total_tokens
        half = len(self.trace) // 2
        parts = [at_zero(part) for part in (self.trace[:half], self.trace[half:])]
        slices = [excerpt(part, rate, self.seconds) for part in parts]
        found = min(len(part) for part in slices)
        if found < 100:
            raise BadInput(f"a slice of {self.seconds:g} s has {found} requests, expected 100: make it longer")
        return slices[0], slices[1]

    def _replay(self, online: Sequence[Arrival]) -> EngineReplay:
        return self.engine.replay(online, self.offline, ReplayClock(self.clock))

    def _scenario(self, model: CostModel, online: Sequence[Arrival]) -> Scenario:
        return Scenario(
            # One thread submits and steps, so that nothing interrupts a step of the replay.
            config=replace(self.engine.config, can_suspend=False),
            model=model,
            policy=Ballast,
            online=online,
            offline=lambda: [SimulatedJob.endless("offline", self.offline)],
            seconds=online[-1].seconds + self.seconds if online else self.seconds,
            warmup_seconds=0.0 if online else self.seconds / 4,
            cost=model,
        )


def fit_steps(steps: Sequence[MeasuredStep], clock: str) -> CostModel:
    """Fit the policy's cost model to measured steps, as the engine does."""
    return fit((step.work, step.seconds(clock)) for step in steps)


def kinds(model: CostModel, steps: Sequence[MeasuredStep], clock: str) -> list[StepErrors]:
    """Compare predictions with measured steps: of all kinds together, and of each kind."""
    by_name: dict[str, list[MeasuredStep]] = {"all steps": list(steps)}
    for step in steps:
        name = "decodes" if not step.work.num_prefill else "mixed" if step.work.num_decode else "prefill"
        by_name.setdefault(name, []).append(step)
    found = []
    for name, group in by_name.items():
        times = [(model.predict(step.work), step.seconds(clock)) for step in group]
        error = mean(abs(predicted - measured) / measured for predicted, measured in times)
        predicted, total = (sum(column) for column in zip(*times, strict=True))
        found.append(StepErrors(name, len(group), total / len(group), error, predicted / total - 1))
    return found


def noise(replays: Sequence[EngineReplay], clock: str) -> float:
    """Compute the mean difference of two replays of the same steps, over their mean; raise BadInput for other steps."""
    one, two = (replay.steps for replay in replays)
    if [step.work for step in one] != [step.work for step in two]:
        raise BadInput("two replays of one slice by one model computed different steps")
    pairs = [(a.seconds(clock), b.seconds(clock)) for a, b in zip(one, two, strict=True)]
    return mean(abs(a - b) / ((a + b) / 2) for a, b in pairs)
