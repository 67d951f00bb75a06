"""A second kind of resource beside the InferenceDeployment, under one operator."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import second_kind
from control_plane import ControlPlane
from operated import Cluster, Operator, installed, running, until

pytestmark = pytest.mark.envtest

# Kubernetes' garbage collector looks for new kinds every 30 s, and misses the deletion of an owner whose kind it does
# not watch yet.
COLLECTED_SECONDS = 120


@pytest.fixture(scope="module")
def both(controllers: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    folder, script = tmp_path_factory.mktemp("both"), Path(second_kind.__file__)
    with (
        installed(controllers, [second_kind.crd()]),
        running(controllers.kubeconfig, folder, script=script) as operator,
    ):
        yield operator


def path(cluster: Cluster, name: str = "") -> str:
    kind = second_kind.GREETING
    return kind.path(cluster.namespace, name or None)


def greet(cluster: Cluster, text: str, name: str = "llm", **spec: Any) -> None:
    kind = second_kind.GREETING
    body = {"apiVersion": kind.api_version, "kind": kind.name, "metadata": {"name": name}}
    cluster.request("POST", path(cluster), json=body | {"spec": {"text": text} | spec})


def change(cluster: Cluster, **spec: Any) -> None:
    headers = {"Content-Type": "application/merge-patch+json"}
    cluster.request("PATCH", path(cluster, "llm"), json={"spec": spec}, headers=headers)


def status(cluster: Cluster) -> dict[str, Any]:
    found: dict[str, Any] = cluster.request("GET", path(cluster, "llm")).get("status") or {}
    return found


def said(cluster: Cluster) -> str:
    return str((cluster.get("configmaps", "llm-greeting") or {}).get("data", {}).get("text"))


def test_a_second_kind_has_children_status_conditions_and_events(both: Operator, cluster: Cluster) -> None:
    greet(cluster, "hello")
    until(lambda: said(cluster) == "hello")
    until(lambda: status(cluster).get("text") == "hello")
    (condition,) = status(cluster)["conditions"]
    assert (condition["type"], condition["status"], condition["message"]) == (
        "Ready", "True", "the ConfigMap says hello",
    )  # fmt: skip

    change(cluster, text="goodbye")
    until(lambda: said(cluster) == "goodbye")
    until(lambda: (status(cluster)["observedGeneration"], status(cluster)["text"]) == (2, "goodbye"))
    cluster.delete("configmaps", "llm-greeting")
    until(lambda: said(cluster) == "goodbye", said="the child is created again")
    events = until(lambda: [e for e in cluster.list("events") if e["involvedObject"]["kind"] == "Greeting"])
    assert any("Created ConfigMap llm-greeting" in event["message"] for event in events)


def test_resources_of_two_kinds_with_one_name_keep_apart(both: Operator, cluster: Cluster) -> None:
    greet(cluster, "hello")
    cluster.make()
    cluster.make_ready(until(cluster.pods)[0]["metadata"]["name"])
    cluster.says("Ready", "True")
    until(lambda: status(cluster).get("text") == "hello")
    assert said(cluster) == "hello"

    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
    until(lambda: cluster.resource()["status"]["observedGeneration"] == 2)
    assert said(cluster) == "hello", "no resource deletes the children of the other"
    cluster.request("DELETE", path(cluster, "llm"))
    until(lambda: said(cluster) == "None", seconds=COLLECTED_SECONDS, said="its own child is deleted")

    assert cluster.get("deployments", "llm")
    assert cluster.get("configmaps", "llm-ballast-config")


def test_the_replicas_of_a_second_kind_are_written_through_its_own_scale_subresource(
    both: Operator, cluster: Cluster
) -> None:
    greet(cluster, "hello", replicas=5)

    until(lambda: cluster.request("GET", path(cluster, "llm"))["spec"]["replicas"] == second_kind.MOST_REPLICAS)


def test_an_invalid_resource_of_a_second_kind_is_degraded(both: Operator, cluster: Cluster) -> None:
    greet(cluster, "hello", unknown=1)
    found = until(lambda: status(cluster).get("conditions"))

    assert [(each["type"], each["reason"]) for each in found] == [("Degraded", "InvalidSpec")]
    assert both.metrics()['ballast_operator_resources{kind="Greeting",phase="Degraded"}'] >= 1
