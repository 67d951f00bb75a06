"""The metrics of a worker, filled from counters at each scrape. Alerts, dashboards and tests use their names.

Nothing is computed per token.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from ballast_api.scrape_budget import ScrapeBudget
from ballast_engine.stats import OTHERS, EngineStats, StepKind, StepRecord
from ballast_policy.request import RequestClass
from ballast_queue.job import ItemState
from ballast_queue.status import QueueStats
from ballast_worker.engine_metrics import engine_metrics
from ballast_worker.histogram import Histogram
from ballast_worker.http_connection import Connections
from ballast_worker.metric_families import counter, gauge, histogram
from ballast_worker.requests import Recorder
from ballast_worker.utilization import Utilization
from ballast_worker.vllm_metrics import vllm_metrics

if TYPE_CHECKING:
    from ballast_worker.feeder import Feeder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_TENANTS = 100
OTHER_TENANT = "other"
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)


class StepMetrics:
    """Times of steps and of requests that waited for them. The engine's thread writes them."""

    def __init__(self) -> None:
        self.seconds = {kind: Histogram() for kind in StepKind}
        self.prediction_error = Histogram(_RATIOS)
        self.queue = {c: Histogram() for c in RequestClass}
        self.reclaim = Histogram(_STEPS)

    def add(self, record: StepRecord) -> None:
        """Count one step."""
        self.seconds[record.kind].observe(record.seconds)
        if record.predicted_seconds > 0 and record.seconds > 0:
            self.prediction_error.observe(abs(record.predicted_seconds - record.seconds) / record.seconds)
        for admission in record.admissions:
            self.queue[admission.request_class].observe(admission.queued_seconds)
            if admission.request_class is RequestClass.ONLINE:
                self.reclaim.observe(admission.steps_waited)


class Spending:
    """The cost of the worker so far, split between the classes by their service.

    Idle time is charged to online, because the worker is kept for it. So is the time before the first call of `sample`,
    from `since`, in which a model loads. One thread calls it about once a second.
    """

    def __init__(self, since: float) -> None:
        self.dollars = dict.fromkeys(RequestClass, 0.0)
        self._at = since
        self._served: dict[RequestClass, float] = {}

    def sample(self, stats: EngineStats, dollars_per_hour: float, now: float) -> None:
        """Charge the time since the last call."""
        served = dict.fromkeys(RequestClass, 0.0)
        for (request_class, _), service in stats.service.items():
            served[request_class] += service
        before = self._served or served
        gained = {c: max(0.0, served[c] - before[c]) for c in RequestClass}
        total = sum(gained.values())
        spent = (now - self._at) / 3600 * dollars_per_hour
        for request_class in RequestClass:
            share = gained[request_class] / total if total else float(request_class is RequestClass.ONLINE)
            self.dollars[request_class] += spent * share
        self._at, self._served = now, served


