"""The largest batch that one latency SLO allows: computed from step times, and verified by trying batch sizes.

The batch is always full, because offline work fills the free slots. A newcomer waits for the rest of the current step
and then for its own step, which it shares with the newcomers that arrived in the same wait. That step gives the answer
of an encoder, or the first token of a model that generates.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, exp, lgamma, log
from random import Random

import numpy as np

from ballast_sim.errors import Impossible
from ballast_sim.planner.encoder import ApiServer
from ballast_sim.planner.inputs import CeilingInput, PlanInputs, is_embedding
from ballast_sim.replay.step_model import REFIT_A100, BatchWork, StepModel

MOST_USED = 0.9
"""Most requests that may arrive, as a share of those that full batches serve. Beyond it, newcomers queue."""
MOST_CROWDED = 0.5
"""Most steps with more newcomers than slots, as a share of the requests that may be late."""
_TAIL = 1e-6
"""Probability below which a number of newcomers in one step is left out."""


@dataclass(frozen=True, slots=True)
class CeilingCase:
    """A model that computes full batches while requests arrive."""

    name: str
    step_model: StepModel
    prompt: int
    context: int
    """Mean context of the decodes; 0 for an encoder."""
    seconds: float
    """SLO to the first token, or to the answer of an encoder."""
    share: float
    """Share of the requests that must meet the SLO."""
    rate: float
    """Newcomers per second."""
    api_server: ApiServer
    """The process before an encoder; without a limit for another model."""
    most: int
    """Requests for which the engine has slots and KV."""
    bound: str
    """Which of them is the limit."""

    @classmethod
    def of(cls, inputs: PlanInputs, asked: CeilingInput) -> CeilingCase:
        """Resolve the names.

        Raises:
            BadInput: a name is unknown, or the prompt is too long for the model.
            Impossible: the model does not fit, or the inputs need published step times that do not exist.
        """
        roofline = inputs.roofline(asked.model, is_embedding=is_embedding(asked))
        model: StepModel = roofline
        gpu, shape = roofline.gpu, roofline.shape
        shape.check(f"ceilings.{asked.name}", asked.prompt_tokens, asked.output_tokens)
        if asked.steps == "published":
            if (shape.name, gpu.name, roofline.quantization.value) != ("llama-3-8b", "a100", "none"):
                raise Impossible(f"{asked.name}: published are the steps of llama-3-8b on a100, without quantization")
            model = REFIT_A100
        context = 0 if shape.is_encoder else asked.prompt_tokens + asked.output_tokens // 2
        tokens, slots = inputs.kv_tokens(roofline, asked.prompt_tokens + asked.output_tokens), inputs.engine.slots
        most, bound = slots, "the most that engine.slots allows"
        if context and tokens // context < slots:
            most, bound = tokens // context, f"the most decodes of {context} tokens that {tokens:,} tokens of KV hold"
        return cls(
            asked.name,
            model,
            asked.prompt_tokens,
            context,
            seconds=asked.milliseconds / 1e3,
            share=asked.percentile / 100,
            rate=asked.requests_per_second,
            api_server=inputs.api_server if shape.is_encoder else ApiServer(0),
            most=most,
            bound=bound,
        )

    @property
    def is_encoder(self) -> bool:
        """Whether a request ends with its prefill."""
        return not self.context

    def step(self, batch: int, newcomers: int) -> float:
        """Return the seconds of a step with a number of newcomers in a full batch."""
        prompts = batch if self.is_encoder else newcomers
        decodes = batch - prompts
        work = replace(
            BatchWork.of_prompts(prompts, self.prompt), num_decode=decodes, decode_context=decodes * self.context
        )
        return self.step_model.predict(work)

    def slowest(self, batch: int) -> float:
        """Compute the seconds within which the wanted share of newcomers is answered.

        The number of newcomers in a step depends on the time of the step before, so the steps are a Markov chain. A
        newcomer arrives at any moment of a step. Steps with more newcomers than slots are left out: `ceiling` allows
        only a rate at which they are rare.
        """
        steps = np.array([self.step(batch, newcomers) for newcomers in range(self._most_newcomers(batch) + 1)])
        arrivals = np.array([_poisson(self.rate * seconds, len(steps)) for seconds in steps])
        often, before = arrivals[0], np.eye(len(steps))[0]
        while np.abs(often - before).max() > _TAIL:
            often, before = often @ arrivals, often
        met = often * steps / (often @ steps)  # share of the newcomers that arrive in each step
        own = np.append(steps[1:], steps[-1])  # the step of a newcomer, beside 0, 1, ... others

        def within(limit: float) -> float:
            return float(np.sum(met[:, None] * arrivals * np.clip((limit - own) / steps[:, None], 0.0, 1.0)))

        low, high = 0.0, 2 * float(steps[-1])
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (low, middle) if within(middle) >= self.share else (middle, high)
        return high

    def _most_newcomers(self, batch: int) -> int:
        """Return a number of newcomers that one step exceeds with a probability of at most `_TAIL`."""
        most = 1
        while most < batch:
            mean = self.rate * self.step(batch, most)
            if most >= mean and _poisson(mean, most + 2)[most] <= _TAIL:
                break
            most += 1
        return most

    def why(self, batch: int) -> str:
        """Return what limits a batch that is the ceiling."""
        return self.bound if batch == self.most else f"the largest within {1e3 * self.seconds:g} ms"

    def ceiling(self) -> BatchCeiling:
        """Compute the largest batch that meets the SLO and fits the engine; raise Impossible if none does."""
        if self.slowest(1) > self.seconds:
            raise Impossible(
                f"{self.name}: {1e3 * self.seconds:g} ms is below the fastest answer. A step takes "
                f"{1e3 * self.step(1, 0):.1f} ms with one decode, and {1e3 * self.step(1, 1):.1f} ms with a prompt of "
                f"{self.prompt} tokens. A newcomer waits for the first step and needs the second: "
                f"{1e3 * self.slowest(1):.1f} ms for {self.share:.0%} of newcomers"
            )
        batch = bisect_right(range(1, self.most + 1), self.seconds, key=self.slowest)
        api = self.api_server
        for most, what in (
            (api.texts_per_second, f"one API server process, with {api.text_milliseconds:g} ms for each text,"),
            (batch / self.step(batch, batch), f"a batch of {batch}, {self.why(batch)},"),
        ):
            if self.rate > MOST_USED * most:
                raise Impossible(f"{self.name}: {self.rate:g} requests/s arrive, but {what} serves {most:,.1f}")
        crowds = _poisson(self.rate * self.step(batch, batch), batch + 2)[-1]
        if crowds > MOST_CROWDED * (1 - self.share):
            raise Impossible(
                f"{self.name}: at {self.rate:g} requests/s {crowds:.1%} of the steps bring more newcomers than a batch "
                f"of {batch}, {self.why(batch)}, holds; they would queue for another step"
            )
        return BatchCeiling(self, batch)


@dataclass(frozen=True, slots=True)
class BatchCeiling:
    """The largest batch that meets the SLO of a case."""

    case: CeilingCase
    batch: int

    @property
    def because(self) -> tuple[str, ...]:
        """Return the reasons for this batch, with their figures."""
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
            f"a newcomer waits for the rest of the current step and then for its own step: at {case.rate:g} requests/s "
            f"{case.share:.0%} are answered within {1e3 * case.slowest(batch):.1f} ms of {1e3 * case.seconds:g} ms, "
            f"and within {1e3 * case.slowest(batch + 1):.1f} ms with a batch of {batch + 1}"
        )
        bound = f"{batch} is {case.why(batch)}"
        limit = case.api_server.limit(batch / full)
        return (first, second, bound, f"batches are not full: {limit}") if limit else (first, second, bound)


def drawn(case: CeilingCase, batch: int, requests: int = 1_000_000) -> float:
    """Draw newcomers one by one at random moments, and return the seconds within which the wanted share is answered.

    This does not use the Markov chain. A step admits the newcomers that arrived during the step before, in order of
    arrival, up to the batch. A million requests measure 99 % to a hundredth of a point. In the planner's own cases, a
    batch that is larger by one changes the share by 0.04 to 0.15 points.
    """
    random = Random(0)
    steps = [case.step(batch, newcomers) for newcomers in range(batch + 1)]
    waits: list[float] = []
    waiting: deque[float] = deque()
    now, arrival = 0.0, random.expovariate(case.rate)
    while len(waits) < requests:
        if not waiting and arrival >= now:  # the request arrives in a step without newcomers: count from its start
            arrival, now = (arrival - now) % steps[0], steps[0]
        while arrival < now:
            waiting.append(arrival)
            arrival += random.expovariate(case.rate)
        taken = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
        now += steps[len(taken)]
        waits += [now - one for one in taken]
    waits.sort()
    return waits[ceil(len(waits) * case.share) - 1]


def largest(case: CeilingCase, measure: Callable[[int], float], near: int) -> int:
    """Search step by step from `near` for the largest batch that meets the SLO by `measure`; return 0 if none does.

    Larger batches are slower, but small batches can be too small for the rate.
    """
    batch = near
    while batch > 0 and measure(batch) > case.seconds:
        batch -= 1
    while near <= batch < case.most and measure(batch + 1) <= case.seconds:
        batch += 1
    return batch


def _poisson(mean: float, number: int) -> list[float]:
    """Return the probabilities of 0, 1, ... arrivals. The last one is that of all larger numbers."""
    found = [exp(k * log(mean) - mean - lgamma(k + 1)) for k in range(number - 1)]
    return [*found, max(0.0, 1.0 - sum(found))]
