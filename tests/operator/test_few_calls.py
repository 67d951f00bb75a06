"""What the operator asks of the API server: as little as there is to say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import Call, Proxy
from operated import Cluster, Operator, running, until

from ballast_operator.children_writer import MOST_RESTORES

pytestmark = pytest.mark.envtest

CHILDREN = ("configmaps", "deployments", "networkpolicies", "poddisruptionbudgets", "secrets", "services")


@pytest.fixture
def alone(between: Proxy, cluster: Cluster, valkey: Any, tmp_path: Path) -> Iterator[Operator]:
    """An operator with a Redis of its own, whose calls are counted."""
    with running(between.kubeconfig, tmp_path, **cluster.own_redis(url=valkey.url)) as operator:
        yield operator


def calls(between: Proxy, cluster: Cluster) -> Counter[str]:
    """Calls about the resources of a namespace, by the plural, or the subresource."""
    found: Counter[str] = Counter()
    for call in between.calls:
        parts = call.path.partition(f"/namespaces/{cluster.namespace}/")[2].split("/")
        is_own = parts[0] == "secrets" and (parts[1:2] == ["own"] or parts[-1].endswith("-redis-users"))
        if parts[0] not in {"", "leases"} and not is_own:
            found[parts[2] if len(parts) > 2 else parts[0]] += 1
    return found


def roll_out(cluster: Cluster, pods: int) -> None:
    until(lambda: len(cluster.pods()) == pods)
    for number, pod in enumerate(cluster.pods()):
        cluster.make_ready(pod["metadata"]["name"], f"10.0.0.{number + 1}")
    cluster.says("Ready", "True")
    cluster.says("Progressing", "False", "Complete")


def makes_no_call_while_nothing_changes(alone: Operator, between: Proxy, cluster: Cluster) -> None:
    """Change what needs no write: the operator reconciles and polls Redis, and makes no call."""
    before = calls(between, cluster)
    reconciles = alone.metrics()["ballast_operator_reconcile_seconds_count"]
    cluster.plane.kubectl("annotate", "-n", cluster.namespace, "infd", "llm", "note=1")
    cluster.plane.kubectl("label", "-n", cluster.namespace, "deployment", "llm", "theirs=1")
    until(lambda: alone.metrics()["ballast_operator_reconcile_seconds_count"] >= reconciles + 4)

    assert calls(between, cluster) == before


def test_a_creation_costs_each_child_once_and_a_status_for_each_answer_that_changed(
    alone: Operator, between: Proxy, cluster: Cluster
) -> None:
    """Two statuses and two events: taken up, and ready. Pods that come slower add a status every few seconds."""
    cluster.make(replicas=4)
    roll_out(cluster, 4)
    until(lambda: calls(between, cluster)["events"] >= 2)
    found = calls(between, cluster)

    assert {kind: found[kind] for kind in CHILDREN} == dict.fromkeys(CHILDREN, 1)
    assert found["events"] == 2
    assert found["status"] <= 4
    assert set(found) == {*CHILDREN, "events", "status"}


def test_an_idle_cluster_makes_no_calls(alone: Operator, between: Proxy, cluster: Cluster) -> None:
    cluster.make()
    roll_out(cluster, 1)
    until(lambda: calls(between, cluster)["events"] >= 2)
    makes_no_call_while_nothing_changes(alone, between, cluster)


def test_an_idle_resource_that_is_not_reconciled_makes_no_calls(
    alone: Operator, between: Proxy, cluster: Cluster
) -> None:
    cluster.make()
    roll_out(cluster, 1)
    cluster.patch("inferencedeployments", "llm", {"spec": {"template": {"serviceAccountName": "not-permitted"}}})
    cluster.says("Degraded", "True", "NotPermitted")
    (pod,) = cluster.pods()
    cluster.set_pod(pod["metadata"]["name"], conditions=[{"type": "Ready", "status": "False"}])
    cluster.says("Ready", "False")
    cluster.says("SLOMet", "Unknown", "Stale")
    labels = f'kind="InferenceDeployment",name="llm",resource_namespace="{cluster.namespace}",state="ready"'
    until(lambda: alone.metrics()[f"ballast_operator_replicas{{{labels}}}"] == 0, said="the metric")
    until(lambda: calls(between, cluster)["events"] >= 4, said="an event for each change of a condition")
    makes_no_call_while_nothing_changes(alone, between, cluster)


def test_a_resource_whose_name_is_taken_writes_its_other_objects_once(
    alone: Operator, between: Proxy, cluster: Cluster
) -> None:
    metadata = {"name": "llm-ballast-config"}
    cluster.create("configmaps", {"metadata": metadata, "data": {"note": "theirs"}})
    cluster.make()
    cluster.says("Degraded", "True", "NameTaken")

    def written(kind: str, name: str) -> int:
        return [call.path for call in between.writes].count(cluster.path(kind, name))

    before = written("configmaps", "llm-ballast-config")
    until(lambda: written("configmaps", "llm-ballast-config") > before, said="the name is tried again")

    assert written("secrets", "llm-ballast-redis") == 1
    assert [event["reason"] for event in cluster.list("events")].count("Applied") == 1
    cluster.delete("secrets", "llm-ballast-redis")
    cluster.delete("configmaps", "llm-ballast-config")
    until(lambda: cluster.get("secrets", "llm-ballast-redis"), said="the Secret that its pods wait for")


def test_a_child_that_another_writer_changes_after_each_repair_is_repaired_a_few_times_only(
    alone: Operator, between: Proxy, cluster: Cluster
) -> None:
    cluster.make()
    cluster.says("Degraded", "False")
    own = cluster.path("deployments", "llm")
    theirs = {"spec": {"template": {"metadata": {"labels": {"theirs": "x"}}}}}

    def change(call: Call) -> None:
        if call.is_write and call.path == own:
            cluster.patch("deployments", "llm", theirs)

    between.after = change
    before = len(between.writes)
    cluster.patch("deployments", "llm", theirs)
    message = cluster.says("Degraded", "True", "NotApplied")["message"]

    assert "another writer changes Deployment llm" in message
    assert "labels.theirs" in message
    between.after = lambda _: None
    cluster.says("Progressing", "True")
    assert [call.path for call in between.writes[before:]].count(own) == MOST_RESTORES + 1
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
    until(lambda: cluster.get("deployments", "llm")["spec"]["template"]["metadata"]["labels"].get("theirs") is None)
