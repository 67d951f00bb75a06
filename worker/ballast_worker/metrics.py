"""The names that worker, alerts, dashboards and tests agree on, filled from counters when somebody scrapes.

Nothing is computed per token. `vllm:*` repeats what Gateway-API routers read, for online requests alone: offline work
is no load to them, as it leaves its slot when an online request needs it.
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
"""Reasons of preemptions that stand at 0 from the start; others appear when they happen."""
_RATIOS = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0)
_STEPS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512)


class StepMetrics:
    """What steps cost and what waited for them; written by the engine's thread."""

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
    """What the device cost so far, split between the classes by the service they got.

    A second in which nobody was served is on online's account: the device stands there for it. `sample` is called
    about once a second by one thread.
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
    """The queue as this worker saw it last."""

    name: str
    is_up: bool
    stats: QueueStats | None
    jobs_at_risk: int
    held: int
    """Items under lease here."""


@dataclass(frozen=True, slots=True)
class ScrapeData:
    """Everything a scrape shows, gathered at one moment."""

    model: str
    stats: EngineStats
    steps: StepMetrics
    recorders: tuple[Recorder, ...]
    spending: Spending
    utilization: Utilization
    queue: QueueView | None
    """None for a worker that serves online requests only."""
    block_tokens: int
    generation: int
    restart_required: int
    config_invalid: bool
    is_draining: bool
    is_healthy: bool


class WorkerMetrics(Collector):
    """Renders `/metrics`."""

    def __init__(self, gather: Callable[[], ScrapeData]) -> None:
        self._gather = gather
        self._tenants: set[str] = set()
        self._lock = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def render(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Name nothing in advance: registering must not gather."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Every metric family with its samples."""
        figures = self._gather()
        yield from _requests(figures)
        yield from _engine(figures)
        yield from _steps(figures)
        yield from _device(figures)
        yield from self._tenant_service(figures)
        yield from _process(figures)
        if figures.queue is not None:
            yield from _queue(figures.queue)
        yield from _vllm(figures)

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
            "Service by tenant, in tokens weighed as the policy does (input 1, output 2); rare tenants are folded.",
            ("class", "tenant"),
            sums.items(),
        )


