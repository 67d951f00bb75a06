"""The metrics of the engine: work, slots, limits, and KV."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from ballast_engine.stats import EngineStats
from ballast_policy.plan import Reason
from ballast_policy.request import RequestClass
from ballast_worker.metric_families import counter, gauge

_GIVE_UP = (Reason.KV_RECLAIMED, Reason.NO_KV)
"""Reasons of preemptions that are exported as 0 from the start. Others appear when they happen."""


def engine_metrics(stats: EngineStats) -> Iterator[Metric]:
    """Yield the metrics of the engine."""
    yield from _work(stats)
    yield from _slots(stats)
    yield from _limits(stats)
    yield from _kv(stats)


def _work(stats: EngineStats) -> Iterator[Metric]:
    each = [(c.value, stats.of(c)) for c in RequestClass]
    yield counter(
        "ballast_tokens",
        "Tokens computed for the first time, by phase.",
        ("class", "phase"),
        [((c, "prefill"), of.prefill_tokens) for c, of in each] + [((c, "decode"), of.decode_tokens) for c, of in each],
    )
    yield counter(
        "ballast_wasted_tokens",
        "Tokens computed again after a preemption or after an earlier attempt of a job item, on any worker.",
        ("class",),
        [((c,), of.wasted_tokens) for c, of in each],
    )
    yield counter(
        "ballast_preemptions",
        "Requests that gave up their KV to be computed again later, by reason.",
        ("class", "reason"),
        [((c, r.value), of.preemptions.get(r, 0)) for c, of in each for r in {*_GIVE_UP, *of.preemptions}],
    )
    suspended = "Steps that were suspended between two layers for new online requests."
    yield counter("ballast_suspended_steps", suspended, (), [((), stats.suspended_steps)])
    yield counter("ballast_failed_steps", "Steps that failed.", (), [((), stats.failed_steps)])


def _slots(stats: EngineStats) -> Iterator[Metric]:
    each = [(c.value, stats.of(c)) for c in RequestClass]
    yield gauge(
        "ballast_slots",
        "Requests that hold KV, by whether they hold a slot (running) or not (parked).",
        ("class", "state"),
        [((c, "running"), of.running) for c, of in each] + [((c, "parked"), of.parked) for c, of in each],
    )
    slots = "Number of slots, that is, places in the running batch."
    yield gauge("ballast_slots_total", slots, (), [((), stats.slots)])
    reserved = [((c,), of.reserved) for c, of in each]
    yield gauge("ballast_slots_reserved", "Slots reserved for a class.", ("class",), reserved)
    borrowed = [((c,), of.borrowed) for c, of in each]
    yield gauge("ballast_slots_borrowed", "Slots that a class uses beyond its reservation.", ("class",), borrowed)
    waiting = [((c,), of.waiting) for c, of in each]
    yield gauge("ballast_requests_waiting", "Requests that wait for a slot.", ("class",), waiting)
    parked = [((c,), of.parked_steps) for c, of in each]
    text = "Steps in which a request was parked, summed over requests."
    yield counter("ballast_parked_steps", text, ("class",), parked)


def _limits(stats: EngineStats) -> Iterator[Metric]:
    ceiling = "Batch ceiling: the largest batch that the SLO allows, of decodes, or of prompts in an encoder."
    yield gauge("ballast_batch_ceiling", ceiling, (), [((), stats.batch_ceiling)])
    yield gauge(
        "ballast_lending_ratio",
        "Share of the time left by the SLO that offline may use. It falls with each request that offline work makes "
        "miss its SLO, and others return it.",
        (),
        [((), stats.allowance.lending_ratio)],
    )
    yield gauge(
        "ballast_interference_ratio",
        "Share that offline added to online latency recently: the largest of TTFT and TPOT, median and p99. Exported "
        "only if offline.maxInterferencePercent is set.",
        (),
        [] if stats.interference is None else [((), stats.interference)],
    )
    yield gauge(
        "ballast_offline_reservation_met",
        "1 if offline used its reserved slots in the last step, or as many as its requests and caps allow, or the "
        "reserved prompt tokens, or if there is no offline request; else 0.",
        (),
        [((), stats.is_reservation_met)],
    )


def _kv(stats: EngineStats) -> Iterator[Metric]:
    yield gauge(
        "ballast_kv_blocks",
        "KV blocks by state: used by requests, cached (only in the prefix cache), or free.",
        ("state",),
        [(("used",), stats.kv_used), (("cached",), stats.kv_cached), (("free",), stats.kv_free)],
    )
    waste = "Share of the token positions in used KV blocks that hold no token."
    yield gauge("ballast_kv_waste_ratio", waste, (), [((), stats.kv_waste_ratio)])
    yield counter(
        "ballast_prefix_cache_tokens",
        "Prompt tokens looked up in the prefix cache (asked), and found there (hit).",
        ("result",),
        [(("asked",), stats.prefix_query_tokens), (("hit",), stats.prefix_hit_tokens)],
    )
