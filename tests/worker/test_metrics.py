from __future__ import annotations

from dataclasses import replace

import pytest
from engine_stats import make_stats
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, Gauge
from prometheus_client.parser import text_string_to_metric_families

from ballast_engine.footprint import Footprint, PhaseWork
from ballast_engine.request import FinishReason
from ballast_engine.stats import NO_STEP, OTHERS, AdmissionRecord, ClassStats, StepKind
from ballast_policy.learning.interference import Allowance
from ballast_policy.request import RequestClass
from ballast_policy.reservation import Reservation
from ballast_queue.job import RequestCounts
from ballast_queue.status import QueueStats, ReservationStatus, SloStatus
from ballast_vllm.metrics import ServerMetrics
from ballast_worker.histogram import Histogram
from ballast_worker.http_connection import Connections, HttpLimits
from ballast_worker.metrics import MOST_TENANTS, QueueView, ScrapeData, Spending, StepMetrics, WorkerMetrics
from ballast_worker.requests import Recorder, RequestOutcome, RequestTiming
from ballast_worker.status import SMOOTHING_SECONDS, SmoothedRates, reservation
from ballast_worker.utilization import Utilization

ONLINE, OFFLINE = RequestClass.ONLINE, RequestClass.OFFLINE
FOOTPRINT = Footprint(
    token_flops=10.0,
    attended_flops=1.0,
    draw_flops=5.0,
    weight_bytes=100.0,
    kv_bytes=2.0,
    peak_flops=1000.0,
    peak_bandwidth=500.0,
)


def make_figures(**changes) -> ScrapeData:
    fields = {
        "model": "m",
        "stats": make_stats(),
        "steps": StepMetrics(),
        "recorders": (Recorder(),),
        "spending": Spending(0.0),
        "utilization": Utilization(FOOTPRINT),
        "connections": Connections(HttpLimits()),
        "queue": None,
        "block_tokens": 16,
        "generation": 0,
        "restart_required": 0,
        "config_invalid": False,
        "is_draining": False,
        "is_healthy": True,
    }
    return ScrapeData(**(fields | changes))


def scrape(figures: ScrapeData) -> dict[tuple[str, frozenset], float]:
    text = WorkerMetrics(lambda: figures, shows_tenants=True).render().decode()
    families = text_string_to_metric_families(text)
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def test_blocks_that_offline_work_borrows_are_no_load_for_a_router() -> None:
    held = {"kv_used": 95, "kv_free": 3, "kv_cached": 2, "kv_offline": 90}
    figures = make_figures(stats=make_stats(**held, reservation=Reservation(blocks=10)))
    own = Gauge("vllm:kv_cache_usage_perc", "KV-cache usage.", ["model_name", "engine"])
    try:
        own.labels("m", "0").set(0.95)
        inside_vllm = ServerMetrics(lambda: figures, shows_tenants=False).render().decode()
    finally:
        REGISTRY.unregister(own)

    assert scrape(figures)["vllm:kv_cache_usage_perc", frozenset({("model_name", "m")})] == pytest.approx(0.15)
    (line,) = (line for line in inside_vllm.splitlines() if line.startswith("vllm:kv_cache_usage_perc{"))
    assert float(line.rsplit(" ", 1)[1]) == pytest.approx(0.15)


@given(st.lists(st.floats(0, 100), max_size=50))
def test_a_histogram_counts_as_prometheus_means_it(values) -> None:
    histogram = Histogram((0.5, 1.0, 10.0))
    for value in values:
        histogram.observe(value)

    assert dict(histogram.buckets()) == {
        "0.5": sum(v <= 0.5 for v in values),
        "1.0": sum(v <= 1.0 for v in values),
        "10.0": sum(v <= 10.0 for v in values),
        "+Inf": len(values),
    }
    assert histogram.total == pytest.approx(sum(values))


def test_the_first_tenants_have_series_and_all_others_count_together() -> None:
    """Those that the engine counts together have none, and the order of the engine decides, not that of the names."""
    kept = [f"z{i:04}" for i in range(MOST_TENANTS)]
    service = {(OFFLINE, OTHERS): 2.0, (ONLINE, OTHERS): 3.0}
    service |= {(OFFLINE, name): 1.0 for name in (*kept, *(f"a{i:04}" for i in range(50)))}
    rows = scrape(make_figures(stats=make_stats(service=service)))

    found = {
        (labels["class"], labels["tenant"]): value
        for (name, pairs), value in rows.items()
        if name == "ballast_tenant_service_total" and (labels := dict(pairs))
    }
    assert found == {("offline", name): 1 for name in kept} | {("offline", "other"): 52, ("online", "other"): 3}