@dataclass(frozen=True, slots=True)
class QueueView:
    """The queue at the last tick of this worker."""

    name: str
    is_up: bool
    stats: QueueStats | None
    held: int
    """Items under lease in this worker."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """Failures of the feeder by task."""
    unreadable: int = 0
    """Values in Redis that cannot be read, and are skipped."""


def queue_view(feeder: Feeder, name: str) -> QueueView:
    """Return what a feeder knows about the queue with this name."""
    return QueueView(
        name=name,
        is_up=feeder.is_up,
        stats=feeder.stats,
        held=feeder.num_held,
        failures=dict(feeder.tasks.failures),
        unreadable=feeder.num_unreadable,
    )


@dataclass(frozen=True, slots=True)
class ScrapeData:
    """The values of a scrape, gathered at one moment."""

    model: str
    stats: EngineStats
    steps: StepMetrics
    recorders: tuple[Recorder, ...]
    spending: Spending
    utilization: Utilization | None
    """None if the peak of the device is not known."""
    connections: Connections | None
    """None if another server holds the connections."""
    queue: QueueView | None
    """None for a worker that serves only online requests."""
    block_tokens: int
    generation: int
    restart_required: int
    config_invalid: bool
    is_draining: bool
    is_healthy: bool


class WorkerMetrics(Collector):
    """Render `/metrics`, with or without the series that name tenants."""

    def __init__(
        self,
        gather: Callable[[], ScrapeData],
        *,
        shows_tenants: bool,
        seconds: Callable[[], float] = time.monotonic,
        computed: Callable[[], float] = time.thread_time,
    ) -> None:
        self._gather = gather
        self._shows_tenants = shows_tenants
        self._seconds = seconds
        self._computed = computed
        self._budget = ScrapeBudget()
        self._text = b""
        """The text that was rendered last."""
        self._tenants: set[str] = set()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes. If scrapes took too much time of late, it is the last one."""
        if self._budget.has_left(self._seconds()):
            begun = self._computed()
            self._text = self.text()
            self._budget.spend(self._computed() - begun)
        return self._text

    def text(self) -> bytes:
        """Return the present values as text."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return no names in advance, because registration must not gather values."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its samples."""
        figures = self._gather()
        yield from self.own(figures)
        yield from vllm_metrics(
            figures.model,
            figures.stats,
            figures.recorders,
            queued=figures.steps.queue[RequestClass.ONLINE],
            block_tokens=figures.block_tokens,
        )

    def own(self, figures: ScrapeData) -> Iterator[Metric]:
        """Yield the metric families of Ballast."""
        yield from _requests(figures)
        yield from engine_metrics(figures.stats)
        yield _cost(figures.spending)
        yield from _steps(figures)
        if figures.utilization is not None:
            yield from _device(figures.utilization)
        if self._shows_tenants:
            yield from self._tenant_service(figures)
        yield from _process(figures)
        if figures.connections is not None:
            yield from _http(figures.connections)
        if figures.queue is not None:
            yield from _queue(figures.queue)

    def _tenant_service(self, figures: ScrapeData) -> Iterator[Metric]:
        sums: dict[tuple[str, str], float] = {}
        with self._lock:
            # In this order, the first tenants are those that the engine counts by name for good.
            for (request_class, tenant), service in figures.stats.service.items():
                if tenant not in self._tenants and tenant != OTHERS and len(self._tenants) < MOST_TENANTS:
                    self._tenants.add(tenant)
                label = tenant if tenant in self._tenants else OTHER_TENANT
                key = (request_class.value, label)
                sums[key] = sums.get(key, 0.0) + service
        yield counter(
            "ballast_tenant_service",
            "Service by tenant: tokens weighted as in the policy (input 1, output 2). The first "
            f"{MOST_TENANTS} tenants that a worker serves have series until it restarts, also if they leave; later "
            f"ones count as {OTHER_TENANT!r}, also if they are declared.",
            ("class", "tenant"),
            sorted(sums.items()),
        )


def _requests(figures: ScrapeData) -> Iterator[Metric]:
    recorders = figures.recorders
    for name, text, parts in (
        ("time_to_first_token", "Time from the arrival of a request to its first token.", [r.ttft for r in recorders]),
        (
            "time_per_output_token",
            "Mean time per output token of a request, after the first token.",
            [r.tpot for r in recorders],
        ),
        ("request_latency", "Time from the arrival of a request to its last token.", [r.latency for r in recorders]),
    ):
        yield histogram(
            f"ballast_{name}_seconds",
            text,
            ("class",),
            {(c.value,): Histogram.sum_of(part[c] for part in parts) for c in RequestClass},
        )
    yield counter(
        "ballast_requests",
        "Requests that ended, by outcome.",
        ("class", "outcome"),
        [((c.value, o.value), sum(r.outcomes[c, o] for r in recorders)) for c, o in recorders[0].outcomes],
    )
    yield counter(
        "ballast_slo_requests",
        "Requests with an SLO, by whether it was met: the configured SLO, or that of the request if it is longer. TTFT "
        "counts at the first token, or when its SLO passes without one; TPOT at the end; the latency of a model that "
        "returns vectors or scores at the end, or when its SLO passes before.",
        ("class", "slo", "met"),
        [
            ((c.value, slo, str(met).lower()), sum(r.slo[c, slo, met] for r in recorders))
            for c, slo, met in recorders[0].slo
        ],
    )


def _cost(spending: Spending) -> Metric:
    return counter(
        "ballast_cost_dollars",
        "Cost of the worker so far in dollars, split by the service of each class. The start of the worker and idle "
        "time count as online. With `vllm serve`, the cost begins after the model has loaded.",
        ("class",),
        [((c.value,), dollars) for c, dollars in spending.dollars.items()],
    )


