"""GPUs by name: rates from data sheets, and list prices.

Rates are dense (no structured sparsity). Prices are approximate for 2025, and differ by region and contract. A
plan reads other figures from its YAML file (`ballast plan --inputs`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ballast_sim.errors import BadInput

PCIE = 32e9
"""Bytes per second in one direction of PCIe 4.0 with 16 lanes."""

ETHERNET = 12.5e9
"""Bytes per second in one direction of a network of 100 Gbit/s."""


@dataclass(frozen=True, slots=True)
class Accelerator:
    """One GPU, or a group of equal GPUs that share a model. Rates are per second, memory is in bytes, power in watts,
    and money in dollars. All figures but `link` and `network` are those of the whole group.
    """

    name: str
    flops: float
    """Dense bfloat16 operations per second."""
    fp8_flops: float
    """Dense fp8 operations per second. A chip without fp8 has the value of `flops` here."""
    bandwidth: float
    """Bytes per second from memory."""
    memory: float
    watts: float
    """Power at full load."""
    idle_watts: float
    dollars_per_hour: float
    """Price of a rented GPU."""
    purchase_dollars: float
    """Price of a bought GPU, with its share of the server."""
    link: float = PCIE
    """Bytes per second that one GPU sends to the others of its machine."""
    network: float = ETHERNET
    """Bytes per second that one GPU sends to other nodes while all GPUs of its node do so."""
    count: int = 1
    """GPUs of the group."""
    nodes: int = 1
    """Nodes with equal parts of the group."""

    @property
    def unit(self) -> str:
        """The word for what a replica runs on."""
        return "GPU" if self.count == 1 else "group"

    def group(self, count: int, nodes: int = 1) -> Accelerator:
        """Return a group of `count` such GPUs on a number of nodes."""
        figures = ("flops", "fp8_flops", "bandwidth", "memory", "watts", "idle_watts", "dollars_per_hour",
                   "purchase_dollars")  # fmt: skip
        total = {name: count * getattr(self, name) for name in figures}
        name = f"{count} x {self.name}" + (f" on {nodes} nodes" if nodes > 1 else "")
        return replace(self, name=name, count=count, nodes=nodes, **total) if count > 1 else self


GPUS = {
    gpu.name: gpu
    for gpu in (
        Accelerator("a100", 312e12, 312e12, 2.039e12, 80e9, 400, 60, 1.8, 18_000, 300e9, 25e9),
        Accelerator("h100", 989e12, 1979e12, 3.35e12, 80e9, 700, 75, 3.0, 32_000, 450e9, 50e9),
        Accelerator("h200", 989e12, 1979e12, 4.8e12, 141e9, 700, 80, 3.8, 38_000, 450e9, 50e9),
        Accelerator("l4", 121e12, 242e12, 0.3e12, 24e9, 72, 15, 0.7, 3_200),
    )
}
"""A100-80GB SXM, H100 SXM and H200 SXM with NVLink and a network adapter of 200 or 400 Gbit/s for each GPU, and L4 with
PCIe."""


def gpu(name: str) -> Accelerator:
    """Find a GPU by name, whatever its case; raise BadInput if it is unknown."""
    if name.lower() not in GPUS:
        raise BadInput(f"unknown GPU {name!r}; known are {', '.join(GPUS)}")
    return GPUS[name.lower()]