def test_what_was_promised_is_judged_and_what_was_not_is_not() -> None:
    recorder = Recorder()
    recorder.ended(RequestTiming(ONLINE, 0.0, 1.0, 0.1, first_at=0.5), FinishReason.STOP, 5, 11, 3.5)
    recorder.ended(RequestTiming(OFFLINE, 0.0, first_at=0.5), FinishReason.STOP, 5, 11, 3.5)
    for given_up_at in (2.0, 0.5):
        recorder.ended(RequestTiming(ONLINE, 0.0, 1.0), FinishReason.ABORTED, 0, 0, given_up_at)

    assert recorder.slo[ONLINE, "ttft", True] == 1
    assert recorder.slo[ONLINE, "ttft", False] == 1, "its client gave up too late"
    assert recorder.slo[ONLINE, "tpot", False] == 1, "0.3 s a token is above 0.1"
    assert sum(recorder.slo.values()) == 3
    assert recorder.outcomes[OFFLINE, RequestOutcome.STOP] == 1


def test_a_missed_ttft_counts_once_while_the_request_still_waits() -> None:
    recorder = Recorder()
    late, quick, young = (RequestTiming(ONLINE, at, 1.0) for at in (0.0, 0.0, 4.5))
    quick.first_at = 0.5

    for now in (5.0, 5.2):
        recorder.judge([late, quick, young], now)
    assert recorder.slo[ONLINE, "ttft", False] == recorder.slo[ONLINE, "ttft", True] == 1

    late.first_at = 9.0
    recorder.ended(late, FinishReason.LENGTH, 5, 11, 10.0)
    assert recorder.slo[ONLINE, "ttft", False] == recorder.slo[ONLINE, "ttft", True] == 1
    assert recorder.slo_status(10.0) == SloStatus(ttft_judged=2, ttft_met=1)


def test_the_status_counts_the_online_requests_of_the_last_minute_that_met_the_slo() -> None:
    recorder = Recorder()
    recorder.ended(RequestTiming(ONLINE, 0.0, 1.0), FinishReason.ABORTED, 0, 0, 1.2)
    for first_at, end in ((0.5, 1.5), (2.0, 3.0), (0.5, 90.0)):
        recorder.ended(RequestTiming(ONLINE, 0.0, 1.0, 0.1, first_at=first_at), FinishReason.STOP, 5, 11, end)
    recorder.ended(RequestTiming(OFFLINE, 0.0, 1.0, 0.1, first_at=0.5), FinishReason.STOP, 5, 11, 3.5)

    assert recorder.slo_status(10.0) == SloStatus(ttft_judged=4, ttft_met=2, tpot_judged=3, tpot_met=2)
    assert recorder.slo_status(100.0) == SloStatus(ttft_judged=1, ttft_met=1, tpot_judged=1, tpot_met=0)
    assert recorder.slo_status(200.0) == SloStatus()


def test_a_request_with_a_latency_slo_is_judged_by_its_whole_answer() -> None:
    recorder = Recorder()
    begun, waiting, given_up, items = (RequestTiming(ONLINE, 0.0, latency_slo=1.0) for _ in range(4))
    items.request_class, items.latency_slo = OFFLINE, None
    for timing in (begun, items):
        timing.first_at = 0.5

    recorder.judge([begun, waiting], 0.9)
    assert sum(recorder.slo.values()) == 0, "the first vector of several is no answer"

    recorder.judge([begun, waiting], 1.1)
    recorder.ended(begun, FinishReason.STOP, 5, 0, 1.2)
    recorder.ended(given_up, FinishReason.ABORTED, 5, 0, 0.8)
    recorder.ended(items, FinishReason.STOP, 5, 0, 9.0)
    recorder.ended(RequestTiming(ONLINE, 1.0, latency_slo=1.0, first_at=1.4), FinishReason.STOP, 5, 0, 1.4)

    assert recorder.slo[ONLINE, "latency", False] == 2, "one answer came too late, and one has not come"
    assert recorder.slo[ONLINE, "latency", True] == 1
    assert sum(recorder.slo.values()) == 3
    assert recorder.slo_status(2.0) == SloStatus(latency_judged=3, latency_met=1)
    assert sum(recorder.ttft[ONLINE].counts) == 0, "vectors have no first token"
    assert sum(recorder.latency[ONLINE].counts) == 2


