"""The instruction sets that an image has kernels for, and those that a processor supports."""

from __future__ import annotations

_V2 = frozenset({"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

INSTRUCTION_SETS = {
    "x86_64": {"x86-64-v4": _V4, "x86-64-v3": _V3, "x86-64-v2": _V2},
    "aarch64": {"armv8-a": frozenset({"asimd", "fp"})},
}
"""For each machine type of `platform.machine()`: the instruction sets by their name for `-march`, the fastest first,
with the features of their processors as /proc/cpuinfo names them."""


def supported(machine: str, cpuinfo: str) -> tuple[str, ...]:
    """Return the instruction sets that a processor supports, the fastest first.

    `cpuinfo` is the text of /proc/cpuinfo. Linux omits features that it has not enabled.
    """
    features: set[str] = set()
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in {"flags", "Features"}:
            features = set(value.split())
            break
    return tuple(name for name, needed in INSTRUCTION_SETS.get(machine, {}).items() if needed <= features)
