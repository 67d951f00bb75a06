"""Step times of models on hardware that is not here.

There are two forms: the policy's own cost model, with measured or published coefficients, and a roofline for any model
on any GPU. `benchmarks/step_model.py` prints how much they differ.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from pydantic import Field

from ballast_api.base import ApiModel
from ballast_policy.learning.cost import CostModel, Fit, StepWork, attended
from ballast_sim.replay.hardware import Accelerator
from ballast_sim.replay.model_shape import ModelShape, Quantization


@dataclass(frozen=True, slots=True)
class BatchWork(StepWork):
    """The work of one step, with the parts that only the models of hardware use."""

    prefill_before: int = 0
    """Sum over chunks of the tokens computed before this step."""
    num_chunks: int = 0

    @classmethod
    def of_prompts(cls, number: int, tokens: int) -> BatchWork:
        """Return the work of whole prompts of equal length."""
        return cls(number * tokens, number * attended(0, tokens), num_chunks=number)


class StepModel(Protocol):
    """Computes the time of a step, as the policy's own cost model does."""

    def predict(self, work: BatchWork) -> float:
        """Return the seconds of one step."""


REFIT_A100 = CostModel(1.542e-2, 7.759e-5, 3.896e-9, 8.397e-5, 1.167e-7, is_trusted=True)
"""Llama-3-8B on an A100, from the times published with QoServe (branch `niyama_asplos2026` of microsoft/sarathi-serve).

The published time falls at 512 tokens, where a second formula begins, and falls there with every decode: a policy would
exploit both. This is a fit of both formulas by least squares of the relative error. Its coefficients are not negative,
so the time grows in every argument. It differs from them by 2.4 % on average (p95 7.8 %), 1.5 % up to 512 tokens, and
5.7 % above."""


def profile(model: StepModel, seed: int = 0, num_steps: int = 512, expert_share: float = 0.0) -> CostModel:
    """Fit the policy's cost model to a step model, as a profiling sweep does for an engine."""
    if isinstance(model, Roofline):
        expert_share = model.shape.expert_share
    return fit(((work, model.predict(work)) for work in sample_steps(Random(seed), num_steps)), expert_share)


def fit(steps: Iterable[tuple[BatchWork, float]], expert_share: float = 0.0) -> CostModel:
    """Fit the policy's cost model to steps and their times."""
    steps = list(steps)
    ring = Fit(capacity=len(steps), expert_share=expert_share)
    for work, seconds in steps:
        ring.add(work, seconds)
    return replace(ring.refit(), is_trusted=True)


def sample_steps(random: Random, number: int) -> list[BatchWork]:
    """Draw steps with all mixes of prefill and decodes.

    Each step has up to 256 decodes with contexts of 200 to 3,000 tokens. Two thirds of the steps have a prefill chunk
    of 16 to 2,048 tokens, and half of these chunks continue a prompt of which up to 4,000 tokens are computed.
    """
    steps: list[BatchWork] = []
    while len(steps) < number:
        decodes = random.randint(0, 256)
        tokens = 0 if random.random() < 1 / 3 else int(16 * 128 ** random.random())
        before = random.randint(0, 4000) if tokens and random.random() < 0.5 else 0
        context = int(decodes * random.uniform(200, 3000))
        if decodes + tokens:
            steps.append(BatchWork(tokens, attended(before, tokens), decodes, context, before, 1 if tokens else 0))
    return steps


class Efficiency(ApiModel):
    """Share of the data sheet's rates that a step reaches. The defaults match published step times of an A100.

    They fit these times best (`benchmarks/step_model.py`), and are similar to xLLM's.
    """

    compute: float = Field(default=0.60, gt=0, le=1)
    bandwidth: float = Field(default=0.60, gt=0, le=1)  # of the memory, for reading weights
    kv_bandwidth: float = Field(default=0.60, gt=0, le=1)  # of the memory, for reading the KV cache
    step_milliseconds: float = Field(default=2, ge=0)  # launches and scheduling in every step
    sequence_microseconds: float = Field(default=30, ge=0)  # sampling and bookkeeping for each request of the step
    link: float = Field(default=0.75, gt=0, le=1)  # eight A100 or H100 with NVLink reach more in an all-reduce
    """Between GPUs that share a model."""
    all_reduce_microseconds: float = Field(default=30, ge=0)  # fits NVIDIA's latencies of 1 to 8 GPUs best
    """Time of an all-reduce without its bytes."""
    network_microseconds: float = Field(default=30, ge=0)  # an assumption
    """The time that an all-reduce between nodes adds to it."""


