"""Nodes that fall silent, as a spot node does that is taken away, or put a worker out, before the real controllers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from operated import Cluster, Operator, until
from resources import make_resource

from ballast_operator.children.pods import LOST_NODE_TAINTS, deployment

NODES = ("node-that-stays", "node-that-goes")


def tolerations(*given: dict[str, Any]) -> list[dict[str, Any]]:
    resource = make_resource(gpu={"count": 0}, template={"tolerations": given})
    pod = deployment(resource, "v", image="worker:1", own_keys=frozenset())["spec"]["template"]["spec"]
    return list(pod.get("tolerations", ()))


def test_a_worker_waits_half_a_minute_for_a_silent_node_unless_the_template_says_otherwise() -> None:
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    patient = {"key": LOST_NODE_TAINTS[1], "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 900}

    assert [(each["key"], each["tolerationSeconds"]) for each in tolerations()] == [(t, 30) for t in LOST_NODE_TAINTS]
    assert [each["key"] for each in tolerations(gpu)] == ["nvidia.com/gpu", *LOST_NODE_TAINTS]
    assert [(e["key"], e["tolerationSeconds"]) for e in tolerations(patient)] == [
        (LOST_NODE_TAINTS[1], 900),
        (LOST_NODE_TAINTS[0], 30),
    ]
    assert tolerations({"operator": "Exists"}) == [{"operator": "Exists"}], "it tolerates everything for ever"


@pytest.fixture
def nodes(cluster: Cluster) -> Iterator[tuple[str, str]]:
    for name in NODES:
        cluster.request("POST", "/api/v1/nodes", json={"metadata": {"name": name}})
        say(cluster, name, "True")
    yield NODES
    for name in NODES:
        cluster.request("DELETE", f"/api/v1/nodes/{name}")


def say(cluster: Cluster, node: str, ready: str) -> None:
    """Report on a node as its kubelet does, or as the controllers do once it has stopped to."""
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    times = {"lastHeartbeatTime": now, "lastTransitionTime": now}
    merge = {"Content-Type": "application/merge-patch+json"}
    status = {"conditions": [{"type": "Ready", "status": ready, "reason": "Said", "message": "", **times}]}
    cluster.request("PATCH", f"/api/v1/nodes/{node}/status", json={"status": status}, headers=merge)


@pytest.mark.envtest
def test_a_worker_of_a_lost_node_is_replaced_while_its_pod_cannot_end(
    operator: Operator, cluster: Cluster, nodes: tuple[str, str]
) -> None:
    at_once = [
        {"key": taint, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 0}
        for taint in LOST_NODE_TAINTS
    ]
    cluster.make(template={"tolerations": at_once})
    lost = until(cluster.pods)[0]["metadata"]["name"]
    target = {"apiVersion": "v1", "kind": "Node", "name": nodes[1]}
    cluster.request(
        "POST", cluster.path("pods", lost) + "/binding", json={"metadata": {"name": lost}, "target": target}
    )
    cluster.make_ready(lost)
    cluster.says("Ready", "True")

    say(cluster, nodes[1], "Unknown")

    new = until(lambda: [pod for pod in cluster.pods() if pod["metadata"]["name"] != lost])[0]["metadata"]["name"]
    assert cluster.get("pods", lost)["metadata"]["deletionTimestamp"], "no kubelet is there to end it"
    cluster.make_ready(new, "10.0.0.2")
    cluster.says("Ready", "True")
    cluster.says("Progressing", "False", "Complete")


@pytest.mark.envtest
def test_a_worker_that_its_node_evicted_is_replaced_and_is_a_problem_only_if_the_next_one_is_evicted_too(
    operator: Operator, cluster: Cluster
) -> None:
    cluster.make()
    evicted = until(cluster.pods)[0]["metadata"]["name"]
    cluster.make_ready(evicted)
    cluster.says("Ready", "True")

    cluster.set_pod(evicted, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")

    new = until(lambda: [pod for pod in cluster.pods() if pod["metadata"]["name"] != evicted])[0]["metadata"]["name"]
    cluster.make_ready(new, "10.0.0.2")
    cluster.says("Progressing", "False", "Complete")
    cluster.says("Ready", "True")
    assert cluster.get("pods", evicted)["status"]["phase"] == "Failed"
    assert cluster.condition("Degraded")["status"] == "False"

    cluster.set_pod(new, phase="Failed", reason="Evicted", message="The node was low on resource: memory.")

    assert "2 pods of this version have failed" in cluster.says("Degraded", "True", "PodsFailing")["message"]
    names = evicted, new
    third = until(lambda: [pod for pod in cluster.pods() if pod["metadata"]["name"] not in names])[0]
    cluster.make_ready(third["metadata"]["name"], "10.0.0.3")
    cluster.says("Degraded", "False")
