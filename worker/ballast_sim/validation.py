"""Is the simulator right? Its step times and TTFT against the real engine, on traffic that nothing was fitted to.

The trace is cut into two slices. The engine replays the first, and its step times give the coefficients. Then it
replays the second, several times; the simulator predicts that. Replays of both slices take turns, so that a slow drift
of the machine falls on both.

Three figures come of it. **Step time**: mean of |predicted - measured| / measured over the steps of the second slice.
It may be 10 %, or 1.5 times the **noise**: what two replays of the very same steps differ by, measured with a clock on
which time passes as the model says. **TTFT**: p95 of the simulated second slice against the replays'; 20 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import mean, median

from ballast_policy.learning import cost as policy_cost
from ballast_policy.learning.cost import CostModel, Fit
from ballast_sim import baselines
from ballast_sim.answers import Percentiles
from ballast_sim.deployment import Ballast
from ballast_sim.errors import BadInput
from ballast_sim.measured import Bed, Replay, Ticks, Timed
from ballast_sim.pool import Job
from ballast_sim.report import report
from ballast_sim.simulation import Scenario, simulate
from ballast_sim.step_model import Linear
from ballast_sim.traffic import Arrival, at_zero, excerpt

STEP_ERROR, NOISE_FACTOR, TTFT_ERROR = 0.10, 1.5, 0.20
"""What is allowed."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Kind:
    """How well the steps of one kind are predicted."""

    name: str
    number: int
    mean: float
    """Measured seconds."""
    error: float
    """Mean of |predicted - measured| / measured."""
    bias: float
    """Predicted over measured seconds of all of them, less 1."""


@dataclass(frozen=True, slots=True)
class Validation:
    """What was found. Shares are fractions of 1, times seconds."""

    model: CostModel
    kinds: list[Kind]
    """The first is all steps together."""
    noise: float
    """Mean difference of two replays of the same steps, over their mean."""
    structure: float
    """Difference of the TTFT p95 when time passes by the same model in both: what scheduling alone gets wrong."""
    measured: list[Percentiles]
    """TTFT, one for each replay."""
    predicted: Percentiles
    wall_over_cpu: float
    """Above 1 the engine had to wait for a core."""
    num_requests: int
    """Online requests of the second slice."""

    @property
    def step_error(self) -> float:
        """Over all steps."""
        return self.kinds[0].error

    @property
    def most_step_error(self) -> float:
        """What is allowed."""
        return max(STEP_ERROR, NOISE_FACTOR * self.noise)

    @property
    def ttft(self) -> Percentiles:
        """Medians of the replays."""
        return Percentiles(*(median(getattr(one, name) for one in self.measured) for name in ("p50", "p95", "p99")))

    @property
    def ttft_error(self) -> float:
        """Of p95."""
        return abs(self.predicted.p95 / self.ttft.p95 - 1)

    @property
    def is_valid(self) -> bool:
        """Whether the simulator's figures count as evidence."""
        return self.step_error <= self.most_step_error and self.ttft_error <= TTFT_ERROR


