"""The device, the number type and the threads that a model is computed with."""

from __future__ import annotations

import os

import torch

from ballast_engine.errors import InvalidOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the first GPU, else the CPU."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOptions(f"{name!r} is not a device: give auto, cpu, cuda or cuda:<number>.") from error
    if device.type not in {"cpu", "cuda"}:
        raise InvalidOptions(
            f"{name!r} is a device this engine does not run on: give auto, cpu, cuda or cuda:<number>."
        )
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InvalidOptions(f"{name!r} asked for, {torch.cuda.device_count()} GPUs found: give auto or cpu.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def resolve_dtype(name: str, *, device: torch.device, checkpoint: str) -> torch.dtype:
    """`auto` is float32 on a CPU and the checkpoint's own on a GPU."""
    if name == "auto":
        name = checkpoint.removeprefix("torch.") if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise InvalidOptions(f"{name!r} is not a number type of this engine: give auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def set_threads(wanted: int) -> int:
    """Give torch so many CPU threads; 0 leaves one core to whoever feeds the engine.

    With as many threads as cores, any other runnable thread (the HTTP server's, a client's) suspends one of them in the
    middle of a parallel section, and all others wait a time slice of the kernel for it: 12 ms where 0.1 ms are needed.
    """
    threads = wanted or max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    return threads