def test_the_shares_count_every_request_of_a_busy_minute() -> None:
    recorder = Recorder()
    for i in range(50_000):
        end = 10.0 + i / 1000 - i % 2  # every other client reads its answer for a second
        recorder.ended(RequestTiming(ONLINE, end - 0.02, latency_slo=0.03, first_at=end), FinishReason.STOP, 1, 0, end)

    assert recorder.slo_status(60.0) == SloStatus(latency_judged=50_000, latency_met=50_000)


def test_percentiles_cover_the_last_minute() -> None:
    recorder = Recorder()
    for i in range(100):
        recorder.ended(RequestTiming(ONLINE, 0.0, first_at=float(i + 1)), FinishReason.STOP, 1, 1, 100.0)

    assert recorder.p99(150.0) == (99.0, None, 100.0)
    assert recorder.p99(161.0) == (None, None, None)


def test_steps_and_admissions_are_counted() -> None:
    meter = StepMetrics()
    admissions = (AdmissionRecord("a", ONLINE, 0.25, 3, 10, 0), AdmissionRecord("b", OFFLINE, 5.0, 99, 10, 0))
    meter.add(replace(NO_STEP, kind=StepKind.MIXED, seconds=0.010, predicted_seconds=0.009, admissions=admissions))

    found = scrape(make_figures(steps=meter))

    assert found["ballast_step_seconds_count", frozenset({("kind", "mixed")})] == 1
    assert found["ballast_step_prediction_error_ratio_sum", frozenset()] == pytest.approx(0.1)
    assert found["ballast_queue_seconds_sum", frozenset({("class", "online")})] == 0.25
    assert found["ballast_reclaim_steps_sum", frozenset()] == 3, "online alone"


def test_the_price_of_the_device_is_split_by_service_and_adds_up() -> None:
    spending = Spending(-600.0)
    spending.sample(make_stats(service={(OFFLINE, "b"): 50.0}), 3600.0, 0.0)
    spending.sample(make_stats(service={(ONLINE, "a"): 100.0, (OFFLINE, "b"): 350.0}), 3600.0, 1.0)
    spending.sample(make_stats(service={(ONLINE, "a"): 100.0, (OFFLINE, "b"): 350.0}), 3600.0, 2.0)

    assert spending.dollars == {ONLINE: pytest.approx(601.25), OFFLINE: pytest.approx(0.75)}


def test_rates_follow_the_counters() -> None:
    rates = SmoothedRates()
    for second in range(60):
        stats = make_stats(offline=ClassStats(decode_tokens=500 * second, running=3, reserved=1, borrowed=2))
        rates.sample(stats, {ONLINE: 0, OFFLINE: 4 * second}, float(second))
    load = rates.load(stats, OFFLINE)

    assert load.decode_tokens_per_second == pytest.approx(500, rel=0.01)
    assert load.requests_per_second == pytest.approx(4, rel=0.01)
    assert (load.running, load.reserved, load.borrowed) == (3, 1, 2)


def make_work(**decode: float) -> dict[str, PhaseWork]:
    return {"prefill": PhaseWork(), "decode": PhaseWork(**decode)}


def test_utilization_is_the_share_of_the_peak_that_a_phase_took_lately() -> None:
    used = Utilization(FOOTPRINT)
    used.sample(make_stats(work=make_work()), 10.0)
    at = 10.0 + SMOOTHING_SECONDS  # half of the past is forgotten by then
    work = make_work(passes=2.0, tokens=20, attended=300.0, context=300, draws=20)
    used.sample(make_stats(work=work), at)
    flops, moved = 10 * 20 + 300 + 5 * 20, 2 * 100 + 2 * (300 + 20)
    found = scrape(make_figures(utilization=used))

    share = 0.5 * flops / SMOOTHING_SECONDS / 1000
    assert found["ballast_model_flops_utilization", frozenset({("phase", "decode")})] == pytest.approx(share)
    share = 0.5 * moved / SMOOTHING_SECONDS / 500
    assert found["ballast_model_bandwidth_utilization", frozenset({("phase", "decode")})] == pytest.approx(share)
    assert found["ballast_model_flops_utilization", frozenset({("phase", "prefill")})] == 0
    used.sample(make_stats(work=work), at + SMOOTHING_SECONDS)
    assert used.bandwidth["decode"] == pytest.approx(share / 2), "an idle device is not used"


def test_steps_that_stood_still_are_counted() -> None:
    assert scrape(make_figures(stats=make_stats(suspended_steps=3)))["ballast_suspended_steps_total", frozenset()] == 3


