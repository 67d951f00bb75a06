"""Check what one GPU allows: the memory of a model, and the SLO that its step times can meet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.replay.hardware import GPUS
from ballast_sim.replay.model_shape import ModelShape, Quantization
from ballast_sim.replay.step_model import BatchWork, Roofline, StepModel
from ballast_sim.replay.traffic import Arrival

MEMORY_PERCENT = 92.0
"""Share of the GPU's memory for weights and KV cache, if nothing else is given."""

MOST_TOO_LONG = 0.01
"""Most online or offline requests that may be longer than the context of the model, as a share of all."""

MOST_GPUS = 16
"""Most GPUs that share a model."""


def kv_tokens(
    roofline: Roofline, *, longest: int, slots: int, memory_percent: float = MEMORY_PERCENT, ranks: int = 0
) -> int:
    """Return the tokens of KV cache that fit beside the weights; 0 for an encoder, which keeps none.

    `ranks` is the sum of the ranks of the LoRA adapters in memory.

    Raises:
        Impossible: the weights and one request of `longest` tokens need more memory than the GPU has.
    """
    shape, gpu = roofline.shape, roofline.gpu
    adapters = shape.adapter_bytes(ranks, gpu.count)
    usable = gpu.memory * memory_percent / 100 - adapters
    weights = shape.weight_bytes(roofline.quantization)
    each = shape.kv_bytes_per_token
    needed = longest * each
    if weights + needed <= usable:
        return min(int((usable - weights) / each), max(slots * shape.max_context, longest)) if each else 0
    found = f"{weights / 1e9:.1f} GB of weights"
    found += f" and {needed / 1e9:.1f} GB of KV for {longest} tokens" if needed else ""
    options = [
        f"{kind.value} weights take {shape.weight_bytes(kind) / 1e9:.1f} GB"
        for kind in Quantization
        if shape.weight_bytes(kind) + needed <= usable
    ]
    options += [
        f"one {other.name} has {other.memory / 1e9:.0f} GB"
        for other in GPUS.values()
        if weights + needed <= other.memory * memory_percent / 100 - shape.adapter_bytes(ranks)
    ]
    share = gpu.memory * memory_percent / 100 / gpu.count
    for count in range(gpu.count + 1, MOST_GPUS + 1):
        kv = needed * max(shape.kv_heads, count) / max(shape.kv_heads, gpu.count)  # each KV head is on several GPUs
        is_valid = shape.divides(count) and not count % gpu.nodes
        if is_valid and weights + kv <= count * share - shape.adapter_bytes(ranks, count):
            options.append(f"{count} such GPUs together hold it (engine.tensorParallel {count})")
            break
    hint = "; ".join(options) or f"no known single GPU holds it, and no {MOST_GPUS} such GPUs do"
    less = f", less {adapters / 1e9:.1f} GB of adapters" if ranks else ""
    raise Impossible(
        f"{shape.name} does not fit: {found}, but one {gpu.name} has {max(0.0, usable) / 1e9:.1f} GB of "
        f"{gpu.memory / 1e9:.0f} GB for them ({memory_percent:g} %{less}). {hint[0].upper()}{hint[1:]}"
    )


def within_context(shape: ModelShape, traffic: Sequence[Arrival]) -> list[Arrival]:
    """Return the requests that fit the context of a model; raise BadInput if too many do not."""
    fitting = [arrival for arrival in traffic if arrival.num_tokens <= shape.max_context]
    over = len(traffic) - len(fitting)
    if over > MOST_TOO_LONG * len(traffic):
        raise BadInput(
            f"{over:,} of {len(traffic):,} requests have more tokens of prompt and answer than {shape.name} takes, "
            f"{shape.longest}. Use a model with a longer context, or traffic for this one"
        )
    return fitting


def check_slo(
    roofline: Roofline,
    online: Sequence[Arrival],
    *,
    ttft: float,
    tpot: float,
    share: float = 0.0,
    step_model: StepModel | None = None,
) -> None:
    """Check that one decode, the shortest prompt, and a share of all prompts meet the SLO on an idle GPU.

    Step times are those of `step_model`, or of the roofline without one.

    Raises:
        Impossible: the SLO is below the fastest step.
    """
    prompts = sorted(arrival.num_prompt for arrival in online)
    longest = prompts[max(0, ceil(share * len(prompts) - 1e-9) - 1)]
    within = f", the longest of {share:.0%} of requests," if share else ""
    fastest = (
        ("TPOT", tpot, "one decode", BatchWork(num_decode=1, decode_context=1)),
        ("TTFT", ttft, f"a prompt of {longest:,} tokens{within}", BatchWork.of_prompts(1, longest)),
    )
    for name, seconds, what, work in fastest:
        found = (step_model or roofline).predict(work)
        if found > seconds:
            raise Impossible(
                f"{name} of {1e3 * seconds:g} ms is below the fastest step: {what} of {roofline.shape.name} takes "
                f"{1e3 * found:.1f} ms on one {roofline.gpu.name}. {_faster(roofline, work, seconds)}"
            )


def _faster(model: Roofline, work: BatchWork, most: float) -> str:
    """Name the weights and GPUs on which the work takes at most `most` seconds."""
    times = {
        f"{kind.value} weights": replace(model, quantization=kind).predict(work)
        for kind in (Quantization.FP8, Quantization.INT4)
    }
    times |= {f"one {name}": replace(model, gpu=gpu).predict(work) for name, gpu in GPUS.items()}
    faster = {name: seconds for name, seconds in times.items() if seconds <= most}
    if not faster:
        least = min(times, key=times.__getitem__)
        fastest = f"the fastest is {1e3 * times[least]:.1f} ms with {least}"
        return f"Relax the SLO: no known weights or GPU keep it, and {fastest}"
    return f"It would take {', '.join(f'{1e3 * seconds:.1f} ms with {name}' for name, seconds in faster.items())}"
