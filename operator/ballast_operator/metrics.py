"""The operator's own metrics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


class Metrics:
    """Counts of one process."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        self.turns = Histogram(
            "ballast_operator_reconcile_seconds", "Time of one reconcile", buckets=SECONDS, registry=registry
        )
        self.errors = Counter(
            "ballast_operator_reconcile_errors_total", "Reconciles that failed", ["error"], registry=registry
        )
        self.calls = Counter(
            "ballast_operator_api_calls_total",
            "Calls to the API server, watches excepted; code 0 is no answer",
            ["verb", "kind", "code"],
            registry=registry,
        )
        self.resources = Gauge(
            "ballast_operator_resources", "InferenceDeployments by phase", ["phase"], registry=registry
        )
        self.waiting = Gauge("ballast_operator_queue_length", "Resources that wait for their turn", registry=registry)
        self.active = Gauge("ballast_operator_active", "1 in the replica that is active", registry=registry)
        self.replicas = Gauge(
            "ballast_operator_replicas",
            "Worker pods of a resource",
            ["namespace", "name", "state"],
            registry=registry,
        )

    def observe_call(self, verb: str, kind: str, status: int) -> None:
        """Count one call."""
        self.calls.labels(verb, kind, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """Every metric, for the reference."""
        return iter(self._registry.collect())

    def text(self) -> bytes:
        """Everything as Prometheus reads it."""
        return generate_latest(self._registry)
