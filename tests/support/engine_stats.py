"""The figures of an engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ballast_engine.counters import EngineCounters
from ballast_engine.stats import EngineStats
from ballast_policy.host import Host
from ballast_policy.snapshot import PolicyConfig

IDLE = EngineCounters().stats(
    Host(PolicyConfig(slots=8, num_blocks=10, offline_share=0.0)),
    kv_used=0,
    kv_cached=0,
    kv_free=10,
    kv_waste_ratio=0.0,
)


def make_stats(**changes: Any) -> EngineStats:
    """Return the figures of an idle engine with eight slots."""
    return replace(IDLE, **changes)
