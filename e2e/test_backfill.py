"""Offline work fills the slots that online leaves free, as Prometheus sees it, and returns them immediately."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import jobs
import pytest
from client import Client
from cluster import Cluster, tiny, until
from prometheus import Prometheus

SLOTS, RESERVED = 8, 2
TTFT = 1.0
"""Seconds to the first token that are promised to 99 of a hundred, by the default objective."""
RESOURCE = tiny(
    "mixed",
    cpu="500m",
    slots=SLOTS,
    offline={"reservedPercent": 100 * RESERVED / SLOTS},
    slo={"ttftMilliseconds": 1000 * TTFT, "tpotMilliseconds": 200},
)
REPLAY = ("poisson", "7", "4", "30")
"""30 s of four online requests a second, the same ones each time."""


@pytest.fixture(scope="module")
def mixed(cluster: Cluster, namespace: str) -> str:
    """Start one worker with eight slots, two of them reserved for offline."""
    cluster.start(RESOURCE, namespace=namespace)
    return "mixed"


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, namespace: str, mixed: str) -> Prometheus:
    started = Prometheus.start(cluster)
    started.wait_scraped(1, namespace=namespace)
    return started


@pytest.fixture(scope="module")
def queue(namespace: str, mixed: str) -> str:
    return f"{namespace}/{mixed}"


@pytest.fixture(scope="module")
def send(client: Client, namespace: str, mixed: str) -> Callable[..., Any]:
    """`send("burst", "9")` sends online requests to the Service."""
    return partial(client.script, "replay.py", f"{mixed}.{namespace}.svc", "8000", jobs.MODEL, seconds=180)


@pytest.fixture
def running(client: Client, queue: str) -> Any:
    """Submit a job that is longer than the test."""
    job = jobs.submit(client, queue, 3000, most=64)
    until(lambda: job.counts["leased"] >= SLOTS, seconds=60, said="offline holds every slot")
    yield job
    client.ballast("cancel", job.id, queue=queue, check=False)  # it may be over
    until(lambda: job.counts["leased"] == 0, seconds=60, said="the cancelled job lets go")


def test_the_same_replay_keeps_its_promise_with_a_job_beside_it(
    send: Callable[..., Any], prometheus: Prometheus, namespace: str, client: Client, queue: str
) -> None:
    place = f'namespace="{namespace}"'
    decoded = f'sum(ballast_tokens_total{{{place}, class="offline", phase="decode"}})'

    alone = send(*REPLAY)
    before = prometheus.value(decoded)
    job = jobs.submit(client, queue, 3000, most=64)
    beside = send(*REPLAY)
    harvested = prometheus.value(decoded) - before
    kept = prometheus.value(f'sum(ballast_slo_requests_total{{{place}, slo="ttft", met="true"}})')
    promised = prometheus.value(f'sum(ballast_slo_requests_total{{{place}, slo="ttft"}})')
    busy = [prometheus.value(f'avg_over_time(ballast_slots{{{place}, class="{c}", state="running"}}[30s])')
            for c in ("online", "offline")]  # fmt: skip
    client.ballast("cancel", job.id, queue=queue, check=False)  # it may be over

    print(json.dumps({"alone": alone, "beside": beside, "harvested": harvested, "slots": busy}))
    assert alone["failures"] == beside["failures"] == []
    assert alone["sent"] == beside["sent"]
    assert alone["tokens"] == beside["tokens"]
    assert harvested > beside["tokens"]
    assert kept >= 0.99 * promised
    assert beside["ttft_p99"] <= TTFT
    assert busy[1] > RESERVED


def test_under_saturating_online_load_offline_keeps_its_reservation(
    cluster: Cluster, send: Callable[..., Any], prometheus: Prometheus, namespace: str, running: jobs.Submitted
) -> None:
    answers = send("saturate", "32", "20")
    place = f'namespace="{namespace}"'
    # Parked requests hold no slot.
    held = f'sum(ballast_slots{{{place}, class="offline", state="running"}})'
    least = prometheus.value(f"min_over_time(({held})[14s:1s])")
    met = prometheus.value(f"avg_over_time(ballast_offline_reservation_met{{{place}}}[14s])")
    waited = prometheus.value(f'max_over_time(ballast_requests_waiting{{{place}, class="online"}}[14s])')

    condition = cluster.condition("mixed", "OfflineReservationSatisfied", namespace=namespace)

    print(json.dumps({"answers": answers, "least": least, "met": met, "waited": waited, "condition": condition}))
    assert answers["failures"] == []
    assert waited > SLOTS
    assert prometheus.value(f'ballast_slots_reserved{{{place}, class="offline"}}') == RESERVED
    assert least >= RESERVED
    assert met == 1
    assert condition["status"] == "True"


def test_in_a_burst_the_lent_slots_come_back_within_two_steps(
    cluster: Cluster, send: Callable[..., Any], prometheus: Prometheus, namespace: str, running: jobs.Submitted
) -> None:
    place = f'namespace="{namespace}"'
    lent = SLOTS - RESERVED
    until(
        lambda: prometheus.value(f'ballast_slots_borrowed{{{place}, class="offline"}}') == lent, seconds=30, said="lent"
    )
    (pod,) = cluster.pods("mixed", namespace=namespace)
    before = cluster.metrics(pod)

    answers = send("burst", str(lent))

    after = cluster.metrics(pod)
    gained = {name: after[name] - before[name] for name in after if name.startswith("ballast_reclaim_steps_bucket")}
    print(json.dumps(gained))
    assert answers["failures"] == []
    assert gained['ballast_reclaim_steps_bucket{le="+Inf"}'] == lent
    assert gained['ballast_reclaim_steps_bucket{le="2"}'] == lent
