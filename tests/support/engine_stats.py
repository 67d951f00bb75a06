"""The figures of an engine."""

from __future__ import annotations

from typing import Any

from ballast_engine.stats import ClassStats, EngineStats
from ballast_policy.reservation import Reservation


def make_stats(**changes: Any) -> EngineStats:
    """Return the figures of an idle engine with eight slots."""
    fields: dict[str, Any] = {
        "slots": 8,
        "online": ClassStats(),
        "offline": ClassStats(),
        "kv_used": 0,
        "kv_cached": 0,
        "kv_free": 10,
        "kv_offline": 0,
        "kv_waste_ratio": 0.0,
        "prefix_query_tokens": 0,
        "prefix_hit_tokens": 0,
        "steps": 0,
        "failed_steps": 0,
        "suspended_steps": 0,
        "deferred_grants": 0,
        "batch_ceiling": 8,
        "reservation": Reservation(),
        "service": {},
    }
    return EngineStats(**(fields | changes))