def _requests(figures: ScrapeData) -> Iterator[Metric]:
    recorders = figures.recorders
    for name, text, parts in (
        ("time_to_first_token", "From arrival to the first token.", [r.ttft for r in recorders]),
        ("time_per_output_token", "Mean time of each token after the first.", [r.tpot for r in recorders]),
        ("request_latency", "From arrival to the last token.", [r.latency for r in recorders]),
    ):
        yield _histogram(
            f"ballast_{name}_seconds",
            text,
            ("class",),
            {(c.value,): Histogram.sum_of(part[c] for part in parts) for c in RequestClass},
        )
    yield _counter(
        "ballast_requests",
        "Requests that ended, by how.",
        ("class", "outcome"),
        [((c.value, o.value), sum(r.outcomes[c, o] for r in recorders)) for c, o in recorders[0].outcomes],
    )
    yield _counter(
        "ballast_slo_requests",
        "Requests with a promise, by whether it was kept.",
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
        "Tokens computed for the first time.",
        ("class", "phase"),
        [((c, "prefill"), of.prefill_tokens) for c, of in each] + [((c, "decode"), of.decode_tokens) for c, of in each],
    )
    yield _counter(
        "ballast_wasted_tokens", "Tokens computed again.", ("class",), [((c,), of.wasted_tokens) for c, of in each]
    )
    yield _counter(
        "ballast_preemptions",
        "Residents that gave up their KV, by the plan's reason.",
        ("class", "reason"),
        [((c, r.value), of.preemptions.get(r, 0)) for c, of in each for r in {*_GIVE_UP, *of.preemptions}],
    )
    yield _counter(
        "ballast_parked_steps",
        "Steps that residents sat out parked.",
        ("class",),
        [((c,), of.parked_steps) for c, of in each],
    )
    yield _gauge(
        "ballast_slots",
        "Residents, by whether they hold a slot.",
        ("class", "state"),
        [((c, "running"), of.running) for c, of in each] + [((c, "parked"), of.parked) for c, of in each],
    )
    yield _gauge("ballast_slots_total", "Places in the running batch.", (), [((), stats.slots)])
    yield _gauge("ballast_slots_reserved", "Slots kept for a class.", ("class",), [((c,), o.reserved) for c, o in each])
    yield _gauge(
        "ballast_slots_borrowed",
        "Slots held beyond the reservation.",
        ("class",),
        [((c,), of.borrowed) for c, of in each],
    )
    yield _gauge("ballast_requests_waiting", "Wait for a slot.", ("class",), [((c,), of.waiting) for c, of in each])
    yield _gauge("ballast_batch_ceiling", "Largest decode batch that the SLO allows.", (), [((), stats.batch_ceiling)])
    yield _gauge(
        "ballast_lending_ratio",
        "Part of what the SLO leaves that offline may use; below 1 after too many requests lost their SLO to it.",
        (),
        [((), stats.allowance.harvest)],
    )
    yield _gauge(
        "ballast_interference_ratio",
        "What offline added to online latency lately, the largest of TTFT and TPOT, median and p99; only under a cap.",
        (),
        [] if stats.interference is None else [((), stats.interference)],
    )
    yield _gauge(
        "ballast_kv_blocks",
        "KV blocks: held, only in the prefix cache, or empty.",
        ("state",),
        [(("used",), stats.kv_used), (("cached",), stats.kv_cached), (("free",), stats.kv_free)],
    )
    yield _gauge(
        "ballast_kv_waste_ratio", "Share of held KV positions that hold nothing.", (), [((), stats.kv_waste_ratio)]
    )
    yield _gauge(
        "ballast_offline_reservation_met",
        "1: in the last step, offline ran in its reserved slots, or in as many as its requests and tenant caps allow.",
        (),
        [((), stats.reservation.is_met)],
    )
    yield _counter(
        "ballast_suspended_steps",
        "Steps that stood still between two layers for online newcomers.",
        (),
        [((), stats.suspended_steps)],
    )
    yield _counter("ballast_failed_steps", "Steps that ended in an error.", (), [((), stats.failed_steps)])
    yield _counter(
        "ballast_prefix_cache_tokens",
        "Prompt tokens asked of the prefix cache, and those that it gave.",
        ("result",),
        [(("asked",), stats.prefix_query_tokens), (("hit",), stats.prefix_hit_tokens)],
    )
    yield _counter(
        "ballast_cost_dollars",
        "Price of the device so far, split by the service that each class got.",
        ("class",),
        [((c.value,), dollars) for c, dollars in figures.spending.dollars.items()],
    )


def _device(figures: ScrapeData) -> Iterator[Metric]:
    used = figures.utilization
    for name, what, shares in (
        ("flops", "operations per second", used.flops),
        ("bandwidth", "memory bandwidth", used.bandwidth),
    ):
        yield _gauge(
            f"ballast_model_{name}_utilization",
            f"Share of the device's {what}, as measured at start, that the model's work took lately.",
            ("phase",),
            [((phase,), share) for phase, share in shares.items()],
        )


def _steps(figures: ScrapeData) -> Iterator[Metric]:
    steps = figures.steps
    yield _histogram(
        "ballast_step_seconds", "Engine steps.", ("kind",), {(kind.value,): h for kind, h in steps.seconds.items()}
    )
    yield _histogram(
        "ballast_step_prediction_error_ratio",
        "How far the cost model was off, relative to the step.",
        (),
        {(): steps.prediction_error},
    )
    yield _histogram(
        "ballast_queue_seconds",
        "From arrival to the first slot.",
        ("class",),
        {(c.value,): h for c, h in steps.queue.items()},
    )
    yield _histogram(
        "ballast_reclaim_steps", "Steps that an online request waited for its slot.", (), {(): steps.reclaim}
    )


