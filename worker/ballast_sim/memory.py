"""Whether a model fits into a GPU, and what is left for its KV cache."""

from __future__ import annotations

from ballast_sim.errors import Impossible
from ballast_sim.hardware import GPUS, Gpu
from ballast_sim.inputs import PlanInputs
from ballast_sim.shape import Quantization, Shape


def kv_tokens(inputs: PlanInputs, gpu: Gpu, model: Shape, longest: int) -> int:
    """Tokens of KV cache beside the weights; 0 for an encoder, which keeps none.

    Raises:
        Impossible: the weights and one request of `longest` tokens take more than there is.
    """
    usable = gpu.memory * inputs.engine.memory_percent / 100
    weights = model.weight_bytes(inputs.quantization)
    needed = longest * model.kv_bytes_per_token
    if weights + needed <= usable:
        each = model.kv_bytes_per_token
        return min(int((usable - weights) / each), inputs.engine.slots * model.max_context) if each else 0
    found = f"{weights / 1e9:.1f} GB of weights"
    found += f" and {needed / 1e9:.1f} GB of KV for {longest} tokens" if needed else ""
    options = [
        f"{kind.value} weights take {model.weight_bytes(kind) / 1e9:.1f} GB"
        for kind in Quantization
        if model.weight_bytes(kind) + needed <= usable
    ]
    options += [
        f"one {other.name} has {other.memory / 1e9:.0f} GB"
        for other in GPUS.values()
        if weights + needed <= other.memory * inputs.engine.memory_percent / 100
    ]
    hint = "; ".join(options) or "no known single GPU holds it, and a plan is for one GPU per replica"
    raise Impossible(
        f"{model.name} does not fit: {found}, but one {gpu.name} has {usable / 1e9:.1f} GB of "
        f"{gpu.memory / 1e9:.0f} GB for them ({inputs.engine.memory_percent:g} %). {hint[0].upper()}{hint[1:]}"
    )
