"""Changes of others to children are undone, with the exception of a restart of the pods."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from operated import Cluster, Operator, until

from ballast_api.names import INSTANCE_LABEL

pytestmark = pytest.mark.envtest

JSON_PATCH = {"Content-Type": "application/json-patch+json"}
POD = "/spec/template/spec"


def pod_of(cluster: Cluster) -> Any:
    return cluster.get("deployments", "llm")["spec"]["template"]["spec"]


def service_of(cluster: Cluster) -> Any:
    return cluster.get("services", "llm")["spec"]


ADDITIONS: dict[str, tuple[str, list[tuple[str, Any]], Callable[[Cluster], Any]]] = {
    "a sidecar": (
        "deployments",
        [(f"{POD}/containers/-", {"name": "theirs", "image": "theirs:1"})],
        lambda c: len(pod_of(c)["containers"]) == 1,
    ),
    "a variable": (
        "deployments",
        [(f"{POD}/containers/0/env/-", {"name": "LD_PRELOAD", "value": "/tmp/x.so"})],
        lambda c: "LD_PRELOAD" not in str(pod_of(c)),
    ),
    "a volume of the node": (
        "deployments",
        [
            (f"{POD}/volumes/-", {"name": "theirs", "hostPath": {"path": "/etc"}}),
            (f"{POD}/containers/0/volumeMounts/-", {"name": "theirs", "mountPath": "/theirs"}),
        ],
        lambda c: "hostPath" not in str(pod_of(c)),
    ),
    "a mount of a volume that the pod has": (
        "deployments",
        [(f"{POD}/containers/0/volumeMounts/-", {"name": "tmp", "mountPath": "/theirs"})],
        lambda c: "/theirs" not in str(pod_of(c)),
    ),
    "a mount in place of another": (
        "deployments",
        [(f"{POD}/containers/0/volumeMounts/0/mountPath", "/theirs")],
        lambda c: "/theirs" not in str(pod_of(c)),
    ),
    "a port without a name": (
        "deployments",
        [(f"{POD}/containers/0/ports/-", {"containerPort": 22})],
        lambda c: len(pod_of(c)["containers"][0]["ports"]) == 1,
    ),
    "another way to spread the pods": (
        "deployments",
        [(f"{POD}/topologySpreadConstraints/0/whenUnsatisfiable", "DoNotSchedule")],
        lambda c: "DoNotSchedule" not in str(pod_of(c)),
    ),
    "an init container": (
        "deployments",
        [(f"{POD}/initContainers", [{"name": "theirs", "image": "theirs:1"}])],
        lambda c: "initContainers" not in pod_of(c),
    ),
    "the network of the node": (
        "deployments",
        [(f"{POD}/hostNetwork", True)],
        lambda c: "hostNetwork" not in pod_of(c),
    ),
    "a privilege": (
        "deployments",
        [(f"{POD}/containers/0/securityContext/runAsUser", 0)],
        lambda c: "runAsUser" not in pod_of(c)["containers"][0]["securityContext"],
    ),
    "another account": (
        "deployments",
        [(f"{POD}/serviceAccountName", "theirs")],
        lambda c: not {"serviceAccountName", "serviceAccount"} & set(pod_of(c)),
    ),
    "a label of the pods": (
        "deployments",
        [("/spec/template/metadata/labels/theirs", "x")],
        lambda c: "theirs" not in c.get("deployments", "llm")["spec"]["template"]["metadata"]["labels"],
    ),
    "a pause": (
        "deployments",
        [("/spec/paused", True)],
        lambda c: "paused" not in c.get("deployments", "llm")["spec"],
    ),
    "an address": ("services", [("/spec/externalIPs", ["192.0.2.1"])], lambda c: "externalIPs" not in service_of(c)),
    "a port": (
        "services",
        [("/spec/ports/-", {"name": "theirs", "port": 22, "targetPort": 22})],
        lambda c: len(service_of(c)["ports"]) == 1,
    ),
    "a selector": (
        "services",
        [("/spec/selector/theirs", "x")],
        lambda c: "theirs" not in service_of(c)["selector"],
    ),
    "a rule": (
        "networkpolicies",
        [("/spec/ingress/-", {})],
        lambda c: len(c.get("networkpolicies", "llm")["spec"]["ingress"]) == 1,
    ),
}


def add(cluster: Cluster, kind: str, additions: list[tuple[str, Any]]) -> None:
    patch = [{"op": "add", "path": path, "value": value} for path, value in additions]
    cluster.request("PATCH", cluster.path(kind, "llm"), json=patch, headers=JSON_PATCH)


@pytest.mark.parametrize("case", ADDITIONS)
def test_what_others_add_to_a_child_is_removed(operator: Operator, cluster: Cluster, case: str) -> None:
    kind, additions, is_removed = ADDITIONS[case]
    cluster.make()
    cluster.says("Degraded", "False")
    before = cluster.get(kind, "llm")["spec"]
    add(cluster, kind, additions)

    until(lambda: is_removed(cluster), said=f"{case} is removed")
    after = cluster.get(kind, "llm")["spec"]
    assert after == before
    assert until(
        lambda: [e["message"] for e in cluster.list("events") if f"Restored {KINDS[kind]} llm" in e.get("message", "")]
    )


KINDS = {"deployments": "Deployment", "services": "Service", "networkpolicies": "NetworkPolicy"}


@pytest.mark.parametrize("change", [None, {"slots": 3}], ids=["alone", "with a change of the resource"])
def test_an_addition_is_removed_although_the_operator_was_away(
    operator: Operator, cluster: Cluster, change: dict[str, Any] | None
) -> None:
    """Nothing in the memory of a process is needed to detect it."""
    cluster.make()
    cluster.says("Degraded", "False")
    operator.stop()
    add(cluster, "deployments", [(f"{POD}/containers/0/env/-", {"name": "LD_PRELOAD", "value": "/tmp/x.so"})])
    if change:
        cluster.patch("inferencedeployments", "llm", {"spec": change})
    operator.start()

    until(lambda: "LD_PRELOAD" not in str(pod_of(cluster)))


@pytest.mark.parametrize("label", ["other", None], ids=["another resource", "no resource"])
def test_a_child_that_is_changed_and_given_away_is_restored(
    operator: Operator, cluster: Cluster, label: str | None
) -> None:
    cluster.make()
    cluster.says("Degraded", "False")
    cluster.patch("deployments", "llm", {"metadata": {"labels": {INSTANCE_LABEL: label}}, "spec": {"paused": True}})

    until(lambda: cluster.get("deployments", "llm")["metadata"]["labels"][INSTANCE_LABEL] == "llm", said="the label")
    until(lambda: "paused" not in cluster.get("deployments", "llm")["spec"], said="the spec")


def test_a_restart_of_the_pods_goes_on(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    cluster.says("Degraded", "False")
    (before,) = until(cluster.pods)
    cluster.plane.kubectl("rollout", "restart", "-n", cluster.namespace, "deployment/llm")
    until(lambda: {p["metadata"]["name"] for p in cluster.pods()} - {before["metadata"]["name"]}, said="a new pod")
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
    until(lambda: cluster.get("deployments", "llm")["metadata"]["generation"] >= 3)

    template = cluster.get("deployments", "llm")["spec"]["template"]["metadata"]
    assert "kubectl.kubernetes.io/restartedAt" in template["annotations"]
