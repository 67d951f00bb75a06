"""The figures of an EngineCore as one message, for the metrics and the status of the API server.

`engine_stats` and `steps` turn a message back into the values that the native engine has, so that both engines have the
same metrics.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from ballast_engine.footprint import PhaseWork
from ballast_engine.stats import AdmissionRecord, ClassStats, EngineStats, StepKind, StepRecord
from ballast_policy.host import Host
from ballast_policy.learning.cost import CostModel
from ballast_policy.learning.interference import Allowance
from ballast_policy.plan import Reason
from ballast_policy.request import PARKED, RUNNING, RequestClass
from ballast_policy.reservation import Reservation
from ballast_vllm.counters import Counters

Message = dict[str, Any]


def message(counters: Counters, host: Host, *, kv_free: int, kv_cached: int, num_blocked: Mapping[RequestClass, int],
            since: int) -> Message:  # fmt: skip
    """Return all figures, and the steps after the step number `since`.

    `kv_free` includes the `kv_cached` blocks. `num_blocked`: waiting requests that the host does not know yet.
    """
    tokens, slots, reservation = counters.tokens, host.config.slots, host.reservation
    reserved = {RequestClass.ONLINE: slots - reservation.slots, RequestClass.OFFLINE: reservation.slots}
    residents = host.residents.values()
    held = sum([request.num_blocks for request in residents]) * host.config.block_tokens
    unused = max(0, held - sum([request.num_computed for request in residents]))
    service: dict[str, dict[str, float]] = {str(c): {} for c in RequestClass}
    for (request_class, tenant), cost in tokens.service.items():
        service[str(request_class)][tenant] = cost
    return {
        "classes": {str(c): _class(counters, host, c, reserved[c], num_blocked[c]) for c in RequestClass},
        "slots": slots,
        "kv_used": host.config.num_blocks - kv_free,
        "kv_cached": kv_cached,
        "kv_free": kv_free - kv_cached,
        "kv_waste_ratio": unused / held if held else 0.0,
        "prefix_query_tokens": tokens.prefix_query_tokens,
        "prefix_hit_tokens": tokens.prefix_hit_tokens,
        "steps": counters.steps,
        "in_step": {str(c): number for c, number in counters.in_step.items()},
        "exact_steps": counters.exact_steps,
        "deferred_grants": counters.deferred_grants,
        "short_grants": counters.short_grants,
        "draft_tokens": counters.draft_tokens,
        "unplanned_preemptions": counters.unplanned_preemptions,
        "batch_ceiling": host.ceiling or slots,
        "cost": asdict(host.cost),
        "reservation": asdict(reservation),
        "service": service,
        "work": {phase: asdict(work) for phase, work in tokens.work.items()},
        "allowance": asdict(host.interference.allowance),
        "interference": None if host.interference.cap is None else host.interference.inflation,
        "recent": [_step(record) for record in counters.since(since)],
    }


def _class(counters: Counters, host: Host, request_class: RequestClass, reserved: int, num_blocked: int) -> Message:
    held, counts = host.held[request_class], counters.tokens.classes[request_class]
    return {
        "running": held[RUNNING],
        "parked": held[PARKED],
        "waiting": host.backlog.count(request_class) + num_blocked,
        "reserved": reserved,
        "borrowed": max(0, held[RUNNING] - reserved),
        "prefill_tokens": counts.prefill_tokens,
        "decode_tokens": counts.decode_tokens,
        "wasted_tokens": counts.wasted_tokens,
        "preemptions": {str(reason): number for reason, number in counts.preemptions.items()},
        "parked_steps": counts.parked_steps,
    }


def _step(record: StepRecord) -> Message:
    return {
        "kind": str(record.kind),
        "seconds": record.seconds,
        "predicted_seconds": record.predicted_seconds,
        "num_prefill": record.num_prefill,
        "num_decode": record.num_decode,
        "admissions": [asdict(a) | {"request_class": str(a.request_class)} for a in record.admissions],
    }


def engine_stats(found: Mapping[str, Any]) -> EngineStats:
    """Return the figures of a message. A step of vLLM is never suspended, and a failed step ends EngineCore."""
    online, offline = (_class_stats(found["classes"][str(c)]) for c in (RequestClass.ONLINE, RequestClass.OFFLINE))
    return EngineStats(
        slots=found["slots"],
        online=online,
        offline=offline,
        kv_used=found["kv_used"],
        kv_cached=found["kv_cached"],
        kv_free=found["kv_free"],
        kv_waste_ratio=found["kv_waste_ratio"],
        kv_waste_mean_ratio=0.0,
        prefix_query_tokens=found["prefix_query_tokens"],
        prefix_hit_tokens=found["prefix_hit_tokens"],
        steps=found["steps"],
        failed_steps=0,
        suspended_steps=0,
        deferred_grants=found["deferred_grants"],
        batch_ceiling=found["batch_ceiling"],
        cost=CostModel(**found["cost"]),
        reservation=Reservation(**found["reservation"]),
        service={(RequestClass(c), tenant): cost for c, by in found["service"].items() for tenant, cost in by.items()},
        work={phase: PhaseWork(**work) for phase, work in found["work"].items()},
        allowance=Allowance(**found["allowance"]),
        interference=found["interference"],
    )


def _class_stats(found: Mapping[str, Any]) -> ClassStats:
    return ClassStats(**{**found, "preemptions": {Reason(name): n for name, n in found["preemptions"].items()}})


def steps(found: Mapping[str, Any]) -> Iterable[StepRecord]:
    """Return the recent steps of a message, in order."""
    for step in found["recent"]:
        admissions = tuple(
            AdmissionRecord(**{**admission, "request_class": RequestClass(admission["request_class"])})
            for admission in step["admissions"]
        )
        yield StepRecord(**{**step, "kind": StepKind(step["kind"]), "admissions": admissions})
