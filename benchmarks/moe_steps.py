"""Time real steps of a small mixture of experts, and compare the cost model with and without its term for experts.

    python benchmarks/moe_steps.py

The model is a Qwen3-MoE of `transformers` with random weights, in float32, on one thread. A step is one token for each
of `n` sequences, or a chunk of one prompt. Times are processor time. The cost model is fitted to half of the steps, as
a worker fits it, and predicts the other half. The first fit does not know that the model has experts.
"""

from __future__ import annotations

import argparse
import time
from random import Random
from statistics import fmean, median

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from ballast_cli.console import print_table
from ballast_policy.learning.cost import CostModel, Fit, StepWork, attended

DECODES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CHUNKS = (16, 32, 64, 128, 256)
CONTEXT = 32
Sizes = tuple[int, int]
"""Decodes and prefill tokens of a step: one of them is 0."""


def make_model(experts: int, per_token: int) -> Qwen3MoeForCausalLM:
    """Return the model with random weights: about 100 million parameters with 64 experts."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=512, hidden_size=256, intermediate_size=512, moe_intermediate_size=512, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=4, head_dim=32, num_experts=experts, num_experts_per_tok=per_token,
    )  # fmt: skip
    model: Qwen3MoeForCausalLM = Qwen3MoeForCausalLM(config).eval()
    return model


def work_of(sizes: Sizes) -> StepWork:
    """Return the work of a step in the terms of the cost model."""
    decodes, chunk = sizes
    return StepWork(chunk, attended(0, chunk), decodes, decodes * (CONTEXT + 1))


def measure(model: Qwen3MoeForCausalLM, sizes: Sizes) -> float:
    """Run one step and return its processor time."""
    decodes, chunk = sizes
    if chunk:
        tokens, cache = torch.randint(512, (1, chunk)), None
    else:
        cache = model(torch.randint(512, (decodes, CONTEXT)), use_cache=True).past_key_values
        tokens = torch.randint(512, (decodes, 1))
    begun = time.process_time()
    model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
    return time.process_time() - begun


def fitted(steps: list[tuple[Sizes, float]], expert_share: float) -> CostModel:
    """Fit the cost model to steps; a share of 0 leaves out the experts."""
    fit = Fit(expert_share=expert_share)
    for sizes, seconds in steps:
        fit.add(work_of(sizes), seconds)
    return fit.refit()


def main() -> None:
    """Time the steps, fit both models, and print both errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64, help="experts of each layer")
    parser.add_argument("--per-token", type=int, default=4, help="experts that a token passes")
    parser.add_argument("--repeat", type=int, default=12, help="steps of each size")
    args = parser.parse_args()
    torch.set_num_threads(1)
    model = make_model(args.experts, args.per_token)
    sizes = [(n, 0) for n in DECODES] + [(0, n) for n in CHUNKS]
    order = sizes * args.repeat
    Random(0).shuffle(order)
    with torch.inference_mode():
        for each in sizes:
            measure(model, each)
        steps = [(each, measure(model, each)) for each in order]
    half = len(steps) // 2
    models = [fitted(steps[:half], share) for share in (0.0, args.per_token / args.experts)]
    rows = []
    errors: list[list[float]] = [[], []]
    for each in sizes:
        measured = [seconds for other, seconds in steps[half:] if other == each]
        typical = median(measured)
        predicted = [found.predict(work_of(each)) for found in models]
        for index, seconds in enumerate(predicted):
            errors[index].append(abs(seconds / typical - 1))
        kind = f"{each[0]} decodes" if each[0] else f"prompt of {each[1]}"
        shown = [f"{1e3 * p:.1f} ({100 * (p / typical - 1):+.0f} %)" for p in predicted]
        rows.append((kind, f"{1e3 * typical:.1f}", *shown))
    names = ("step", "measured, ms", "linear", "with experts")
    print_table(names, rows, right=names[1:])
    for name, found in zip(names[2:], errors, strict=True):
        print(f"{name}: mean error {100 * fmean(found):.1f} %, largest {100 * max(found):.1f} %")
    found = models[1]
    print(f"reading all experts: {1e3 * found.k5:.1f} ms; one token touches {100 * (1 - found.missed):.2f} % of them")


if __name__ == "__main__":
    main()
