"""The operator's metrics."""

from __future__ import annotations

from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import Metric

from ballast_api.names import KIND
from ballast_operator.kinds import Key

PHASES = ("Ready", "Progressing", "NotReady", "Degraded")
REPLICA_STATES = ("desired", "ready")
RESOURCE = ("kind", "resource_namespace", "name")
"""Labels of series about a resource. Prometheus sets the label `namespace` to that of the operator."""
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a resource in the operator's metrics."""

    phase: str
    desired: int | None
    """None: the resource has no replicas."""
    ready: int
    conditions: tuple[tuple[str, str, str], ...] = ()
    """Type, status and reason of each."""
    ray: Mapping[str, bool] = field(default_factory=dict)
    """Whether each part of its Ray cluster is ready. `Degraded` shows only the first problem of a resource."""


class Metrics:
    """The metrics of one process."""

    def __init__(self) -> None:
        registry = self._registry = CollectorRegistry()
        gauge, counter = partial(Gauge, registry=registry), partial(Counter, registry=registry)
        self.reconciles = Histogram(
            "ballast_operator_reconcile_seconds", "Duration of one reconciliation", buckets=SECONDS, registry=registry
        )
        self.errors = counter("ballast_operator_reconcile_errors_total", "Failed reconciliations", ["error"])
        self.calls = counter(
            "ballast_operator_api_calls_total",
            "Calls to the API server without watches; code 0 means no answer",
            ["verb", "kind", "code"],
        )
        self.resources = gauge("ballast_operator_resources", "Resources by phase", ["kind", "phase"])
        self.foreign = gauge(
            "ballast_operator_foreign_resources",
            "Resources that another release of the chart reconciles, to which this one writes nothing",
            ["kind"],
        )
        self.waiting = gauge("ballast_operator_queue_length", "Resources in the work queue")
        self.active = gauge(
            "ballast_operator_active", "1 in the replica that reconciles and watches every kind that it needs, else 0"
        )
        self.started = gauge("ballast_operator_start_time_seconds", "Unix time at which the process started")
        self.started.set_to_current_time()
        self.replicas = gauge("ballast_operator_replicas", "Worker pods of a resource", [*RESOURCE, "state"])
        self.ray_ready = gauge(
            "ballast_operator_ray_ready",
            "1 if the head of a Ray cluster that has served is ready, or the Redis with its state (storage); else 0",
            [*RESOURCE, "part"],
        )
        self.conditions = gauge(
            "ballast_operator_condition",
            "1 for the present status and reason of each condition of a resource",
            [*RESOURCE, "type", "status", "reason"],
        )

    def observe_call(self, verb: str, kind: str, status: int) -> None:
        """Count one call."""
        self.calls.labels(verb, kind, str(status)).inc()

    def collect(self) -> Iterator[Metric]:
        """Return every metric, for the reference."""
        return iter(self._registry.collect())

    def text(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self._registry)

    def show(self, figures: Mapping[Key, Figures], *, num_foreign: int) -> None:
        """Set the gauges of the resources. A former resource is not exported."""
        for gauge in (self.replicas, self.conditions, self.ray_ready):
            gauge.clear()
        phases = Counts(each.phase for each in figures.values())
        for phase in PHASES:
            self.resources.labels(KIND, phase).set(phases[phase])
        self.foreign.labels(KIND).set(num_foreign)
        for key, each in figures.items():
            labels = KIND, key.namespace, key.name
            for condition in each.conditions:
                self.conditions.labels(*labels, *condition).set(1)
            for part, is_ready in each.ray.items():
                self.ray_ready.labels(*labels, part).set(is_ready)
            if each.desired is not None:
                for state, number in zip(REPLICA_STATES, (each.desired, each.ready), strict=True):
                    self.replicas.labels(*labels, state).set(number)
