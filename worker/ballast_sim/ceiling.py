"""The batch that one latency SLO allows: computed from step times, and found again by trying sizes.

The batch is always full: offline work fills what newcomers leave. A newcomer waits for the rest of the step in flight
and then for its own step, which it shares with whoever came in the same wait. For an encoder its answer comes with that
step; for a model that generates, its first token.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import exp, inf
from random import Random

from ballast_policy.learning.cost import attended
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.arrivals import constant, generate
from ballast_sim.baselines import Fill
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.inputs import CeilingInput, PlanInputs
from ballast_sim.pool import Job
from ballast_sim.simulation import Scenario, simulate
from ballast_sim.step_model import REFIT_A100, BatchWork, Roofline, StepModel, profile
from ballast_sim.traffic import Arrival

MOST_BATCH = 512
MOST_USED = 0.9
"""Share of what full batches serve, beyond which newcomers queue."""
MOST_CROWDED = 0.5
"""Of the share that may be late, the most steps that may bring more newcomers than the batch has places for."""
_TAIL = 1e-6
"""Newcomers of one step that are less likely than this are left out."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model that steps with a full batch while requests come in."""

    name: str
    step_model: StepModel
    prompt: int
    context: int
    """Mean of the decodes; 0 for an encoder."""
    seconds: float
    """The SLO: to the first token, or to the answer."""
    share: float
    """Of the requests that must keep it."""
    rate: float
    """Newcomers per second."""

    @classmethod
    def of(cls, inputs: PlanInputs, asked: CeilingInput) -> Case:
        """Resolve the names.

        Raises:
            BadInput: an unknown name, or a prompt that the model cannot take.
            Impossible: published step times are asked for where none are published.
        """
        gpu, shape = inputs.find_gpu(inputs.gpu), inputs.find_shape(asked.model)
        if asked.prompt_tokens + asked.output_tokens > shape.max_context:
            raise BadInput(
                f"ceilings.{asked.name}: {asked.prompt_tokens + asked.output_tokens} tokens of prompt and answer, but "
                f"{shape.name} takes at most {shape.max_context}"
            )
        if shape.is_encoder == bool(asked.output_tokens):
            wanted = "is an encoder: outputTokens is 0" if shape.is_encoder else "generates: outputTokens is 1 or more"
            raise BadInput(f"ceilings.{asked.name}: {shape.name} {wanted}")
        model: StepModel = Roofline(shape, gpu, inputs.quantization, inputs.efficiency.value())
        if asked.steps == "published":
            if (shape.name, gpu.name, inputs.quantization.value) != ("llama-3-8b", "a100", "none"):
                raise Impossible(f"{asked.name}: published are the steps of llama-3-8b on a100, without quantization")
            model = REFIT_A100
        context = 0 if shape.is_encoder else asked.prompt_tokens + asked.output_tokens // 2
        seconds, share = asked.milliseconds / 1e3, asked.percentile / 100
        return cls(asked.name, model, asked.prompt_tokens, context, seconds, share, asked.requests_per_second)

    @property
    def is_encoder(self) -> bool:
        """Whether a request is over with its prefill."""
        return not self.context

    def step(self, batch: int, newcomers: int) -> float:
        """Seconds of a step with so many newcomers in a full batch."""
        prompts = batch if self.is_encoder else newcomers
        decodes = batch - prompts
        work = BatchWork(
            num_prefill=prompts * self.prompt,
            prefill_context=prompts * attended(0, self.prompt),
            num_decode=decodes,
            decode_context=decodes * self.context,
            num_chunks=prompts,
        )
        return self.step_model.seconds(work)

    def slowest(self, batch: int) -> float:
        """Seconds within which the wanted share of newcomers is answered.

        Steps follow one another; how many newcomers a step holds depends on how long the one before it took, so the
        steps are a Markov chain. A newcomer meets a step by the time it takes, at any moment of it. More newcomers at
        once than the batch has slots are left out: `ceiling` asks for a rate at which they hardly come.
        """
        steps = [self.step(batch, newcomers) for newcomers in range(self._most_newcomers(batch) + 1)]
        arrivals = [_poisson(self.rate * seconds, len(steps)) for seconds in steps]
        often, before = arrivals[0], [1.0] + [0.0] * (len(steps) - 1)
        while max(abs(now - then) for now, then in zip(often, before, strict=True)) > _TAIL:
            often, before = (
                [sum(often[k] * arrivals[k][j] for k in range(len(steps))) for j in range(len(steps))],
                often,
            )
        total = sum(often[k] * steps[k] for k in range(len(steps)))
        met = [often[k] * steps[k] / total for k in range(len(steps))]

        def within(limit: float) -> float:
            return sum(
                met[k] * arrivals[k][j] * min(1.0, max(0.0, (limit - steps[min(j + 1, len(steps) - 1)]) / steps[k]))
                for k in range(len(steps))
                for j in range(len(steps))
            )

        low, high = 0.0, 2 * steps[-1]
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if within(middle) >= self.share else (middle, high)
        return high

    def _most_newcomers(self, batch: int) -> int:
        """More than come in one step, all but surely."""
        most = 1
        while most < batch:
            mean = self.rate * self.step(batch, most)
            if most >= mean and _poisson(mean, most + 2)[most] <= _TAIL:
                break
            most += 1
        return most

    def ceiling(self) -> Ceiling:
        """Compute the largest batch that keeps the SLO.

        Raises:
            Impossible: not even a batch of one does; says what it takes.
        """
        if self.slowest(1) > self.seconds:
            raise Impossible(
                f"{self.name}: {1e3 * self.seconds:g} ms is below the fastest answer. A step takes "
                f"{1e3 * self.step(1, 0):.1f} ms with one in it and {1e3 * self.step(1, 1):.1f} ms with a prompt of "
                f"{self.prompt} tokens; a newcomer waits for one and needs the other, "
                f"{1e3 * self.slowest(1):.1f} ms for {self.share:.0%} of them"
            )
        low, high = 1, MOST_BATCH
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.slowest(middle) <= self.seconds else (low, middle - 1)
        served = low / self.step(low, low)
        if self.rate > MOST_USED * served:
            raise Impossible(
                f"{self.name}: {self.rate:g} requests/s come, but a batch of {low}, the largest within "
                f"{1e3 * self.seconds:g} ms, serves {served:,.1f}"
            )
        crowds = _poisson(self.rate * self.step(low, low), low + 2)[-1]
        if crowds > MOST_CROWDED * (1 - self.share):
            raise Impossible(
                f"{self.name}: at {self.rate:g} requests/s {crowds:.1%} of the steps bring more newcomers than a batch "
                f"of {low}, the largest within {1e3 * self.seconds:g} ms, holds; they would queue for another step"
            )
        return Ceiling(self, low)


