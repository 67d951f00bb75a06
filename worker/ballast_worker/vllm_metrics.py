"""The metrics `vllm:*`, which Gateway API routers read.

They count only online requests: offline work gives up its slot and its KV blocks when an online request needs them, so
it is no load for a router.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import InfoMetricFamily, Metric

from ballast_engine.stats import EngineStats
from ballast_policy.request import RequestClass
from ballast_worker.histogram import Histogram
from ballast_worker.metric_families import counter, gauge, histogram
from ballast_worker.requests import Recorder

_ONLINE = RequestClass.ONLINE
_LABELS = ("model_name",)
WITHOUT_BORROWED = (
    "The blocks that offline requests hold beyond their reservation do not count, unless another request uses them too."
)


def vllm_metrics(
    model: str, stats: EngineStats, recorders: Sequence[Recorder], *, queued: Histogram, block_tokens: int
) -> Iterator[Metric]:
    """Yield the metrics. `queued`: the seconds that online requests waited for a slot."""
    yield from _load(model, stats, block_tokens)
    yield from _work(model, stats, recorders)
    yield from _latencies(model, recorders, queued)


def kv_load(stats: EngineStats) -> float:
    """Return the share of the KV blocks that are in use, without those that offline requests borrow.

    Blocks that only the prefix cache uses are free, as in vLLM. Blocks that requests share count as used, also those
    that offline requests share.

        (used - max(0, offline - reserved)) / all
    """
    total = stats.kv_used + stats.kv_cached + stats.kv_free
    borrowed = max(0, stats.kv_offline - stats.reservation.blocks)
    return max(0, stats.kv_used - borrowed) / total if total else 0.0


def _load(model: str, stats: EngineStats, block_tokens: int) -> Iterator[Metric]:
    total = stats.kv_used + stats.kv_cached + stats.kv_free
    for name, text, value in (
        ("num_requests_running", "Online requests that hold a slot.", stats.online.running),
        ("num_requests_waiting", "Online requests that wait for a slot.", stats.online.waiting),
        ("kv_cache_usage_perc", f"Share of KV blocks in use, from 0 to 1. {WITHOUT_BORROWED}", kv_load(stats)),
    ):
        yield gauge(f"vllm:{name}", text, _LABELS, [((model,), value)])
    info = InfoMetricFamily("vllm:cache_config", "Sizes of the KV cache.")
    info.add_metric([], {"block_size": str(block_tokens), "num_gpu_blocks": str(total)})
    yield info


def _work(model: str, stats: EngineStats, recorders: Sequence[Recorder]) -> Iterator[Metric]:
    prompt_tokens = sum(r.prompt_tokens[_ONLINE] for r in recorders)
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of online requests that ended.", prompt_tokens),
        ("generation_tokens", "Tokens generated for online requests.", stats.online.decode_tokens),
        ("num_preemptions", "Preemptions of online requests.", sum(stats.online.preemptions.values())),
    ):
        yield counter(f"vllm:{name}", text, _LABELS, [((model,), value)])
    yield counter(
        "vllm:request_success",
        "Complete answers of online requests, by finish reason.",
        ("model_name", "finished_reason"),
        [
            ((model, o.value), sum(r.outcomes[c, o] for r in recorders))
            for c, o in recorders[0].outcomes
            if c is _ONLINE and o in {"stop", "length"}
        ],
    )


def _latencies(model: str, recorders: Sequence[Recorder], queued: Histogram) -> Iterator[Metric]:
    for name, text, parts in (
        ("time_to_first_token", "Time to first token of online requests.", [r.ttft for r in recorders]),
        ("request_time_per_output_token", "Time per output token of online requests.", [r.tpot for r in recorders]),
        ("e2e_request_latency", "Latency of online requests.", [r.latency for r in recorders]),
        ("request_queue_time", "Time that online requests wait for a slot.", [{_ONLINE: queued}]),
    ):
        found = Histogram.sum_of(part[_ONLINE] for part in parts)
        yield histogram(f"vllm:{name}_seconds", text, _LABELS, {(model,): found})