@dataclass(frozen=True, slots=True)
class Roofline:
    """The step times of a transformer on one GPU or on a group of them, computed from operations and bytes.

    A step reads the experts that its tokens touch, if every token chooses its experts independently of the others. The
    GPUs of a group have equal parts of each layer (tensor parallelism), and add up their results twice in each layer.
    """

    shape: ModelShape
    gpu: Accelerator
    quantization: Quantization = Quantization.NONE
    efficiency: Efficiency = field(default_factory=Efficiency)

    @property
    def rated_flops(self) -> float:
        """Operations per second of the data sheet, in the format that the weights are computed in."""
        return self.gpu.fp8_flops if self.quantization is Quantization.FP8 else self.gpu.flops

    def _prefill_pairs(self, work: BatchWork) -> float:
        """Return the pairs of tokens that attention computes. In BERT, a token also attends to later ones."""
        return 2 * work.prefill_context - work.num_prefill if self.shape.is_bert else work.prefill_context

    def operations(self, work: BatchWork) -> float:
        """Return the floating-point operations of a step, as MFU counts them."""
        shape = self.shape
        tokens = work.num_prefill + work.num_decode
        sampled = work.num_decode + work.num_chunks
        pairs = self._prefill_pairs(work) + work.decode_context
        linear = 2.0 * shape.active_parameters * tokens + 2.0 * shape.head_parameters * sampled
        return linear + shape.attention_flops_per_pair * pairs

    def predict(self, work: BatchWork) -> float:
        """Return the seconds of one step."""
        shape, e = self.shape, self.efficiency
        tokens = work.num_prefill + work.num_decode
        sampled = work.num_decode + work.num_chunks
        flops = self.rated_flops * e.compute
        linear = 2.0 * (shape.active_parameters * tokens + shape.head_parameters * sampled) / flops
        untouched = shape.expert_parameters * (1.0 - shape.expert_share) ** tokens
        weights = (shape.layer_parameters - untouched) * self.quantization.weight_bytes + shape.head_parameters * 2.0
        read = weights / (self.gpu.bandwidth * e.bandwidth)
        gathered = shape.kv_bytes_per_token / (self.gpu.bandwidth * e.kv_bandwidth)
        prefill = max(
            shape.attention_flops_per_pair * self._prefill_pairs(work) / (self.gpu.flops * e.compute),
            gathered * (work.prefill_before + work.num_prefill),
        )
        decode = gathered * (work.decode_context + work.num_decode)
        together = self.communication(tokens)
        constant, each = e.step_milliseconds / 1e3, e.sequence_microseconds / 1e6
        return linear + read + prefill + decode + together + constant + each * sampled

    def communication(self, num_tokens: int) -> float:
        """Return the seconds of a step in which the GPUs of a group exchange results: none for one GPU.

        An all-reduce sends `2 (n - 1) / n` times its bytes from each GPU, which are 16-bit numbers. Over nodes, the
        GPUs of each node first reduce among themselves, so that each sends only its part of the bytes to other nodes.
        """
        gpu, e = self.gpu, self.efficiency
        if gpu.count == 1:
            return 0.0
        local, sent = gpu.count // gpu.nodes, 2.0 * self.shape.hidden * num_tokens
        seconds = 2 * (local - 1) / local * sent / (gpu.link * e.link)
        seconds += 2 * (gpu.nodes - 1) / gpu.nodes * sent / local / (gpu.network * e.link)
        seconds += (e.all_reduce_microseconds + (e.network_microseconds if gpu.nodes > 1 else 0.0)) / 1e6
        return 2 * self.shape.layers * seconds