@dataclass(frozen=True, slots=True)
class Ceiling:
    """The answer to a case."""

    case: Case
    batch: int

    @property
    def because(self) -> tuple[str, ...]:
        """Why it is this one, each sentence with its figures."""
        case, batch = self.case, self.batch
        full, mixed = case.step(batch, 0), case.step(batch, 1)
        if case.is_encoder:
            each = case.step(batch, 0) - case.step(batch - 1, 0) if batch > 1 else 0.0
            first = (
                f"a step over {batch} prompts of {case.prompt} tokens takes {1e3 * full:.1f} ms, {1e6 * each:.0f} us "
                "of it for the last"
            )
        else:
            each = case.step(2, 0) - case.step(1, 0)
            first = (
                f"a step takes {1e3 * (case.step(1, 0) - each):.1f} ms for the weights and {1e6 * each:.0f} us for "
                f"each decode of {case.context} tokens: {1e3 * full:.1f} ms with {batch}, {1e3 * mixed:.1f} ms with a "
                f"prompt of {case.prompt} tokens in place of one"
            )
        second = (
            f"a newcomer waits for the rest of the step in flight and then for its own: at {case.rate:g} requests/s "
            f"{case.share:.0%} are answered within {1e3 * case.slowest(batch):.1f} ms of {1e3 * case.seconds:g} ms, "
            f"and within {1e3 * case.slowest(batch + 1):.1f} ms if the batch were {batch + 1}"
        )
        return first, second