def test_the_state_of_the_process_and_of_the_queue_is_shown_and_none_of_a_queue_that_is_away() -> None:
    nothing, of_queue = frozenset(), frozenset({("queue", "q")})
    stats = QueueStats(
        at=0, items=RequestCounts(), inbox=3, oldest_waiting_seconds=7, dead_letters=2, jobs_at_risk=1, jobs={}
    )
    queue = QueueView("q", is_up=True, stats=stats, held=4, failures={"claim": 5}, unreadable=6)
    of_process = {"generation": 8, "restart_required": 9, "config_invalid": True, "is_draining": True}
    found = scrape(make_figures(queue=queue, is_healthy=False, **of_process))
    away = scrape(make_figures(queue=replace(queue, is_up=False)))

    wanted = {
        ("ballast_config_generation", nothing): 8,
        ("ballast_config_restart_required", nothing): 9,
        ("ballast_config_invalid", nothing): 1,
        ("ballast_draining", nothing): 1,
        ("ballast_engine_healthy", nothing): 0,
        ("ballast_redis_up", nothing): 1,
        ("ballast_leases", nothing): 4,
        ("ballast_feeder_failures_total", frozenset({("task", "claim")})): 5,
        ("ballast_unreadable_values", nothing): 6,
        ("ballast_queue_items", of_queue | {("state", "inbox")}): 3,
        ("ballast_queue_oldest_seconds", of_queue): 7,
        ("ballast_dead_letters", of_queue): 2,
        ("ballast_jobs_at_risk", of_queue): 1,
    }
    assert {name: found[name] for name in wanted} == wanted
    assert away["ballast_redis_up", nothing] == 0
    assert [name for name, labels in away if of_queue <= labels] == []


def test_the_metric_and_the_status_show_the_engines_reservation() -> None:
    nothing = frozenset()
    short = make_stats(
        reservation=Reservation(slots=3, blocks=4, chunk=5, in_use=1, is_met=False), offline=ClassStats(waiting=1)
    )

    assert scrape(make_figures())["ballast_offline_reservation_met", nothing] == 1
    assert scrape(make_figures(stats=short))["ballast_offline_reservation_met", nothing] == 0
    found = reservation(short)
    assert found == ReservationStatus(slots=3, blocks=4, chunk=5, in_use=1, is_met=False)
    cancelled = replace(short, offline=ClassStats())
    assert scrape(make_figures(stats=cancelled))["ballast_offline_reservation_met", nothing] == 1, "until the next step"
    assert reservation(cancelled).is_met


@pytest.mark.parametrize(
    ("running", "entitled", "tokens", "is_met", "is_met_by_tokens"),
    [(0, 1, 64, True, True), (0, 0, 64, True, False), (1, 2, 63, False, False), (3, 9, 64, True, False)],
)
def test_the_reservation_is_met_by_tokens_while_requests_wait_beside_free_slots(
    running: int, entitled: int, tokens: int, is_met: bool, is_met_by_tokens: bool
) -> None:
    used = Reservation(slots=3, chunk=64).used_by(running, entitled, tokens)
    found = reservation(make_stats(reservation=used, offline=ClassStats(waiting=1)))

    assert (found.is_met, found.is_met_by_tokens) == (is_met, is_met_by_tokens)


def test_what_measured_latencies_leave_to_offline_is_shown_and_interference_only_under_a_cap() -> None:
    nothing = frozenset()
    free = scrape(make_figures())
    capped = make_stats(allowance=Allowance(lending_ratio=0.6), interference=0.08)
    held = scrape(make_figures(stats=capped))

    assert free["ballast_lending_ratio", nothing] == 1
    assert ("ballast_interference_ratio", nothing) not in free
    assert held["ballast_lending_ratio", nothing] == 0.6
    assert held["ballast_interference_ratio", nothing] == 0.08


def test_many_scrapes_get_the_text_of_one() -> None:
    """Whoever reaches port 8000 may scrape, and the event loop streams tokens."""
    now, gathered, takes = 0.0, 0, 1.0
    computed = 0.0

    def gather() -> ScrapeData:
        nonlocal now, gathered, computed
        now, computed, gathered = now + 1.0, computed + takes, gathered + 1
        return make_figures()

    metrics = WorkerMetrics(gather, shows_tenants=False, seconds=lambda: now, computed=lambda: computed)
    first, *others = [metrics.render() for _ in range(5)]

    assert set(others) == {first}
    assert gathered == 1
    now += 60
    assert metrics.render()
    assert gathered == 2
    now, takes = now + 60, 0.0  # the scrape waits for other threads
    assert all(metrics.render() for _ in range(5))
    assert gathered == 7
    assert ServerMetrics.render is WorkerMetrics.render
