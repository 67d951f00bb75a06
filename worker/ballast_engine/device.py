"""The device, the number type and the threads of a model's computation."""

from __future__ import annotations

import os

import torch

from ballast_engine.errors import InvalidOptions

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(name: str) -> torch.device:
    """Return the device of a name. `auto` is the first GPU, or the CPU without one."""
    if name == "auto":
        return torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InvalidOptions(f"{name!r} is not a device: use auto, cpu, cuda or cuda:<number>.") from error
    if device.type not in {"cpu", "cuda"}:
        raise InvalidOptions(f"This engine does not run on {name!r}: use auto, cpu, cuda or cuda:<number>.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        num = torch.cuda.device_count()
        found = "1 GPU" if num == 1 else f"{num} GPUs"
        raise InvalidOptions(f"Device {name!r} not found: this machine has {found}. Use auto or cpu.")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else torch.device("cpu")


def resolve_dtype(name: str, *, device: torch.device, checkpoint: str) -> torch.dtype:
    """Return the number type of a name. `auto` is float32 on a CPU, and that of the checkpoint on a GPU."""
    if name == "auto":
        name = checkpoint.removeprefix("torch.") if device.type == "cuda" else "float32"
    if name not in _DTYPES:
        raise InvalidOptions(f"{name!r} is not a number type of this engine: use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[name]


def set_threads(wanted: int) -> int:
    """Set torch's CPU threads and return their number. 0 uses all cores but one, which is left to other threads.

    With as many threads as cores, any other runnable thread interrupts one of them in the middle of a parallel section,
    and the others wait a time slice of the kernel for it: 12 ms instead of 0.1 ms.
    """
    threads = wanted or max(1, len(os.sched_getaffinity(0)) - 1)
    torch.set_num_threads(threads)
    return threads
