"""What a GPU can do and what it costs: defaults from data sheets and list prices, all of them inputs.

Rates are dense (no structured sparsity). Prices are of the order seen in 2025 and differ by region and contract:
whoever plans puts their own into the YAML file (`ballast plan --inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast_sim.errors import BadInput


@dataclass(frozen=True, slots=True)
class Gpu:
    """One accelerator. Rates per second, memory in bytes, power in watts, money in dollars."""

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    fp8_flops: float
    """Dense 8-bit operations per second; where the chip has no fp8, its int8 rate does not help: equal to `flops`."""
    bandwidth: float
    """Bytes per second from memory."""
    memory: float
    watts: float
    """At full load."""
    idle_watts: float
    dollars_per_hour: float
    """Rented."""
    purchase_dollars: float
    """Bought, with its share of the server around it."""


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("a100", 312e12, 312e12, 2.039e12, 80e9, 400, 60, 1.8, 18_000),
        Gpu("h100", 989e12, 1979e12, 3.35e12, 80e9, 700, 75, 3.0, 32_000),
        Gpu("h200", 989e12, 1979e12, 4.8e12, 141e9, 700, 80, 3.8, 38_000),
        Gpu("l4", 121e12, 242e12, 0.3e12, 24e9, 72, 15, 0.7, 3_200),
    )
}
"""A100-80GB SXM, H100 SXM, H200 SXM, L4."""


def gpu(name: str) -> Gpu:
    """Look up a GPU by name, in any case.

    Raises:
        BadInput: it is not known; the message lists those that are.
    """
    try:
        return GPUS[name.lower()]
    except KeyError:
        known = ", ".join(GPUS)
        raise BadInput(f"unknown GPU {name!r}; known are {known}, and those under `gpus` in the input file") from None