@dataclass(frozen=True, slots=True)
class Validator:
    """What is replayed where."""

    bed: Bed
    trace: Sequence[Arrival]
    offline: Sequence[Arrival]
    clock: str = "wall"
    load: float = 0.15
    """Online tokens per second, over what the engine does with offline work alone."""
    seconds: float = 40.0
    """Of each slice."""
    turns: int = 2
    progress: Progress = lambda _: None

    def run(self) -> Validation:
        """Measure, fit, predict and compare."""
        first, second = self._slices()
        fitted: list[Timed] = []
        measured: list[Replay] = []
        for turn in range(1, self.turns + 1):
            self.progress(f"turn {turn} of {self.turns}: the slice that is fitted")
            fitted += self._replay(first).steps
            self.progress(f"turn {turn} of {self.turns}: the slice that is predicted")
            measured.append(self._replay(second))
        model = fit(fitted, self.clock)
        self.progress("the same steps twice")
        same = [self.bed.replay(second, self.offline, Ticks("model", Linear(model))) for _ in range(2)]
        steps = [step for replay in measured for step in replay.steps]
        predicted = self._simulate(model, second)
        return Validation(
            model=model,
            kinds=kinds(model, steps, self.clock),
            noise=noise(same, self.clock),
            structure=abs(predicted.p95 / Percentiles.of(same[0].waits).p95 - 1),
            measured=[Percentiles.of(replay.waits) for replay in measured],
            predicted=predicted,
            wall_over_cpu=sum(step.wall for step in steps) / sum(step.cpu for step in steps),
            num_requests=len(second),
        )

    def _slices(self) -> tuple[list[Arrival], list[Arrival]]:
        """Two stretches of the trace that share no request, both at the load."""
        self.progress("how much the engine does")
        burst = [replace(arrival, seconds=0.0) for arrival in self.trace[: 4 * self.bed.config.slots]]
        scenario = self._scenario(fit(self._replay(burst).steps, self.clock), ())
        rate = self.load * report(simulate(replace(scenario, policy=baselines.unbounded))).total_tokens
        half = len(self.trace) // 2
        parts = [at_zero(part) for part in (self.trace[:half], self.trace[half:])]
        slices = [excerpt(part, rate, self.seconds) for part in parts]
        if min(len(part) for part in slices) < 100:
            found = min(len(part) for part in slices)
            raise BadInput(f"a slice of {self.seconds:g} s has {found} requests, wanted 100: make it longer")
        return slices[0], slices[1]

    def _replay(self, online: Sequence[Arrival]) -> Replay:
        return self.bed.replay(online, self.offline, Ticks(self.clock))

    def _simulate(self, model: CostModel, online: Sequence[Arrival]) -> Percentiles:
        """TTFT of the slice as the simulator has it."""
        run = simulate(self._scenario(model, online))
        return Percentiles.of(item.first_token - item.request.arrival for item in run.online)

    def _scenario(self, model: CostModel, online: Sequence[Arrival]) -> Scenario:
        return Scenario(
            # One thread submits and steps, so that nothing interrupts a step of the replay.
            config=replace(self.bed.config, can_suspend=False),
            model=Linear(model),
            policy=Ballast,
            online=online,
            offline=lambda: [Job.endless("offline", self.offline)],
            seconds=online[-1].seconds + self.seconds if online else self.seconds,
            warmup_seconds=0.0 if online else self.seconds / 4,
            cost=model,
        )


def fit(steps: Sequence[Timed], clock: str) -> CostModel:
    """Fit the policy's own form to measured steps, as the engine does it."""
    ring = Fit(capacity=len(steps))
    for step in steps:
        work = step.work
        seen = policy_cost.StepWork(work.num_prefill, work.prefill_context, work.num_decode, work.decode_context)
        ring.add(seen, step.seconds(clock))
    return replace(ring.refit(), is_trusted=True)


def kinds(model: CostModel, steps: Sequence[Timed], clock: str) -> list[Kind]:
    """Compare predictions with steps: of all, and of each kind."""
    by_name: dict[str, list[Timed]] = {"all steps": list(steps)}
    for step in steps:
        name = "decodes" if not step.work.num_prefill else "mixed" if step.work.num_decode else "prefill"
        by_name.setdefault(name, []).append(step)
    return [_kind(model, name, found, clock) for name, found in by_name.items()]


def _kind(model: CostModel, name: str, steps: Sequence[Timed], clock: str) -> Kind:
    times = [(Linear(model).seconds(step.work), step.seconds(clock)) for step in steps]
    error = mean(abs(predicted - found) / found for predicted, found in times)
    total = sum(found for _, found in times)
    return Kind(name, len(steps), total / len(steps), error, sum(predicted for predicted, _ in times) / total - 1)


def noise(replays: Sequence[Replay], clock: str) -> float:
    """Mean difference of two replays of the same steps, over their mean.

    Raises:
        BadInput: they are not the same steps: the engine went by something else than its clock.
    """
    one, two = (replay.steps for replay in replays)
    if [step.work for step in one] != [step.work for step in two]:
        raise BadInput("two replays of one slice by one model computed different steps")
    pairs = [(a.seconds(clock), b.seconds(clock)) for a, b in zip(one, two, strict=True)]
    return mean(abs(a - b) / ((a + b) / 2) for a, b in pairs)
