"""Measure the time of one executor step by batch, with the compiled kernels and with torch alone.

    python benchmarks/engine_step.py [--model DIR] [--threads N] [--repeats N]

Without options, the model is the one that ships with Ballast. Both sides run alternately, so that other work on the
machine affects both. The output has the medians, the best time, and tokens per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from replay import MODEL

from ballast_engine.batch import Batch, SampleRow
from ballast_engine.executor import Executor
from ballast_engine.loader import load
from ballast_engine.request import SamplingParams

BLOCK_TOKENS = 16
CASES = {
    "decode 1": ((300, 1),),
    "decode 4": ((300, 1),) * 4,
    "decode 16": ((300, 1),) * 16,
    "decode 16, context 1000": ((1000, 1),) * 16,
    "decode 64": ((300, 1),) * 64,
    "prefill 512": ((512, 512),),
    "16 decodes, prefill 128": (*((300, 1),) * 16, (128, 128)),
}


def make_batch(requests: tuple[tuple[int, int], ...], *, num_blocks: int, vocabulary: int, temperature: float) -> Batch:
    """Return a batch of requests by (context, tokens computed now), in random pages."""
    rng = np.random.default_rng(0)
    width = -(-max(context for context, _ in requests) // BLOCK_TOKENS)
    order = rng.permutation(num_blocks)
    tables = order[: width * len(requests)].reshape(len(requests), width)
    positions = [np.arange(context - now, context) for context, now in requests]
    slots = [
        tables[index][where // BLOCK_TOKENS] * BLOCK_TOKENS + where % BLOCK_TOKENS
        for index, where in enumerate(positions)
    ]
    starts = np.cumsum([0] + [now for _, now in requests])
    sampling = SamplingParams(temperature=temperature, seed=1)
    return Batch(
        token_ids=rng.integers(0, vocabulary, starts[-1]),
        positions=np.concatenate(positions),
        slot_mapping=np.concatenate(slots),
        query_start=starts,
        context_lens=np.array([context for context, _ in requests]),
        block_table=tables,
        sample_rows=starts[1:] - 1,
        samples=tuple(SampleRow(sampling, context) for context, _ in requests),
        num_decodes=sum(now == 1 for _, now in requests),
    )


def report(options: argparse.Namespace) -> None:
    """Run every case on both sides and print a table."""
    num_blocks = 64 * -(-1024 // BLOCK_TOKENS)
    sides: dict[str, Executor] = {}
    for attention in ("cpu", "sdpa"):
        loaded = load(options.model, dtype="float32", attention=attention, threads=options.threads)
        sides[attention] = Executor(loaded, num_blocks=num_blocks, block_tokens=BLOCK_TOKENS)
        config = loaded.config
    print(
        f"{loaded.num_params / 1e6:.1f} M parameters, hidden {config.hidden_size}, {config.num_layers} layers, "
        f"vocabulary {config.vocab_size}; {options.threads} threads, temperature {options.temperature:g}"
    )
    print(f"{'step':26} {'torch ms':>9} {'kernels ms':>11} {'best ms':>8} {'ratio':>6} {'tokens/s':>9}")
    for name, requests in CASES.items():
        batch = make_batch(
            requests, vocabulary=config.vocab_size, num_blocks=num_blocks, temperature=options.temperature
        )
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(options.repeats + 1):
            for side, executor in sides.items():
                started = time.perf_counter()
                executor.run(batch)
                if turn:
                    seconds[side].append(time.perf_counter() - started)
        ours, theirs = statistics.median(seconds["cpu"]), statistics.median(seconds["sdpa"])
        print(
            f"{name:26} {theirs * 1e3:9.2f} {ours * 1e3:11.2f} {min(seconds['cpu']) * 1e3:8.2f} {theirs / ours:6.1f} "
            f"{batch.num_tokens / ours:9.0f}"
        )


def main() -> None:
    """Choose the model and measure it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    report(options)


if __name__ == "__main__":
    main()
