"""The Prometheus operator takes the objects of chart and resource as they are, and a broken SLO fires.

Windows, intervals and thresholds are the real ones. `test_alerts.py` follows an alert to the pager.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import jobs
import pytest
from client import Client
from cluster import Cluster, tiny, until
from release import NAME, NAMESPACE, Release

MONITORING, POD = "monitoring", "prometheus-cluster-0"
TAKEN_SECONDS = 120
"""Changes reach Prometheus through a Secret in its pod, which takes up to a minute."""
RESOURCE = tiny("watched", replicas=2, monitoring={"scrapeSeconds": 5})


@pytest.fixture(scope="module")
def addon(cluster: Cluster) -> Iterator[None]:
    """Install the Prometheus operator with a Prometheus that takes all objects, unless the cluster has it."""
    with cluster.addon("prometheus-operator", "prometheuses.monitoring.coreos.com"):
        yield


@pytest.fixture(scope="module")
def watched(cluster: Cluster, release: Release, namespace: str, addon: None) -> Iterator[str]:
    """Turn on the ServiceMonitor and the alerts of the chart, and start two workers."""
    words = ("upgrade", NAME, release.package, "-n", NAMESPACE, "--reuse-values", "--wait", "--timeout", "3m")
    cluster.helm(*words, "--set=serviceMonitor.enabled=true,prometheusRule.enabled=true")
    cluster.start(RESOURCE, count=2, namespace=namespace)
    yield "watched"
    cluster.helm(*words, "--set=serviceMonitor.enabled=false,prometheusRule.enabled=false")


def ask(cluster: Cluster, path: str) -> Any:
    """Return the answer of Prometheus to a query; None while it does not answer."""
    place = f"/api/v1/namespaces/{MONITORING}/pods/{POD}:9090/proxy/api/v1/{path}"
    done = cluster.kubectl("get", "--raw", place, check=False)
    return json.loads(done.stdout)["data"] if done.returncode == 0 else None


def test_every_target_is_up(cluster: Cluster, namespace: str, watched: str) -> None:
    def health() -> dict[str, list[str]]:
        found: dict[str, list[str]] = {pool: [] for pool in wanted}
        for target in (ask(cluster, "targets?state=active") or {"activeTargets": ()})["activeTargets"]:
            if target["scrapePool"] in found:
                found[target["scrapePool"]].append(target["health"])
        return found

    wanted = {
        f"serviceMonitor/{namespace}/{watched}/0": ["up", "up"],
        f"serviceMonitor/{NAMESPACE}/{NAME}-operator/0": ["up", "up"],
    }
    until(lambda: health() == wanted, seconds=TAKEN_SECONDS, said="all workers and operators are scraped")
    ready = f'ballast_operator_replicas{{resource_namespace="{namespace}",name="{watched}",state="ready"}}'
    until(lambda: value(cluster, f"max({ready})") == [2.0], seconds=90, said="the operator's count of ready workers")


def test_every_rule_loads(cluster: Cluster, namespace: str, watched: str) -> None:
    places = ((watched, namespace), (f"{NAME}-operator", NAMESPACE))
    objects = [cluster.get("prometheusrules", name, namespace=place) for name, place in places]
    groups = [group for each in objects for group in each["spec"]["groups"]]
    wanted = {group["name"]: [name_of(rule) for rule in group["rules"]] for group in groups}

    def loaded() -> dict[str, list[Any]]:
        found = (ask(cluster, "rules") or {"groups": ()})["groups"]
        return {group["name"]: group["rules"] for group in found if group["name"] in wanted}

    until(lambda: loaded().keys() == wanted.keys(), seconds=TAKEN_SECONDS, said="all groups of rules are loaded")
    until(
        lambda: all(rule["health"] == "ok" for rules in loaded().values() for rule in rules),
        seconds=180,
        said="all rules are evaluated without an error",
    )
    assert {name: [rule["name"] for rule in rules] for name, rules in loaded().items()} == wanted
    alerts = [sum("alert" in rule for group in each["spec"]["groups"] for rule in group["rules"]) for each in objects]
    assert alerts[0] > 5
    assert alerts[1] > 1


def test_a_broken_slo_fires(cluster: Cluster, client: Client, namespace: str, watched: str) -> None:
    def firing() -> list[dict[str, str]]:
        found = (ask(cluster, "alerts") or {"alerts": ()})["alerts"]
        return [alert["labels"] for alert in found if alert["state"] == "firing"]

    assert [each for each in firing() if each.get("namespace") == namespace] == []
    cluster.hot_patch(watched, {"slo": {"ttftMilliseconds": 1}}, namespace=namespace)

    place = (f"{watched}.{namespace}.svc", "8000", jobs.MODEL)
    answers = client.script("replay.py", *place, "poisson", "5", "2", "60", seconds=180)

    until(
        lambda: cluster.condition(watched, "SLOMet", namespace=namespace)["status"] == "False",
        seconds=30,
        said="SLOMet is False",
    )
    wanted = {"alertname": "BallastTtftBudgetBurn", "severity": "critical", "inferencedeployment": watched}
    until(lambda: [each for each in firing() if each.items() >= wanted.items()], seconds=180, said="the alert fires")
    assert answers["failures"] == []


def value(cluster: Cluster, expression: str) -> list[float]:
    """Return the values of an expression."""
    found = ask(cluster, f"query?query={quote(expression)}") or {"result": ()}
    return [float(each["value"][1]) for each in found["result"]]


def name_of(rule: dict[str, Any]) -> str:
    """Return the name of an alert or of a recorded series."""
    return str(rule.get("alert") or rule["record"])
