"""How long a step takes on hardware that is not here.

Three forms answer the same question: coefficients measured on an engine (`ballast_policy.CostModel`), the published
ones for Llama-3-8B on an A100 (two pieces that do not meet, and a monotone refit of them), and a roofline for any model
on any GPU. `benchmarks/step_model.py` prints how far they are apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple, Protocol

from ballast_policy.learning import cost as policy_cost
from ballast_policy.learning.cost import CostModel, Fit, attended
from ballast_sim.errors import BadInput
from ballast_sim.hardware import Gpu
from ballast_sim.shape import Quantization, Shape


class BatchWork(NamedTuple):
    """What one step computes."""

    num_prefill: int = 0
    """Tokens of prefill chunks."""
    prefill_context: float = 0.0
    """Sum over chunks of tokens times the mean context each attends to (`ballast_policy.learning.cost.attended`)."""
    prefill_before: int = 0
    """Sum over chunks of the tokens computed before this step."""
    num_decode: int = 0
    decode_context: int = 0
    """Sum over decodes of the tokens each attends to."""
    """The new token counted."""
    num_chunks: int = 0


class StepModel(Protocol):
    """Answers how long a step takes."""

    def seconds(self, work: BatchWork) -> float:
        """Time of one step."""


@dataclass(frozen=True, slots=True)
class Linear:
    """The policy's own form, with coefficients from measurement."""

    cost: CostModel

    def seconds(self, work: BatchWork) -> float:
        """Time of one step."""
        cost = self.cost
        return (
            cost.k0
            + cost.k1 * work.num_prefill
            + cost.k2 * work.prefill_context
            + cost.k3 * work.num_decode
            + cost.k4 * work.decode_context
        )


class PublishedA100:
    """Llama-3-8B on an A100 as published with QoServe (branch `niyama_asplos2026` of microsoft/sarathi-serve).

    Two pieces that meet at 512 tokens with a step down, and a second piece that falls with every decode: a policy that
    optimizes against it exploits the seam. `REFIT_A100` has neither.
    """

    def seconds(self, work: BatchWork) -> float:
        """Time of one step."""
        prefill, decode = work.num_prefill, work.num_decode
        tokens = prefill + decode
        if tokens <= 512:
            linear = 0.014936 + 5.882e-5 * tokens + 2.248e-5 * prefill + 3.635e-5 * decode
            return linear + 1.111e-7 * work.decode_context + 7.555e-7 * work.prefill_before
        linear = 0.005004 + 2.719e-5 * tokens + 6.863e-5 * prefill - 4.144e-5 * decode
        return linear + 1.663e-7 * work.decode_context + 2.727e-6 * work.prefill_before


REFIT_A100 = Linear(CostModel(1.542e-2, 7.759e-5, 3.896e-9, 8.397e-5, 1.167e-7, is_trusted=True))
"""Least squares of relative error on the published pieces, coefficients >= 0, so the time grows in every argument.

`benchmarks/step_model.py` computes it again and prints its error.
"""


def profile(model: StepModel, seed: int = 0, num_steps: int = 512) -> CostModel:
    """Fit the policy's form to a model, as a profiling sweep would to an engine."""
    random = Random(seed)
    fit = Fit(capacity=num_steps)
    for work in sample_steps(random, num_steps):
        seen = policy_cost.StepWork(work.num_prefill, work.prefill_context, work.num_decode, work.decode_context)
        fit.add(seen, model.seconds(work))
    return replace(fit.refit(), is_trusted=True)


def sample_steps(random: Random, number: int) -> list[BatchWork]:
    """Draw steps of all mixes.

    Up to 256 decodes of 200 to 3,000 tokens; in two of three a chunk of 16 to 2,048 tokens, half of the chunks behind
    up to 4,000 computed ones.
    """
    steps: list[BatchWork] = []
    while len(steps) < number:
        decodes = random.randint(0, 256)
        tokens = 0 if random.random() < 1 / 3 else int(16 * 128 ** random.random())
        before = random.randint(0, 4000) if tokens and random.random() < 0.5 else 0
        context = int(decodes * random.uniform(200, 3000))
        if decodes + tokens:
            steps.append(BatchWork(tokens, attended(before, tokens), before, decodes, context, 1 if tokens else 0))
    return steps


def relative_errors(model: StepModel, reference: StepModel, steps: Sequence[BatchWork]) -> list[float]:
    """How far two models are apart, over the reference; from the smallest to the largest."""
    return sorted(abs(model.seconds(work) / reference.seconds(work) - 1) for work in steps)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What share of the data sheet's rates is reached, and what a step costs beside them.

    The defaults bring the roofline of Llama-3-8B on an A100 nearest to the published step times (mean error printed by
    `benchmarks/step_model.py`); the shares are of the size that xLLM's roofline scheduler is calibrated with.
    """

    compute: float = 0.60
    bandwidth: float = 0.60
    """Weights."""
    kv_bandwidth: float = 0.60
    """KV cache."""
    step_seconds: float = 0.002
    """Launches and scheduling, whatever the step holds."""
    sequence_seconds: float = 3e-5
    """Sampling and bookkeeping for each request of the step."""
    overlap: float = 1.0
    """How far computing and reading weights overlap: `(compute^p + read^p)^(1/p)`; 1 is not at all, large is fully."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A dense transformer on one GPU, by operations and bytes."""

    shape: Shape
    gpu: Gpu
    quantization: Quantization = Quantization.NONE
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        e = self.efficiency
        if min(e.compute, e.bandwidth, e.kv_bandwidth) <= 0 or e.overlap < 1:
            raise BadInput(f"efficiencies must be above 0 and overlap 1 or more, found {e}")

    @property
    def flops(self) -> float:
        """Reachable operations per second."""
        rate = self.gpu.fp8_flops if self.quantization is Quantization.FP8 else self.gpu.flops
        return rate * self.efficiency.compute

    def operations(self, work: BatchWork) -> float:
        """Floating-point operations of a step: what MFU counts."""
        shape = self.shape
        tokens = work.num_prefill + work.num_decode
        sampled = work.num_decode + work.num_chunks
        pairs = work.prefill_context + work.decode_context
        linear = 2.0 * shape.layer_parameters * tokens + 2.0 * shape.head_parameters * sampled
        return linear + shape.attention_flops_per_pair * pairs

    def seconds(self, work: BatchWork) -> float:
        """Time of one step."""
        shape, e, p = self.shape, self.efficiency, self.efficiency.overlap
        tokens = work.num_prefill + work.num_decode
        sampled = work.num_decode + work.num_chunks
        linear = 2.0 * (shape.layer_parameters * tokens + shape.head_parameters * sampled) / self.flops
        weights = shape.layer_parameters * self.quantization.weight_bytes + shape.head_parameters * 2.0
        read = weights / (self.gpu.bandwidth * e.bandwidth)
        gathered = shape.kv_bytes_per_token / (self.gpu.bandwidth * e.kv_bandwidth)
        prefill = max(
            shape.attention_flops_per_pair * work.prefill_context / (self.gpu.flops * e.compute),
            gathered * (work.prefill_before + work.num_prefill),
        )
        decode = gathered * (work.decode_context + work.num_decode)
        both: float = (linear**p + read**p) ** (1.0 / p)
        return both + prefill + decode + e.step_seconds + e.sequence_seconds * sampled