def _device(used: Utilization) -> Iterator[Metric]:
    for name, what, shares in (
        ("flops", "operations per second", used.flops),
        ("bandwidth", "memory bandwidth", used.bandwidth),
    ):
        yield gauge(
            f"ballast_model_{name}_utilization",
            f"Share of the device's {what}, measured at start, that the model used recently.",
            ("phase",),
            [((phase,), share) for phase, share in shares.items()],
        )


def _steps(figures: ScrapeData) -> Iterator[Metric]:
    steps = figures.steps
    yield histogram(
        "ballast_step_seconds",
        "Duration of engine steps.",
        ("kind",),
        {(kind.value,): h for kind, h in steps.seconds.items()},
    )
    yield histogram(
        "ballast_step_prediction_error_ratio",
        "Error of the predicted duration of a step, relative to its duration.",
        (),
        {(): steps.prediction_error},
    )
    yield histogram(
        "ballast_queue_seconds",
        "Time from the arrival of a request to its first slot.",
        ("class",),
        {(c.value,): h for c, h in steps.queue.items()},
    )
    yield histogram(
        "ballast_reclaim_steps", "Steps that an online request waited for its first slot.", (), {(): steps.reclaim}
    )


def _process(figures: ScrapeData) -> Iterator[Metric]:
    for name, text, value in (
        ("ballast_config_generation", "Generation of the configuration in force.", figures.generation),
        (
            "ballast_config_restart_required",
            "Changed fields of the configuration file that need a restart.",
            figures.restart_required,
        ),
        (
            "ballast_config_invalid",
            "1 if the configuration file or that of API keys is invalid, or a file that it names is missing; else 0.",
            figures.config_invalid,
        ),
        ("ballast_draining", "1 after SIGTERM, while the worker drains; else 0.", figures.is_draining),
        (
            "ballast_engine_healthy",
            "1 if the engine works; 0 if it failed and the process must restart.",
            figures.is_healthy,
        ),
    ):
        yield gauge(name, text, (), [((), value)])


def _http(connections: Connections) -> Iterator[Metric]:
    yield gauge(
        "ballast_http_connections",
        "Open connections, by what they wait for: the headers or the body of a request, its answer, the next request "
        "(idle), or the end.",
        ("waits_for",),
        [((phase,), count) for phase, count in connections.by_phase.items()],
    )
    yield counter(
        "ballast_http_closed",
        "Connections that the worker closed because a client exceeded a limit, by limit.",
        ("reason",),
        [((reason.value,), count) for reason, count in connections.closed.items()],
    )


def _queue(view: QueueView) -> Iterator[Metric]:
    yield gauge(
        "ballast_redis_up", "1 if Redis answers and its configuration is safe for jobs; else 0.", (), [((), view.is_up)]
    )
    yield counter(
        "ballast_feeder_failures",
        "Tasks between engine and queue that failed, because of a value in Redis, a full Redis, or a defect. The "
        "others go on.",
        ("task",),
        [((task,), count) for task, count in view.failures.items()],
    )
    yield gauge(
        "ballast_unreadable_values",
        "Values in Redis that the worker cannot read, and skips. Its log names them.",
        (),
        [((), view.unreadable)],
    )
    yield gauge("ballast_leases", "Items under lease in this worker.", (), [((), view.held)])
    stats = view.stats
    if stats is None or not view.is_up:
        return  # unknown values are not exported, because an old value would look like the current one
    name = view.name
    yield gauge(
        "ballast_queue_items",
        "Items by state, of all jobs that the queue keeps. The state inbox counts entries that are not taken in yet.",
        ("queue", "state"),
        [((name, state.value), getattr(stats.items, state.value)) for state in ItemState]
        + [((name, "inbox"), stats.inbox)],
    )
    for metric, text, value in (
        (
            "ballast_queue_oldest_seconds",
            "Age of the oldest job with items that may be claimed, or of the first inbox entry; 0 without any.",
            stats.oldest_waiting_seconds,
        ),
        ("ballast_dead_letters", "Dead letters: items that failed for good.", stats.dead_letters),
        ("ballast_jobs_at_risk", "Jobs that will miss their deadline at the current rates.", stats.jobs_at_risk),
    ):
        yield gauge(metric, text, ("queue",), [((name,), value)])
