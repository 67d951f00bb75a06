"""Objects of other owners that have the names of children are left as they are, and named in `Degraded`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from faults import Call, proxy
from operated import Cluster, Operator, running, until

pytestmark = pytest.mark.envtest

THEIRS = {"note": "dGhlaXJz"}


@pytest.fixture
def served(controllers: ControlPlane, cluster: Cluster, valkey: Any, tmp_path: Path) -> Any:
    """An operator that copies its Redis Secret."""
    with running(controllers.kubeconfig, tmp_path, **cluster.own_redis(url=valkey.url)) as operator:
        yield operator


def foreign(cluster: Cluster, kind: str, name: str, **labels: str) -> Any:
    content = {"data": {"note": "theirs"}} if kind == "configmaps" else {"data": THEIRS}
    return cluster.create(kind, {"metadata": {"name": name, "labels": labels}, **content})


def is_untouched(cluster: Cluster, kind: str, before: Any) -> bool:
    found = cluster.get(kind, before["metadata"]["name"])
    return bool(found and found["metadata"]["resourceVersion"] == before["metadata"]["resourceVersion"])


@pytest.mark.parametrize(("kind", "child"), [("secrets", "llm-ballast-redis"), ("configmaps", "llm-ballast-config")])
def test_an_object_of_another_owner_is_neither_changed_nor_deleted(
    served: Operator, cluster: Cluster, kind: str, child: str
) -> None:
    before = foreign(cluster, kind, child)
    cluster.make()

    assert child in cluster.says("Degraded", "True", "NameTaken")["message"]
    assert not cluster.get("deployments", "llm"), "no pod mounts the object of another owner"
    assert is_untouched(cluster, kind, before)
    cluster.delete("inferencedeployments", "llm")
    until(lambda: not cluster.get("services", "llm"), said="its own children are deleted")
    assert is_untouched(cluster, kind, before)


def test_former_names_of_children_are_free_for_others(served: Operator, cluster: Cluster) -> None:
    before = {
        "secrets": foreign(cluster, "secrets", "chat-redis"),
        "configmaps": foreign(cluster, "configmaps", "chat-config"),
    }
    cluster.make("chat")
    until(lambda: cluster.get("secrets", "chat-ballast-redis") and cluster.get("deployments", "chat"))

    assert cluster.says("Degraded", "False", name="chat")
    assert all(is_untouched(cluster, kind, each) for kind, each in before.items())


def test_an_object_with_the_labels_of_a_child_is_not_taken_over_and_holds_the_resource_up_while_it_exists(
    served: Operator, cluster: Cluster
) -> None:
    labels = {
        "app.kubernetes.io/name": "ballast-worker",
        "app.kubernetes.io/instance": "llm",
        "app.kubernetes.io/managed-by": "ballast-operator",
    }
    before = foreign(cluster, "configmaps", "llm-ballast-config", **labels)
    cluster.make()

    cluster.says("Degraded", "True", "NameTaken")
    assert is_untouched(cluster, "configmaps", before)
    cluster.delete("configmaps", "llm-ballast-config")
    cluster.says("Degraded", "False")


def test_an_object_that_is_created_just_before_the_operators_write_is_not_taken_over(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    """The race that no look at the cluster before the write can see."""
    created: list[Any] = []

    def create_first(call: Call) -> None:
        if call.is_write and call.path == cluster.path("configmaps", "llm-ballast-config") and not created:
            created.append(foreign(cluster, "configmaps", "llm-ballast-config"))

    with proxy(controllers) as between, running(between.kubeconfig, tmp_path):
        between.before = create_first
        cluster.make()

        cluster.says("Degraded", "True", "NameTaken")
        assert is_untouched(cluster, "configmaps", created[0])


def test_a_child_that_lost_its_labels_is_still_the_resources_own(served: Operator, cluster: Cluster) -> None:
    cluster.make()
    until(lambda: cluster.get("services", "llm"))
    cluster.patch("services", "llm", {"metadata": {"labels": {"app.kubernetes.io/managed-by": None}}})

    label = "app.kubernetes.io/managed-by"
    until(lambda: cluster.get("services", "llm")["metadata"]["labels"].get(label) == "ballast-operator")
    cluster.says("Degraded", "False")
