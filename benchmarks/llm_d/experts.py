"""Step times of a mixture-of-experts model, whose decode reads the experts that its batch touches.

A dense model reads all its weights in every step, so its step time is close to linear in tokens. A step of a
mixture-of-experts model reads more weights with every token until it has touched every expert. The time rises steeply
at small batches and is flat above. The policy's linear `CostModel` cannot express that.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast_sim.errors import BadInput
from ballast_sim.replay.hardware import GPUS, Accelerator
from ballast_sim.replay.step_model import BatchWork, Efficiency


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """A decoder whose MLPs are mixtures of experts. Sizes are those of its Hugging Face configuration."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    """Intermediate size of one expert."""
    vocabulary: int
    experts: int
    """In each layer."""
    experts_per_token: int
    window: int
    """Tokens that a layer with sliding-window attention attends to."""
    windowed_layers: int
    """Layers with sliding-window attention. All others attend to the whole context."""
    expert_bytes: float
    """Bytes of one expert weight. All other weights have two."""
    kv_bytes: float = 2.0
    """Bytes of one number in the KV cache."""

    @property
    def expert_parameters(self) -> int:
        """Weights of all experts in all layers."""
        return self.layers * self.experts * 3 * self.hidden * self.intermediate

    @property
    def shared_parameters(self) -> int:
        """Weights of attention and routers, which every token passes."""
        attention = 2 * self.hidden * (self.heads + self.kv_heads) * self.head_dim
        return self.layers * (attention + self.hidden * self.experts)

    @property
    def head_parameters(self) -> int:
        """Weights of the output projection."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> float:
        """Weights of the layers that one token passes."""
        return self.shared_parameters + self.expert_parameters * self.experts_per_token / self.experts

    @property
    def weight_bytes(self) -> float:
        """Weights in memory, with the input embedding."""
        return self.expert_parameters * self.expert_bytes + 2.0 * (self.shared_parameters + 2 * self.head_parameters)

    @property
    def layer_kv_bytes(self) -> float:
        """KV cache of one token in one layer."""
        return 2 * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """KV cache of one token in all layers, if windowed layers keep as much as the others."""
        return self.layers * self.layer_kv_bytes


GPT_OSS_120B = ExpertShape(
    name="gpt-oss-120b",
    layers=36,
    hidden=2880,
    heads=64,
    kv_heads=8,
    head_dim=64,
    intermediate=2880,
    vocabulary=201_088,
    experts=128,
    experts_per_token=4,
    window=128,
    windowed_layers=18,
    expert_bytes=4.25 / 8,  # MXFP4: 4 bits and an 8-bit scale for each group of 32
)


@dataclass(frozen=True, slots=True)
class ExpertRoofline:
    """A mixture-of-experts decoder on one GPU, by operations and bytes."""

    shape: ExpertShape
    gpu: Accelerator
    efficiency: Efficiency
    overlap: float = 8.0
    """Overlap `p` of computing and reading weights: `(compute^p + read^p)^(1/p)`. 1 is none, and a large value is full
    overlap."""
    diversity: float = 1.0
    """Independent choices of experts that one token stands for, 0 to 1: tokens of one batch choose alike."""

    def __post_init__(self) -> None:
        e = self.efficiency
        if min(e.compute, e.bandwidth, e.kv_bandwidth) <= 0 or self.overlap < 1 or not 0 < self.diversity <= 1:
            raise BadInput(
                "efficiencies must be above 0, overlap 1 or more, and diversity above 0 and at most 1; "
                f"found {e}, overlap {self.overlap:g} and diversity {self.diversity:g}"
            )

    def touched(self, tokens: int) -> float:
        """Return the share of the experts that a step reads: `1 - (1 - k/E)^(diversity * tokens)`."""
        missed = 1.0 - self.shape.experts_per_token / self.shape.experts
        touched: float = 1.0 - missed ** (self.diversity * tokens)
        return touched

    def predict(self, work: BatchWork) -> float:
        """Return the time of one step."""
        shape, e, p = self.shape, self.efficiency, self.overlap
        tokens = work.num_prefill + work.num_decode
        sampled = work.num_decode + work.num_chunks
        flops = self.gpu.flops * e.compute
        linear = 2.0 * (shape.active_parameters * tokens + shape.head_parameters * sampled) / flops
        weights = shape.expert_parameters * shape.expert_bytes * self.touched(tokens)
        weights += 2.0 * (shape.shared_parameters + shape.head_parameters)
        read = weights / (self.gpu.bandwidth * e.bandwidth)
        both: float = (linear**p + read**p) ** (1.0 / p)
        return both + self._attention(work) + e.step_milliseconds / 1e3 + e.sequence_microseconds / 1e6 * sampled

    def _attention(self, work: BatchWork) -> float:
        """Return the time of attention: decodes read their KV, prefill chunks compute scores."""
        shape, e = self.shape, self.efficiency
        whole = shape.layers - shape.windowed_layers
        window = shape.window
        read = whole * work.decode_context + shape.windowed_layers * min(work.decode_context, window * work.num_decode)
        pairs = whole * work.prefill_context
        pairs += shape.windowed_layers * min(work.prefill_context, window * work.num_prefill)
        operations = 4.0 * shape.heads * shape.head_dim * pairs
        again = shape.layer_kv_bytes * (
            whole * work.prefill_before + shape.windowed_layers * min(work.prefill_before, window * work.num_chunks)
        )
        gathered = self.gpu.bandwidth * e.kv_bandwidth
        prefill = max(operations / (self.gpu.flops * e.compute), again / gathered)
        return prefill + read * shape.layer_kv_bytes / gathered


GPT_OSS_A100 = ExpertRoofline(
    GPT_OSS_120B,
    GPUS["a100"],
    Efficiency(compute=0.5, bandwidth=0.9, kv_bandwidth=0.9, sequence_microseconds=0),
    diversity=0.4,
)
"""gpt-oss-120b on an A100, calibrated on published latencies of interactive traffic alone.

`python benchmarks/llm_d_protocol.py --calibrate` fits compute and diversity again. The error hardly differs between a
diversity of 0.2 and 0.4; the larger value is closer to independent choices. The other values are assumed: 90 % of the
memory bandwidth, reading and computing overlap, and sampling costs nothing because the next step hides it.
"""
