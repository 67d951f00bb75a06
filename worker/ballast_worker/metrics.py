"""The metrics of a worker, filled from counters at each scrape. Alerts, dashboards and tests use their names.

Nothing is computed per token. The metrics `vllm:*` are for Gateway API routers, and count only online requests: offline
work gives up its slot when an online request needs it, so it is no load for a router.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ballast_engine.stats import EngineStats, StepKind, StepRecord
from ballast_policy.plan import Reason
from ballast_policy.request import RequestClass
from ballast_queue.job import ItemState
from ballast_queue.status import QueueStats
from ballast_worker.histogram import Histogram
from ballast_worker.requests import Recorder
from ballast_worker.utilization import Utilization

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MOST_TENANTS = 100
OTHER_TENANT = "other"
_GIVE_UP = (Reason.KV_RECLAIMED, Reason.NO_KV)
"""Reasons of preemptions that are exported as 0 from the start. Others appear when they happen."""
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
    """The cost of the device so far, split between the classes by their service.

    Idle time is charged to online, because the device is kept for it. One thread calls `sample` about once a second.
    """

    def __init__(self) -> None:
        self.dollars = dict.fromkeys(RequestClass, 0.0)
        self._at: float | None = None
        self._served = dict.fromkeys(RequestClass, 0.0)

    def sample(self, stats: EngineStats, dollars_per_hour: float, now: float) -> None:
        """Charge the time since the last call."""
        served = dict.fromkeys(RequestClass, 0.0)
        for (request_class, _), service in stats.service.items():
            served[request_class] += service
        if self._at is not None:
            gained = {c: max(0.0, served[c] - self._served[c]) for c in RequestClass}
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
    jobs_at_risk: int
    held: int
    """Items under lease in this worker."""


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
    queue: QueueView | None
    """None for a worker that serves only online requests."""
    block_tokens: int
    generation: int
    restart_required: int
    config_invalid: bool
    is_draining: bool
    is_healthy: bool


class WorkerMetrics(Collector):
    """Render `/metrics`."""

    def __init__(self, gather: Callable[[], ScrapeData]) -> None:
        self._gather = gather
        self._tenants: set[str] = set()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """Return the text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Return no names in advance, because registration must not gather values."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric family with its samples."""
        figures = self._gather()
        yield from self.own(figures)
        yield from _vllm(figures)

    def own(self, figures: ScrapeData) -> Iterator[Metric]:
        """Yield the metric families of Ballast."""
        yield from _requests(figures)
        yield from _engine(figures)
        yield from _steps(figures)
        if figures.utilization is not None:
            yield from _device(figures.utilization)
        yield from self._tenant_service(figures)
        yield from _process(figures)
        if figures.queue is not None:
            yield from _queue(figures.queue)

    def _tenant_service(self, figures: ScrapeData) -> Iterator[Metric]:
        sums: dict[tuple[str, str], float] = {}
        with self._lock:
            for (request_class, tenant), service in sorted(figures.stats.service.items()):
                if tenant not in self._tenants and len(self._tenants) < MOST_TENANTS:
                    self._tenants.add(tenant)
                label = tenant if tenant in self._tenants else OTHER_TENANT
                key = (request_class.value, label)
                sums[key] = sums.get(key, 0.0) + service
        yield _counter(
            "ballast_tenant_service",
            f"Service by tenant: tokens weighted as in the policy (input 1, output 2). Beyond {MOST_TENANTS} tenants, "
            f"further tenants count as {OTHER_TENANT!r}.",
            ("class", "tenant"),
            sums.items(),
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
        yield _histogram(
            f"ballast_{name}_seconds",
            text,
            ("class",),
            {(c.value,): Histogram.sum_of(part[c] for part in parts) for c in RequestClass},
        )
    yield _counter(
        "ballast_requests",
        "Requests that ended, by outcome.",
        ("class", "outcome"),
        [((c.value, o.value), sum(r.outcomes[c, o] for r in recorders)) for c, o in recorders[0].outcomes],
    )
    yield _counter(
        "ballast_slo_requests",
        "Requests with an SLO, by whether it was met.",
        ("class", "slo", "met"),
        [
            ((c.value, slo, str(met).lower()), sum(r.slo[c, slo, met] for r in recorders))
            for c, slo, met in recorders[0].slo
        ],
    )


def _engine(figures: ScrapeData) -> Iterator[Metric]:
    stats = figures.stats
    each = [(c.value, stats.of(c)) for c in RequestClass]
    yield _counter(
        "ballast_tokens",
        "Tokens computed for the first time, by phase.",
        ("class", "phase"),
        [((c, "prefill"), of.prefill_tokens) for c, of in each] + [((c, "decode"), of.decode_tokens) for c, of in each],
    )
    yield _counter(
        "ballast_wasted_tokens",
        "Tokens computed again after a preemption or after an earlier attempt of a job item, on any worker.",
        ("class",),
        [((c,), of.wasted_tokens) for c, of in each],
    )
    yield _counter(
        "ballast_preemptions",
        "Requests that gave up their KV to be computed again later, by reason.",
        ("class", "reason"),
        [((c, r.value), of.preemptions.get(r, 0)) for c, of in each for r in {*_GIVE_UP, *of.preemptions}],
    )
    yield _counter(
        "ballast_parked_steps",
        "Steps in which a request was parked, summed over requests.",
        ("class",),
        [((c,), of.parked_steps) for c, of in each],
    )
    yield _gauge(
        "ballast_slots",
        "Requests that hold KV, by whether they hold a slot (running) or not (parked).",
        ("class", "state"),
        [((c, "running"), of.running) for c, of in each] + [((c, "parked"), of.parked) for c, of in each],
    )
    yield _gauge(
        "ballast_slots_total", "Number of slots, that is, places in the running batch.", (), [((), stats.slots)]
    )
    yield _gauge(
        "ballast_slots_reserved", "Slots reserved for a class.", ("class",), [((c,), o.reserved) for c, o in each]
    )
    yield _gauge(
        "ballast_slots_borrowed",
        "Slots that a class uses beyond its reservation.",
        ("class",),
        [((c,), of.borrowed) for c, of in each],
    )
    yield _gauge(
        "ballast_requests_waiting", "Requests that wait for a slot.", ("class",), [((c,), of.waiting) for c, of in each]
    )
    yield _gauge(
        "ballast_batch_ceiling",
        "Batch ceiling: the largest decode batch that the SLO allows.",
        (),
        [((), stats.batch_ceiling)],
    )
    yield _gauge(
        "ballast_lending_ratio",
        "Share of the time left by the SLO that offline may use. It falls below 1 after offline work made too many "
        "requests miss their SLO.",
        (),
        [((), stats.allowance.lending_ratio)],
    )
    yield _gauge(
        "ballast_interference_ratio",
        "Share that offline added to online latency recently: the largest of TTFT and TPOT, median and p99. Exported "
        "only if offline.maxInterferencePercent is set.",
        (),
        [] if stats.interference is None else [((), stats.interference)],
    )
    yield _gauge(
        "ballast_kv_blocks",
        "KV blocks by state: used by requests, cached (only in the prefix cache), or free.",
        ("state",),
        [(("used",), stats.kv_used), (("cached",), stats.kv_cached), (("free",), stats.kv_free)],
    )
    yield _gauge(
        "ballast_kv_waste_ratio",
        "Share of the token positions in used KV blocks that hold no token.",
        (),
        [((), stats.kv_waste_ratio)],
    )
    yield _gauge(
        "ballast_offline_reservation_met",
        "1 if offline used its reserved slots in the last step, or as many as its requests and caps allow; else 0.",
        (),
        [((), stats.reservation.is_met)],
    )
    yield _counter(
        "ballast_suspended_steps",
        "Steps that were suspended between two layers for new online requests.",
        (),
        [((), stats.suspended_steps)],
    )
    yield _counter("ballast_failed_steps", "Steps that failed.", (), [((), stats.failed_steps)])
    yield _counter(
        "ballast_prefix_cache_tokens",
        "Prompt tokens looked up in the prefix cache (asked), and found there (hit).",
        ("result",),
        [(("asked",), stats.prefix_query_tokens), (("hit",), stats.prefix_hit_tokens)],
    )
    yield _counter(
        "ballast_cost_dollars",
        "Cost of the device so far in dollars, split by the service of each class.",
        ("class",),
        [((c.value,), dollars) for c, dollars in figures.spending.dollars.items()],
    )


def _device(used: Utilization) -> Iterator[Metric]:
    for name, what, shares in (
        ("flops", "operations per second", used.flops),
        ("bandwidth", "memory bandwidth", used.bandwidth),
    ):
        yield _gauge(
            f"ballast_model_{name}_utilization",
            f"Share of the device's {what}, measured at start, that the model used recently.",
            ("phase",),
            [((phase,), share) for phase, share in shares.items()],
        )


def _steps(figures: ScrapeData) -> Iterator[Metric]:
    steps = figures.steps
    yield _histogram(
        "ballast_step_seconds",
        "Duration of engine steps.",
        ("kind",),
        {(kind.value,): h for kind, h in steps.seconds.items()},
    )
    yield _histogram(
        "ballast_step_prediction_error_ratio",
        "Error of the predicted duration of a step, relative to its duration.",
        (),
        {(): steps.prediction_error},
    )
    yield _histogram(
        "ballast_queue_seconds",
        "Time from the arrival of a request to its first slot.",
        ("class",),
        {(c.value,): h for c, h in steps.queue.items()},
    )
    yield _histogram(
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
        ("ballast_config_invalid", "1 if the configuration file is invalid; else 0.", figures.config_invalid),
        ("ballast_draining", "1 after SIGTERM, while the worker drains; else 0.", figures.is_draining),
        (
            "ballast_engine_healthy",
            "1 if the engine works; 0 if it failed and the process must restart.",
            figures.is_healthy,
        ),
    ):
        yield _gauge(name, text, (), [((), value)])


def _queue(view: QueueView) -> Iterator[Metric]:
    yield _gauge(
        "ballast_redis_up", "1 if Redis answers and its configuration is safe for jobs; else 0.", (), [((), view.is_up)]
    )
    yield _gauge("ballast_leases", "Items under lease in this worker.", (), [((), view.held)])
    stats = view.stats
    if stats is None or not view.is_up:
        return  # unknown values are not exported, because an old value would look like the current one
    name = view.name
    yield _gauge(
        "ballast_queue_items",
        "Items by state, of all jobs that the queue keeps. The state inbox counts entries that are not taken in yet.",
        ("queue", "state"),
        [((name, state.value), getattr(stats.items, state.value)) for state in ItemState]
        + [((name, "inbox"), stats.inbox)],
    )
    for metric, text, value in (
        ("ballast_queue_oldest_seconds", "Age of the oldest job with waiting items.", stats.oldest_waiting_seconds),
        ("ballast_dead_letters", "Dead letters: items that failed for good.", stats.dead_letters),
        ("ballast_jobs_at_risk", "Jobs that will miss their deadline at the current rates.", view.jobs_at_risk),
    ):
        yield _gauge(metric, text, ("queue",), [((name,), value)])


def _vllm(figures: ScrapeData) -> Iterator[Metric]:
    stats, recorders, model = figures.stats, figures.recorders, figures.model
    online = RequestClass.ONLINE
    total = stats.kv_used + stats.kv_cached + stats.kv_free
    for name, text, value in (
        ("num_requests_running", "Online requests that hold a slot.", stats.online.running),
        ("num_requests_waiting", "Online requests that wait for a slot.", stats.online.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks in use, from 0 to 1.", stats.kv_used / total if total else 0),
    ):
        yield _gauge(f"vllm:{name}", text, ("model_name",), [((model,), value)])
    for name, text, value in (
        (
            "prompt_tokens",
            "Prompt tokens of online requests that ended.",
            sum(r.prompt_tokens[online] for r in recorders),
        ),
        ("generation_tokens", "Tokens generated for online requests.", stats.online.decode_tokens),
        ("num_preemptions", "Preemptions of online requests.", sum(stats.online.preemptions.values())),
    ):
        yield _counter(f"vllm:{name}", text, ("model_name",), [((model,), value)])
    yield _counter(
        "vllm:request_success",
        "Complete answers of online requests, by finish reason.",
        ("model_name", "finished_reason"),
        [
            ((model, o.value), sum(r.outcomes[c, o] for r in recorders))
            for c, o in recorders[0].outcomes
            if c is online and o in {"stop", "length"}
        ],
    )
    for name, text, histogram in (
        (
            "time_to_first_token",
            "Time to first token of online requests.",
            Histogram.sum_of(r.ttft[online] for r in recorders),
        ),
        (
            "request_time_per_output_token",
            "Time per output token of online requests.",
            Histogram.sum_of(r.tpot[online] for r in recorders),
        ),
        ("e2e_request_latency", "Latency of online requests.", Histogram.sum_of(r.latency[online] for r in recorders)),
        ("request_queue_time", "Time that online requests wait for a slot.", figures.steps.queue[online]),
    ):
        yield _histogram(f"vllm:{name}_seconds", text, ("model_name",), {(model,): histogram})
    info = InfoMetricFamily("vllm:cache_config", "Sizes of the KV cache.")
    info.add_metric([], {"block_size": str(figures.block_tokens), "num_gpu_blocks": str(total)})
    yield info


Rows = Iterable[tuple[tuple[str, ...], float]]


def _gauge(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _counter(name: str, text: str, labels: tuple[str, ...], rows: Rows) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, value in rows:
        family.add_metric(values, value)
    return family


def _histogram(name: str, text: str, labels: tuple[str, ...], rows: dict[tuple[str, ...], Histogram]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, histogram in rows.items():
        family.add_metric(values, histogram.buckets(), histogram.total)
    return family
