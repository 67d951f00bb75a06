"""What this device does at most: measured once a process, with the products that compute the model.

Data sheets know no container with a share of the cores, and a small model never leaves the cache. So the peak is the
best of some products of matrices and of some passes over as many bytes as the weights have. Other work on the same
cores during the measurement makes it lower, and the utilization higher.
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

_ROWS = {"cpu": 256, "cuda": 8192}
_SIDE = {"cpu": 1024, "cuda": 8192}
_MOST_BYTES = {"cpu": 256 << 20, "cuda": 4 << 30}
_TURNS = 6


def measured(loaded: LoadedModel) -> Footprint:
    """Measure the device and give what the model costs on it."""
    config, dtype, kind = loaded.config, loaded.dtype, loaded.device.type
    head = config.vocab_size * config.hidden_size
    num_computed = loaded.num_params - (0 if config.tie_embeddings else head)  # an embedding is looked up
    weight_bytes = num_computed * dtype.itemsize
    return Footprint(
        token_flops=2.0 * (num_computed - head),
        attended_flops=4.0 * config.num_layers * config.q_size,
        draw_flops=2.0 * head,
        weight_bytes=weight_bytes,
        kv_bytes=2.0 * config.num_layers * config.kv_size * dtype.itemsize,
        peak_flops=_peak_flops(loaded.device, dtype, loaded.threads, is_native=loaded.weights.is_packed),
        peak_bandwidth=_peak_bandwidth(loaded.device, min(weight_bytes, _MOST_BYTES[kind]), loaded.threads),
    )


@cache
def _peak_flops(device: torch.device, dtype: torch.dtype, threads: int, *, is_native: bool) -> float:
    rows, side = _ROWS[device.type], _SIDE[device.type]
    x = torch.ones(rows, side, dtype=dtype, device=device)
    weight = torch.ones(side, side, dtype=dtype, device=device)
    seconds = _best(lambda: linear(x, weight), device)
    if is_native:
        library = kernels()
        packed, team = Packing(library.lanes).matrix(weight), library.team(threads)
        seconds = min(seconds, _best(lambda: library.multiply(x, packed, side, team=team), device))
    return 2.0 * rows * side * side / seconds


@cache
def _peak_bandwidth(device: torch.device, num_bytes: int, threads: int) -> float:  # noqa: ARG001 -- torch has as many
    buffer = torch.ones(max(1, num_bytes // 4), device=device)
    return 4.0 * len(buffer) / _best(buffer.sum, device)


def _best(work: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of some turns, the first left out."""
    seconds = []
    for _ in range(1 + _TURNS):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begun)
    return min(seconds[1:])
