"""Rows of a table as JSON. `docs/how-to/compare-policies.md` describes the keys."""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from ballast_sim.comparison.bench import Bench, Row
from ballast_sim.replay.attainment import Percentiles, worst_lost


def as_json(row: Row, bench: Bench) -> dict[str, Any]:
    """Return a row for JSON. Shares are fractions of 1, and a figure that was not measured is None."""
    result = row.result
    lost = worst_lost(result.thirds, bench.alone(row.load).result.thirds)
    is_split = row.policy == "static-split"
    found = {
        "policy": row.policy,
        "load_percent": round(100 * row.load, 6),
        "reservation_percent": round(100 * row.reservation, 6),
        "ttft_ms": _milliseconds(result.ttft),
        "tpot_ms": _milliseconds(result.tpot),
        "ttft_attainment": result.ttft_attainment,
        "tpot_attainment": result.tpot_attainment,
        "envelope_attainment": result.envelope_attainment,
        "goodput_requests_per_s": result.goodput,
        "total_tokens_per_s": row.total_tokens,
        "offline_tokens_per_s": row.offline_tokens,
        "offline_prefill_tokens_per_s": None if is_split else result.offline.prefill,
        "offline_decode_tokens_per_s": None if is_split else result.offline.decode,
        "harvest": row.offline_tokens / bench.unbounded,
        "slo_bound_tokens_per_s": bench.bound,
        "unbounded_tokens_per_s": bench.unbounded,
        "slot_utilization": result.online_slots + result.offline_slots,
        "wasted_tokens": result.wasted_tokens,
        "service_gap": result.service_gap,
        "jain": result.jain,
        "reservation_shortfall": result.reservation_shortfall,
        "deadline_hit_rate": result.deadline_hits,
        "prompt_thirds": [asdict(third) for third in result.thirds],
        "worst_third_lost": asdict(lost),
        "note": row.note,
    }
    return {key: known(value) for key, value in found.items()}


def _milliseconds(percentiles: Percentiles) -> dict[str, float]:
    return {name: 1e3 * value for name, value in asdict(percentiles).items()}


def known(value: Any) -> Any:
    """Replace each number that JSON cannot express by None, also in lists and dictionaries."""
    if isinstance(value, dict):
        return {key: known(one) for key, one in value.items()}
    if isinstance(value, list):
        return [known(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
