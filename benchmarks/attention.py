"""Compare the compiled attention kernel with torch's `scaled_dot_product_attention` per request, on one CPU.

    python benchmarks/attention.py [--threads N] [--repeats N]

One layer reads paged KV in random pages. Both sides run alternately, so that other work on the machine affects both.
The output has the medians, their ratio, and the KV that the kernel reads per second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch
from engine_step import make_batch

from ballast_engine.attention.base import AttentionShape
from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.attention.sdpa import SdpaAttention


@dataclass(frozen=True)
class Case:
    """Requests by (context, tokens computed now), decodes first."""

    name: str
    heads: tuple[int, int, int]
    """Query heads, key heads, dimensions of a head."""
    block_tokens: int
    requests: tuple[tuple[int, int], ...]
    dtype: torch.dtype = torch.float32


def spread(count: int, low: int, high: int) -> tuple[tuple[int, int], ...]:
    """Return decodes whose contexts are spaced evenly between two lengths."""
    return tuple((int(context), 1) for context in np.linspace(low, high, count))


LARGE, SMALL = (16, 8, 128), (4, 2, 64)
CASES = (
    Case("decode 4 x 64-256", LARGE, 64, spread(4, 64, 256)),
    Case("decode 16 x 128-1024", LARGE, 64, spread(16, 128, 1024)),
    Case("decode 32 x 128-1024", LARGE, 64, spread(32, 128, 1024)),
    Case("decode 16 x 512-4096", LARGE, 64, spread(16, 512, 4096)),
    Case("decode 16 x 128-1024", LARGE, 64, spread(16, 128, 1024), torch.bfloat16),
    Case("prefill 512", LARGE, 64, ((512, 512),)),
    Case("prefill 512 behind 1536", LARGE, 64, ((2048, 512),)),
    Case("16 decodes, prefill 256", LARGE, 64, (*spread(16, 128, 1024), (256, 256))),
    Case("decode 16 x 64-512, small model", SMALL, 16, spread(16, 64, 512)),
    Case("prefill 256, small model", SMALL, 16, ((256, 256),)),
)


def measure(case: Case, threads: int, repeats: int) -> tuple[float, float, float]:
    """Return the median seconds of SDPA and of the kernel, and the bytes of KV that one pass needs."""
    query_heads, kv_heads, dim = case.heads
    width = -(-max(context for context, _ in case.requests) // case.block_tokens)
    num_blocks = width * len(case.requests)
    shape = AttentionShape(query_heads, kv_heads, dim, (None,), num_blocks, case.block_tokens, case.dtype)
    batch = make_batch(case.requests, num_blocks=num_blocks, block_tokens=case.block_tokens)
    rows = batch.num_tokens
    q, k, v = (torch.randn(rows, heads, dim).to(case.dtype) for heads in (query_heads, kv_heads, kv_heads))
    sides = (SdpaAttention(shape), CpuAttention(shape, threads=threads))
    for side in sides:
        side.keys.normal_()
        side.values.normal_()
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for side, times in zip(sides, seconds, strict=True):
            step = side.prepare(batch)
            started = time.perf_counter()
            side.forward(0, q, k, v, step)
            if turn:
                times.append(time.perf_counter() - started)
    read = 2 * sum(context for context, _ in case.requests) * kv_heads * dim * case.dtype.itemsize
    return statistics.median(seconds[0]), statistics.median(seconds[1]), read


def main() -> None:
    """Measure every case and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {options.threads} threads")
    print(f"{'case':34} {'heads':>11} {'dtype':>9} {'sdpa ms':>9} {'kernel ms':>10} {'ratio':>6} {'KV GB/s':>8}")
    with torch.inference_mode():
        for case in CASES:
            sdpa, kernel, read = measure(case, options.threads, options.repeats)
            heads = "/".join(str(size) for size in case.heads)
            kind = str(case.dtype).removeprefix("torch.")
            print(
                f"{case.name:34} {heads:>11} {kind:>9} {sdpa * 1e3:9.2f} {kernel * 1e3:10.2f} "
                f"{sdpa / kernel:6.1f} {read / kernel / 1e9:8.1f}"
            )


if __name__ == "__main__":
    main()
