"""The alerts of a resource, from its live PrometheusRule through Prometheus and Alertmanager to a person's pager.

The rules come from the cluster. One factor shortens every window, interval and scrape: a minute becomes a second
(`paging.FACTOR`). Thresholds, labels and expressions stay the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jobs
import pytest
from client import Client
from cluster import Cluster, tiny, until
from paging import FACTOR, KINDS, Pager, scrape, shortened
from prometheus import Prometheus
from release import NAMESPACE as RELEASE

RESOURCE = tiny(
    "paged", slots=2, slo={"ttftMilliseconds": 800, "tpotMilliseconds": 500}, monitoring={"scrapeSeconds": FACTOR}
)
CALM = ("poisson", "3", "1")
"""About one request a second."""
OVERLOAD = ("saturate", "192", "12")
"""192 requests at a time for two slots. Most of the first ones are late, and wait behind those that can be in time."""


@pytest.fixture(scope="module")
def paged(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Start one worker with two slots, in a cluster that has the kinds of the prometheus-operator."""
    cluster.apply(*KINDS, namespace=namespace)
    cluster.start(RESOURCE, namespace=namespace)
    yield "paged"
    for kind in KINDS:
        cluster.kubectl("delete", "crd", kind["metadata"]["name"], "--timeout=60s", seconds=70)


@pytest.fixture(scope="module")
def groups(cluster: Cluster, namespace: str, paged: str) -> Any:
    """Return the groups of rules in the live PrometheusRule."""
    found = until(
        lambda: cluster.get("prometheusrules", paged, namespace=namespace), seconds=60, said="a PrometheusRule"
    )
    return found["spec"]["groups"]


@pytest.fixture(scope="module")
def prometheus(cluster: Cluster, namespace: str, paged: str, groups: Any) -> Prometheus:
    monitor = cluster.get("servicemonitors", paged, namespace=namespace)
    started = Prometheus.start(cluster, scrape(monitor), shortened(groups))
    until(lambda: started.value(f'sum(up{{service="{paged}"}})') == 1, seconds=60, said="the worker is scraped")
    return started


@pytest.fixture(scope="module")
def pager(cluster: Cluster, prometheus: Prometheus) -> Pager:
    return Pager.start(cluster)


def test_the_rules_differ_from_the_live_ones_in_their_durations_alone(groups: Any) -> None:
    once = shortened(groups, factor=1)
    hours = [rule["expr"] for group in groups for rule in group["rules"] if "[1h]" in rule["expr"]]

    assert shortened(groups) != once
    assert hours
    assert [rule["expr"] for group in shortened(groups) for rule in group["rules"] if "[60000ms]" in rule["expr"]] == [
        text.replace("[1h]", "[60000ms]") for text in hours
    ]
    assert [keys_of(rule) for group in shortened(groups) for rule in group["rules"]] == [
        keys_of(rule) for group in groups for rule in group["rules"]
    ]


def test_overload_pages_for_late_first_tokens_and_recovery_ends_the_page(
    client: Client, namespace: str, paged: str, pager: Pager, prometheus: Prometheus
) -> None:
    def told(status: str) -> list[dict[str, Any]]:
        return pager.told("BallastTtftBudgetBurn", status, namespace=namespace)

    place = (f"{paged}.{namespace}.svc", "8000", jobs.MODEL)
    calm = client.script("replay.py", *place, *CALM, "15", seconds=120)
    assert calm["failures"] == []
    assert told("firing") == []

    overload = client.script("replay.py", *place, *OVERLOAD, seconds=180)
    (fired,) = until(lambda: told("firing"), seconds=20, said="the page")
    assert told("resolved") == []

    recovered = client.script("replay.py", *place, *CALM, "45", seconds=180)
    until(lambda: told("resolved"), seconds=60, said="the end of the page")

    print(json.dumps({"calm": calm, "overload": overload, "recovered": recovered, "page": fired}))
    assert fired["labels"]["inferencedeployment"] == paged
    assert f"{namespace}/{paged}" in fired["annotations"]["summary"]
    assert "runbook_url" not in fired["annotations"], "the chart was installed without a base URL"
    assert recovered["failures"] == []


def test_a_redis_that_is_gone_pages_while_online_goes_on(
    cluster: Cluster, client: Client, namespace: str, paged: str, pager: Pager
) -> None:
    def told(status: str) -> list[dict[str, Any]]:
        return pager.told("BallastRedisUnreachable", status, namespace=namespace)

    queue = ("statefulset/ballast-valkey", "-n", RELEASE)
    assert told("firing") == []

    cluster.kubectl("scale", *queue, "--replicas=0")
    try:
        fired = until(lambda: told("firing"), seconds=90, said="the page")
        place = (f"{paged}.{namespace}.svc", "8000", jobs.MODEL)
        online = client.script("replay.py", *place, *CALM, "5", seconds=60)
    finally:
        cluster.kubectl("scale", *queue, "--replicas=1")
        cluster.kubectl("rollout", "status", *queue, "--timeout=90s", seconds=100)
    until(lambda: told("resolved"), seconds=90, said="the end of the page")

    print(json.dumps({"page": fired[0], "online": online}))
    assert len(fired) == 1
    assert online["sent"] > 0
    assert online["failures"] == []
    jobs.submit(client, f"{namespace}/{paged}", 20).finish(seconds=60, compared=2)


def keys_of(rule: dict[str, Any]) -> Any:
    """Return a rule without its durations."""
    return rule.get("alert"), rule.get("record"), rule["labels"], rule.get("annotations"), "for" in rule
