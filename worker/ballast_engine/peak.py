"""Measure the peak of this machine once per process, with the matrix products that compute the model.

A data sheet does not describe a container with a share of the cores, and a small model may fit into the cache. The peak
is therefore the best of several matrix products, and of several passes over as many bytes as the weights have. Other
work on the same cores during the measurement lowers the peak, and so raises the reported utilization.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch.nn.functional import linear

from ballast_engine.footprint import Footprint
from ballast_engine.loader import LoadedModel
from ballast_engine.models.packing import Packing
from ballast_engine.native.library import kernels

_ROWS, _SIDE = 256, 1024
_MOST_BYTES = 256 << 20
_RUNS = 6


def measure_footprint(loaded: LoadedModel) -> Footprint:
    """Measure this machine, and return the cost of the model on it."""
    config, dtype = loaded.config, loaded.dtype
    head = config.vocab_size * config.hidden_size
    num_computed = loaded.num_params - (0 if config.tie_embeddings else head)  # an embedding is a lookup
    weight_bytes = num_computed * dtype.itemsize
    return Footprint(
        token_flops=2.0 * (num_computed - head),
        attended_flops=4.0 * config.num_layers * config.q_size,
        draw_flops=2.0 * head,
        weight_bytes=weight_bytes,
        kv_bytes=2.0 * config.num_layers * config.kv_size * dtype.itemsize,
        peak_flops=_peak_flops(dtype, loaded.threads, is_native=loaded.weights.is_packed),
        peak_bandwidth=_peak_bandwidth(min(weight_bytes, _MOST_BYTES), loaded.threads),
    )


@cache
def _peak_flops(dtype: torch.dtype, threads: int, *, is_native: bool) -> float:
    x, weight = torch.ones(_ROWS, _SIDE, dtype=dtype), torch.ones(_SIDE, _SIDE, dtype=dtype)
    seconds = _best(lambda: linear(x, weight))
    if is_native:
        library = kernels()
        packed, team = Packing(library.lanes).matrix(weight), library.team(threads)
        seconds = min(seconds, _best(lambda: library.multiply(x, packed, _SIDE, team=team)))
    return 2.0 * _ROWS * _SIDE * _SIDE / seconds


@cache
def _peak_bandwidth(num_bytes: int, threads: int) -> float:  # noqa: ARG001 -- torch has as many
    buffer = torch.ones(max(1, num_bytes // 4))
    return 4.0 * len(buffer) / _best(buffer.sum)


def _best(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest run, without the first run."""
    seconds = []
    for _ in range(1 + _RUNS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