def _process(figures: ScrapeData) -> Iterator[Metric]:
    for name, text, value in (
        ("ballast_config_generation", "Generation of the configuration in force.", figures.generation),
        ("ballast_config_restart_required", "Fields of the file that need a restart.", figures.restart_required),
        ("ballast_config_invalid", "1: the file holds what cannot be taken.", figures.config_invalid),
        ("ballast_draining", "1 from SIGTERM on.", figures.is_draining),
        ("ballast_engine_healthy", "0: the engine failed and the process has to go.", figures.is_healthy),
    ):
        yield _gauge(name, text, (), [((), value)])


def _queue(view: QueueView) -> Iterator[Metric]:
    yield _gauge("ballast_redis_up", "1: Redis answers and is fit to hold work.", (), [((), view.is_up)])
    yield _gauge("ballast_leases", "Items under lease in this worker.", (), [((), view.held)])
    stats = view.stats
    if stats is None or not view.is_up:
        return  # what is not known is not exported: an old figure would read as the present one
    name = view.name
    yield _gauge(
        "ballast_queue_items",
        "Items by state, over the jobs that the queue still keeps; inbox: not taken in yet.",
        ("queue", "state"),
        [((name, state.value), getattr(stats.items, state.value)) for state in ItemState]
        + [((name, "inbox"), stats.inbox)],
    )
    for metric, text, value in (
        ("ballast_queue_oldest_seconds", "Age of the oldest job that waits.", stats.oldest_waiting_seconds),
        ("ballast_dead_letters", "Items that were given up.", stats.dead_letters),
        ("ballast_jobs_at_risk", "Jobs that will miss their deadline at the present rate.", view.jobs_at_risk),
    ):
        yield _gauge(metric, text, ("queue",), [((name,), value)])


def _vllm(figures: ScrapeData) -> Iterator[Metric]:
    stats, recorders, model = figures.stats, figures.recorders, figures.model
    online = RequestClass.ONLINE
    total = stats.kv_used + stats.kv_cached + stats.kv_free
    for name, text, value in (
        ("num_requests_running", "Online requests that hold a slot.", stats.online.running),
        ("num_requests_waiting", "Online requests that wait for a slot.", stats.online.waiting),
        ("kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", stats.kv_used / total if total else 0),
    ):
        yield _gauge(f"vllm:{name}", text, ("model_name",), [((model,), value)])
    for name, text, value in (
        ("prompt_tokens", "Prompt tokens of ended requests.", sum(r.prompt_tokens[online] for r in recorders)),
        ("generation_tokens", "Tokens generated.", stats.online.decode_tokens),
        ("num_preemptions", "Preemptions.", sum(stats.online.preemptions.values())),
    ):
        yield _counter(f"vllm:{name}", text, ("model_name",), [((model,), value)])
    yield _counter(
        "vllm:request_success",
        "Answers, by what ended them.",
        ("model_name", "finished_reason"),
        [
            ((model, o.value), sum(r.outcomes[c, o] for r in recorders))
            for c, o in recorders[0].outcomes
            if c is online and o in {"stop", "length"}
        ],
    )
    for name, text, histogram in (
        ("time_to_first_token", "TTFT.", Histogram.sum_of(r.ttft[online] for r in recorders)),
        ("request_time_per_output_token", "TPOT.", Histogram.sum_of(r.tpot[online] for r in recorders)),
        ("e2e_request_latency", "Latency.", Histogram.sum_of(r.latency[online] for r in recorders)),
        ("request_queue_time", "Time to a slot.", figures.steps.queue[online]),
    ):
        yield _histogram(f"vllm:{name}_seconds", text, ("model_name",), {(model,): histogram})
    info = InfoMetricFamily("vllm:cache_config", "KV cache.")
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