def drawn(case: Case, batch: int, requests: int = 1_000_000, seed: int = 0) -> float:
    """Draw newcomers one by one, at random moments: seconds within which the wanted share of them is answered.

    Nothing is known here of the chain: a step takes in who came while the one before it ran, the first ones first if
    they are more than the batch. A million tell 99 % to a hundredth of a point; one more in the batch makes 0.04 to
    0.15 points in the planner's own cases.
    """
    random = Random(seed)
    steps = [case.step(batch, newcomers) for newcomers in range(batch + 1)]
    waits: list[float] = []
    waiting: deque[float] = deque()
    now, arrival = 0.0, random.expovariate(case.rate)
    while len(waits) < requests:
        if not waiting and arrival >= now:  # it comes in a step without newcomers; count from that one's beginning
            arrival, now = (arrival - now) % steps[0], steps[0]
        while arrival < now:
            waiting.append(arrival)
            arrival += random.expovariate(case.rate)
        taken = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
        now += steps[len(taken)]
        waits += [now - one for one in taken]
    waits.sort()
    return waits[int(len(waits) * case.share)]


def measured(case: Case, batch: int, requests: int = 2000, seed: int = 0) -> float:
    """Have the policy keep a batch full in the simulator: seconds within which the share of newcomers is answered."""
    seconds = max(10.0 * case.step(batch, 0), requests / case.rate)
    online = generate(
        constant(case.rate), peak=case.rate, seconds=seconds, lengths=[Arrival(0.0, case.prompt, 1)], seed=seed
    )
    filler = Arrival(0.0, case.prompt, 1) if case.is_encoder else Arrival(0.0, 1, 1 << 40)
    tokens = batch * case.prompt if case.is_encoder else 1 << 30
    run = simulate(
        Scenario(
            config=PolicyConfig(slots=batch, num_blocks=1 << 50, chunk_tokens=tokens, offline_share=0.0),
            model=_AtContext(case.step_model, case.context),
            policy=lambda: Fill(chunk_tokens=tokens, is_parking=True, kv_watermark=0.0),
            online=online,
            offline=lambda: [Job.endless("filler", [filler])],
            seconds=seconds,
            seed=seed,
            cost=profile(case.step_model),
        )
    )
    waits = sorted(min(item.first_token, inf) - item.request.arrival for item in run.online)
    return waits[min(len(waits) - 1, int(len(waits) * case.share))]


def largest(case: Case, measure: Callable[[int], float], near: int, most: int = MOST_BATCH) -> int:
    """Largest batch that keeps the SLO as measured, looked for around `near`; 0 where none does.

    Larger ones are slower, but small ones may be too few for who comes: so it goes away from `near` in growing strides,
    and back by halves.
    """

    def keeps(batch: int) -> bool:
        return measure(batch) <= case.seconds

    low, high, stride = (near, near + 1, 1) if keeps(near) else (near - 1, near, 1)
    if low == near:
        while high <= most and keeps(high):
            low, high, stride = high, high + 2 * stride, 2 * stride
        high = min(high, most + 1)
    else:
        while low > 0 and not keeps(low):
            low, high, stride = max(0, low - 2 * stride), low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if keeps(middle) else (low, middle)
    return low


@dataclass(frozen=True, slots=True)
class _AtContext:
    """A step model that takes every decode at one context, as the computed ceiling does."""

    step_model: StepModel
    context: int

    def seconds(self, work: BatchWork) -> float:
        """Time of one step."""
        return self.step_model.seconds(work._replace(decode_context=work.num_decode * self.context))


def _poisson(mean: float, number: int) -> list[float]:
    """Probabilities of 0, 1, ... arrivals; the last takes the rest."""
    found, chance = [], exp(-mean)
    for k in range(number - 1):
        found.append(chance)
        chance *= mean / (k + 1)
    return [*found, max(0.0, 1.0 - sum(found))]
