"""The figures of an EngineCore as one message, for the metrics and the status of the API server.

vLLM encodes its dataclasses. `engine_stats` and `steps` decode them, so that both engines have the same metrics.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from pydantic import TypeAdapter

from ballast_engine.stats import EngineStats, StepRecord
from ballast_policy.host import Host
from ballast_policy.request import OFFLINE, RUNNING, Request, RequestClass
from ballast_policy.reservation import Reservation
from ballast_vllm.counters import Counters

Message = dict[str, Any]
_STATS = TypeAdapter(EngineStats)
_STEPS = TypeAdapter(list[StepRecord])


def message(counters: Counters, host: Host, *, kv_free: int, kv_cached: int, kv_offline: int, since: int,
            num_blocked: Mapping[RequestClass, int], held_up: Mapping[str, Request]) -> Message:  # fmt: skip
    """Return all figures, and the steps after the step number `since`.

    `kv_free` includes the `kv_cached` blocks. `kv_offline`: see `PrivateBlocks.num_offline`; the records count too many
    blocks while KV is plenty. `num_blocked`: waiting requests that the host does not know yet.
    `held_up`: those of them that wait for a place of their adapter, which online requests hold.
    """
    residents = host.residents.values()
    held = sum([request.num_blocks for request in residents]) * host.config.block_tokens
    unused = max(0, held - sum([request.num_computed for request in residents]))
    stats = counters.tokens.stats(
        host,
        kv_used=host.config.num_blocks - kv_free,
        kv_cached=kv_cached,
        kv_free=kv_free - kv_cached,
        kv_waste_ratio=unused / held if held else 0.0,
        num_blocked=num_blocked,
    )
    return {
        "stats": replace(
            stats,
            offline=replace(stats.offline, held_up=len(held_up)),
            kv_offline=kv_offline,
            reservation=_reservation(host, held_up.values()),
        ),
        "held_up": list(held_up),
        "in_step": dict(counters.in_step),
        "recent": counters.since(since),
    }


def _reservation(host: Host, held_up: Collection[Request]) -> Reservation:
    """Return the reservation of the last step. It covers requests that are held up, which the host does not know."""
    found = host.reservation
    if found.in_use >= found.slots or found.is_met_by_tokens:
        return found
    running = (request for request in host.residents.values() if request.phase is RUNNING)
    left = host.config.tenant_slots_left(request for request in running if request.request_class is OFFLINE)
    return replace(found, is_met=found.is_met and not any(left.get(request.tenant, 1) > 0 for request in held_up))


def engine_stats(found: Mapping[str, Any]) -> EngineStats:
    """Return the figures of a message. A step of vLLM is never suspended, and a failed step ends EngineCore."""
    return _STATS.validate_python(found["stats"])


def steps(found: Mapping[str, Any]) -> list[StepRecord]:
    """Return the recent steps of a message, in order."""
    return _STEPS.validate_python(found["recent"])
