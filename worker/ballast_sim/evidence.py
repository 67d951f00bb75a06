"""The table as data: one object for each policy, load and reservation; shares are fractions of 1.

| key | meaning |
|---|---|
| policy, load_percent, reservation_percent | which row |
| ttft_ms, tpot_ms | `p50`, `p95`, `p99` in milliseconds; TPOT is a request's mean time per output token |
| ttft_attainment, tpot_attainment, envelope_attainment | requests within the SLO; in the last, each token of them |
| goodput_requests_per_s | online requests that met both |
| total_tokens_per_s, offline_tokens_per_s | of requests completed in the run, for one GPU |
| offline_prefill_tokens_per_s, offline_decode_tokens_per_s | the two parts of it |
| harvest | offline tokens over what the same engine does offline alone, unbounded |
| slo_bound_tokens_per_s, unbounded_tokens_per_s | the two ceilings |
| slot_utilization | slots held over slots, over time |
| wasted_tokens | computed again after a preemption |
| service_gap, jain | of tenants that waited all the time |
| reservation_shortfall | of the reserved slot-seconds (`ballast_sim.report`), those that offline waited for in vain |
| deadline_hit_rate | jobs done by their deadline |
| prompt_thirds | by prompt length: `shortest`, `longest` (tokens), `num_online`, `ttft_` and `tpot_attainment` |
| worst_third_lost | `ttft` and `tpot`: attainment that the worst third loses against online alone |

What was not measured is null: latency without online requests, deadlines without jobs that have one.
"""

from __future__ import annotations

from dataclasses import asdict
from math import isfinite
from typing import Any

from ballast_sim.answers import Percentiles, Third, worst_lost
from ballast_sim.mixed import Bench, Row


def as_json(row: Row, bench: Bench) -> dict[str, Any]:
    """Give a row under the names above."""
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
        "prompt_thirds": [_third(third) for third in result.thirds],
        "worst_third_lost": {"ttft": _known(lost.ttft), "tpot": _known(lost.tpot)},
        "note": row.note,
    }
    return {key: _known(value) for key, value in found.items()}


def _milliseconds(percentiles: Percentiles) -> dict[str, float | None]:
    return {name: _known(1e3 * getattr(percentiles, name)) for name in ("p50", "p95", "p99")}


def _third(third: Third) -> dict[str, Any]:
    return {key: _known(value) for key, value in asdict(third).items()}


def _known(value: Any) -> Any:
    """JSON has no nan."""
    return None if isinstance(value, float) and not isfinite(value) else value
