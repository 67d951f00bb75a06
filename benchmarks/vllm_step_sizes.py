"""Measure what steps of ever new sizes cost vLLM on a CPU, and how much of it steps of a multiple of some tokens save.

    make vllm-env && .venv-vllm/bin/python benchmarks/vllm_step_sizes.py [--multiples 1 8 16 32 64]

A step computes one prompt of 64 to 512 random tokens. All rows have the same sizes, rounded to the nearest multiple.
oneDNN prepares a matrix product for each number of tokens, and vLLM keeps 32 of them for each layer. The model is that
of `vllm_mixed.py`, without Ballast. Times are CPU time of the thread. Rows take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

from replay import Clock, machine
from replay.random_llama import bytes_llama, make_model
from replay.side_process import VARIABLES
from replay.vllm_engine import PLAIN, VllmEngine

LEAST, MOST = 64, 512


def seconds(engine: Any, sizes: Sequence[int], serial: count[int], *, warm: int) -> float:
    """Compute one prompt of each size; return the seconds per token without the first `warm` prompts."""
    from vllm import SamplingParams  # noqa: PLC0415 - after the environment is set

    taken, tokens = 0.0, 0
    for index, size in enumerate(sizes):
        name = f"prompt-{next(serial)}"
        prompt = {"prompt_token_ids": Random(name).choices(range(5, 255), k=size)}
        engine.add_request(name, prompt, SamplingParams(max_tokens=1, temperature=0.0, detokenize=False))
        begin = time.thread_time()
        while engine.has_unfinished_requests():
            engine.step()
        if index >= warm:
            taken += time.thread_time() - begin
            tokens += size
    return taken / tokens


def main() -> None:
    """Print one row for each multiple."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--multiples", type=int, nargs="+", default=[1, 8, 16, 32, 64])
    options.add_argument("--steps", type=int, default=150, help="steps of each row in a round")
    options.add_argument("--warm", type=int, default=50, help="steps before them, which fill the caches")
    options.add_argument("--rounds", type=int, default=3)
    asked = options.parse_args()
    if not VARIABLES.items() <= os.environ.items():  # the allocator reads its settings when a process starts
        os.execve(sys.executable, [sys.executable, "-W", "ignore", *sys.argv], os.environ | VARIABLES)  # noqa: S606
    machine()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), bytes_llama(384, 6))
        engine = VllmEngine(
            Clock(), str(model), PLAIN, slots=8, longest=MOST + 32, dtype="float32", enforce_eager=True,
            enable_prefix_caching=False, gpu_memory_utilization=0.2,
        ).engine  # fmt: skip
        random, serial = Random(7), count()
        found: dict[int, list[float]] = {multiple: [] for multiple in asked.multiples}
        for _ in range(asked.rounds):
            drawn = [random.randint(LEAST, MOST) for _ in range(asked.warm + asked.steps)]
            for multiple, times in found.items():
                sizes = [max(1, round(size / multiple)) * multiple for size in drawn]
                times.append(seconds(engine, sizes, serial, warm=asked.warm))
    first = sum(found[asked.multiples[0]]) / asked.rounds
    print(f"\nmean of {asked.rounds} rounds of {asked.steps} steps\n")
    print(f"{'multiple':>8}{'microseconds per token':>25}{'of the first row':>18}")
    for multiple, times in found.items():
        mean = sum(times) / len(times)
        print(f"{multiple:8}{1e6 * mean:25.0f}{mean / first:18.2f}")


if __name__ == "__main__":
    main()
