"""`/metrics` of a vLLM server with Ballast: the series of a worker beside those of vLLM.

vLLM counts both classes in `vllm:num_requests_running`, `vllm:num_requests_waiting` and `vllm:kv_cache_usage_perc`.
Routers send requests by these three, and offline work gives way to online requests. So here they leave out what offline
work borrows, as in a worker with Ballast's own engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from ballast_policy.request import RequestClass
from ballast_worker.metrics import ScrapeData, WorkerMetrics
from ballast_worker.vllm_metrics import WITHOUT_BORROWED, kv_load

PRIVATE = frozenset({"vllm:lora_requests_info"})
"""Series of vLLM that name the adapters of its requests."""
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
KV_USAGE = "vllm:kv_cache_usage_perc"
ONLINE_ONLY = "Online requests only."


class ServerMetrics(WorkerMetrics):
    """Render `/metrics`, with or without the series that name tenants."""

    def __init__(
        self, gather: Callable[[], ScrapeData], *, shows_tenants: bool, hidden: frozenset[str] = frozenset()
    ) -> None:
        """Render without the `hidden` series of vLLM."""
        super().__init__(gather, shows_tenants=shows_tenants)
        self._hidden = hidden

    def text(self) -> bytes:
        """Return the present values as text."""
        registry: Any = self  # `generate_latest` calls only `collect`
        return generate_latest(registry)

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its samples."""
        figures = self._gather()
        online = figures.stats.of(RequestClass.ONLINE)
        replaced: dict[str, tuple[float, str]] = {
            RUNNING: (online.running, ONLINE_ONLY),
            WAITING: (online.waiting, ONLINE_ONLY),
            KV_USAGE: (kv_load(figures.stats), WITHOUT_BORROWED),
        }
        yield from self.own(figures)
        for family in REGISTRY.collect():
            if family.name in replaced:
                yield _replaced(family, *replaced[family.name])
            elif family.name not in self._hidden:
                yield family


def _replaced(family: Metric, value: float, text: str) -> Metric:
    """Return a gauge of vLLM with another value, and a sentence that states how it differs."""
    labels = dict(family.samples[0].labels) if family.samples else {}
    found = GaugeMetricFamily(family.name, f"{family.documentation} {text}", labels=tuple(labels))
    found.add_metric(tuple(labels.values()), value)
    return found
