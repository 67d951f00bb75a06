"""Nodes that lose power, are drained, or are cut off, with the workers or another part on them. Needs three nodes.

Requests to other workers lose nothing. Requests to the Service all succeed again within 30 s: until Kubernetes notices
that the node is gone, it still sends some of them there. Each item has one result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import jobs
import pytest
from children import wait_tidy
from client import Client
from cluster import INFD, Cluster, is_ready, tiny, until
from online import Loop, loop
from prometheus import Prometheus
from release import NAME, NAMESPACE, Release, holder

ITEMS, TOKENS = 3000, 96
LEASE = 10
RECOVERED_SECONDS = 30
"""From the loss of a node until every request succeeds."""
ZONE = "topology.kubernetes.io/zone"
SPREAD = {
    "maxSkew": 1,
    "topologyKey": ZONE,
    "whenUnsatisfiable": "ScheduleAnyway",
    "labelSelector": {"matchLabels": {"app.kubernetes.io/instance": "spread"}},
}
RESOURCE = tiny(
    "spread",
    replicas=3,
    slots=4,
    engine={"threads": 1, "kvMemoryMebibytes": 64},
    offline={"leaseSeconds": LEASE},
    template={
        "resources": {"requests": {"cpu": "100m", "memory": "512Mi"}},
        "topologySpreadConstraints": [SPREAD],
    },
)


@pytest.fixture(scope="module")
def zones(cluster: Cluster, nodes: list[str]) -> dict[str, str]:
    """Put each node into a zone of its own, if the cluster has none. Return the zones by node."""
    for number, node in enumerate(nodes, 1):
        if ZONE not in cluster.get("node", node)["metadata"]["labels"]:
            cluster.kubectl("label", "node", node, f"{ZONE}=zone-{number}")
    return {node: cluster.get("node", node)["metadata"]["labels"][ZONE] for node in nodes}


@pytest.fixture(scope="module")
def spread(cluster: Cluster, namespace: str, zones: dict[str, str]) -> str:
    """Start three workers."""
    assert len(set(zones.values())) == 3
    cluster.apply(RESOURCE, namespace=namespace)
    cluster.wait_ready("spread", namespace=namespace, seconds=300)
    return "spread"


@dataclass(frozen=True)
class Workers:
    """One worker on each node, a job, and clients of the Service and of the workers that no test stops."""

    cluster: Cluster
    namespace: str
    job: jobs.Submitted
    pods: dict[str, dict[str, Any]]
    """The pod of a worker by its node."""
    through: Loop
    """The client of the Service."""
    direct: list[Loop]
    """The clients of the other workers."""

    def end_well(self, lost_at: float) -> None:
        """Assert that no item was lost, and no request failed except those that Kubernetes sent to the lost node."""
        self.job.finish(seconds=900, compared=4)
        through, others = self.through.stop(), [each.stop() for each in self.direct]
        late = [sample for sample in through["failures"] if sample["at"] > lost_at + RECOVERED_SECONDS]
        assert late == []
        assert [found["failures"] for found in others] == [[], []]

    def wait_recovered(self, lost_at: float) -> None:
        """Wait until all lanes through the Service had answers after the time in which some may fail."""
        until(lambda: time.time() > lost_at + RECOVERED_SECONDS, seconds=2 * RECOVERED_SECONDS, said="recovery is due")
        self.through.wait_more()


@contextmanager
def working(
    cluster: Cluster, client: Client, namespace: str, name: str, *, lost: str, answer: float = 10
) -> Iterator[Workers]:
    """Start a job and clients, and wait until the worker on the node that is lost holds leases.

    A request to the Service without a whole answer after `answer` seconds failed.
    """
    pods = {pod["spec"]["nodeName"]: pod for pod in balanced(cluster, name, namespace)}
    with ExitStack() as stack:
        through = stack.enter_context(loop(client, namespace, name, answer=answer))
        direct = [
            stack.enter_context(loop(client, namespace, name, host=pod["status"]["podIP"]))
            for node, pod in pods.items()
            if node != lost
        ]
        job = jobs.submit(client, f"{namespace}/{name}", ITEMS, most=TOKENS)
        until(lambda: cluster.leases(pods[lost]) > 0, seconds=60, said=f"leases on {lost}", pause=0.1)
        yield Workers(cluster, namespace, job, pods, through, direct)


@contextmanager
def without_power(cluster: Cluster, node: str) -> Iterator[float]:
    """Cut the power of a node while the block runs. The block gets the time of the cut."""
    cluster.provider.stop_node(node)
    try:
        yield time.time()
    finally:
        cluster.provider.start_node(node)


@pytest.fixture
def idle_node(cluster: Cluster, nodes: list[str]) -> str:
    """Return a node that has neither the control plane nor Valkey."""
    return next(node for node in nodes[1:] if node != node_of_valkey(cluster))


def test_workers_spread_over_the_zones(cluster: Cluster, namespace: str, spread: str, zones: dict[str, str]) -> None:
    pods = balanced(cluster, spread, namespace)

    assert {zones[pod["spec"]["nodeName"]] for pod in pods} == set(zones.values())


def test_a_node_that_loses_power_loses_no_item_and_its_worker_starts_elsewhere(
    cluster: Cluster, client: Client, namespace: str, spread: str, idle_node: str
) -> None:
    with (
        working(cluster, client, namespace, spread, lost=idle_node) as workers,
        without_power(cluster, idle_node) as lost_at,
    ):
        workers.wait_recovered(lost_at)
        now = cluster.wait_pods(spread, 3, namespace=namespace)
        workers.end_well(lost_at)

    assert idle_node not in {pod["spec"]["nodeName"] for pod in now}
    wait_whole(cluster, namespace)


@pytest.fixture
def once(cluster: Cluster, namespace: str, spread: str) -> Iterator[None]:
    """Start workers whose items have one attempt. If an attempt is spent, the counts of the job show a lost item."""
    cluster.hot_patch(spread, {"offline": {"maxAttempts": 1}}, namespace=namespace)
    yield
    cluster.hot_patch(spread, {"offline": {"maxAttempts": None}}, namespace=namespace)


@pytest.mark.usefixtures("once")
def test_a_drained_node_loses_no_request_and_no_attempt(
    cluster: Cluster, client: Client, namespace: str, spread: str, idle_node: str
) -> None:
    words = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=240s")
    with working(cluster, client, namespace, spread, lost=idle_node, answer=120) as workers:
        try:
            cluster.kubectl("drain", idle_node, *words, seconds=250)
            now = cluster.wait_pods(spread, 3, namespace=namespace)
            workers.job.finish(seconds=900, compared=4)
            failures = [each.stop()["failures"] for each in (workers.through, *workers.direct)]
        finally:
            cluster.kubectl("uncordon", idle_node)

    assert failures == [[], [], []]
    assert idle_node not in {pod["spec"]["nodeName"] for pod in now}
    wait_whole(cluster, namespace)


def test_a_worker_that_is_cut_off_drops_its_items_and_returns_without_a_second_result(
    cluster: Cluster, client: Client, namespace: str, spread: str, idle_node: str
) -> None:
    with working(cluster, client, namespace, spread, lost=idle_node) as workers:
        address = workers.pods[idle_node]["status"]["podIP"]

        def working_on() -> float:
            text = cluster.provider.fetch_on(idle_node, f"http://{address}:8000/metrics")
            names = ('ballast_slots{class="offline"', 'ballast_requests_waiting{class="offline"')
            return sum(float(line.rpartition(" ")[2]) for line in text.splitlines() if line.startswith(names))

        cluster.provider.cut_off(idle_node)
        lost_at = time.time()
        try:
            assert working_on() > 0
            until(lambda: not working_on(), seconds=4 * LEASE, said="the worker that is cut off drops its items")
            workers.wait_recovered(lost_at)
        finally:
            cluster.provider.heal(idle_node)
        wait_whole(cluster, namespace)
        workers.end_well(lost_at)

    cluster.wait_pods(spread, 3, namespace=namespace)
    wait_tidy(cluster, namespace)


def test_offline_work_waits_for_the_node_of_valkey(
    cluster: Cluster, client: Client, release: Release, namespace: str, spread: str
) -> None:
    node = node_of_valkey(cluster)
    claims = [pvc["metadata"]["uid"] for pvc in cluster.get("pvc", namespace=NAMESPACE)]
    with working(cluster, client, namespace, spread, lost=node) as workers:
        others = [pod for at, pod in workers.pods.items() if at != node]
        with without_power(cluster, node) as lost_at:
            until(lambda: cluster.redis_up(others) == {0.0}, seconds=60, said="workers report that Redis is away")
            workers.wait_recovered(lost_at)
            assert cluster.redis_up(others) == {0.0}
        until(lambda: release.valkey("ping", check=False) == "PONG", seconds=120, said="Valkey answers")
        workers.end_well(lost_at)

    assert node_of_valkey(cluster) == node
    assert [pvc["metadata"]["uid"] for pvc in cluster.get("pvc", namespace=NAMESPACE)] == claims
    wait_whole(cluster, namespace)


def test_the_node_of_the_active_operator_and_of_prometheus_loses_power(
    cluster: Cluster, client: Client, release: Release, namespace: str, spread: str
) -> None:
    active, node = holder_beside(cluster, cluster.provider.nodes()[0])
    prometheus = Prometheus.start(cluster, node=node)
    prometheus.wait_scraped(3, namespace=namespace)
    with working(cluster, client, namespace, spread, lost=node) as workers:
        with without_power(cluster, node) as lost_at:
            cluster.kubectl("scale", f"infd/{spread}", "-n", namespace, "--replicas=4")
            until(lambda: wanted(cluster, namespace, spread) == 4, seconds=90, said="another operator takes over")
            until(lambda: holder(cluster) not in {active, ""}, seconds=60, said="the Lease names another operator")
            workers.wait_recovered(lost_at)
        cluster.kubectl("scale", f"infd/{spread}", "-n", namespace, "--replicas=3")
        until(
            lambda: release.valkey("ping", check=False) == "PONG", seconds=120, said="Valkey answers"
        )  # the same node
        workers.end_well(lost_at)

    until(lambda: wanted(cluster, namespace, spread) == 3, seconds=60, said="the operator follows the resource")
    cluster.wait_pods(spread, 3, namespace=namespace)
    prometheus.wait_scraped(3, namespace=namespace)
    wait_whole(cluster, namespace)


def balanced(cluster: Cluster, name: str, namespace: str) -> list[dict[str, Any]]:
    """Return one worker for each node. A worker too many on a node, after the loss of another, is deleted."""
    pods = cluster.wait_pods(name, 3, namespace=namespace)
    while len({pod["spec"]["nodeName"] for pod in pods}) < 3:
        seen: set[str] = set()
        crowd = next(pod for pod in pods if pod["spec"]["nodeName"] in seen or seen.add(pod["spec"]["nodeName"]))
        cluster.kubectl("delete", "pod", crowd["metadata"]["name"], "-n", namespace, "--wait", seconds=90)
        pods = cluster.wait_pods(name, 3, namespace=namespace)
    print(json.dumps({pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in pods}))
    return pods


def wait_whole(cluster: Cluster, namespace: str) -> None:
    """Wait until all nodes and all parts of the release are back, and nothing is left over in the namespace."""

    def missing() -> list[str]:
        pods = cluster.get("pods", namespace=NAMESPACE)
        things = [*cluster.get("nodes"), *(pod for pod in pods if pod["status"].get("phase") != "Succeeded")]
        return [each["metadata"]["name"] for each in things if not is_ready(each)]

    until(lambda: not missing(), seconds=180, said="all nodes and parts are back")
    wait_tidy(cluster, namespace)


def node_of_valkey(cluster: Cluster) -> str:
    return str(cluster.get("pod", f"{NAME}-valkey-0", namespace=NAMESPACE)["spec"]["nodeName"])


def holder_beside(cluster: Cluster, first: str) -> tuple[str, str]:
    """Return the pod of the active operator and its node. If it is the first node, the pod moves to another."""

    def found() -> tuple[str, str]:
        pod = cluster.get("pod", holder(cluster), namespace=NAMESPACE) if holder(cluster) else None
        node = pod["spec"]["nodeName"] if pod else first
        return (pod["metadata"]["name"], node) if node != first else ("", "")

    cluster.kubectl("cordon", first)
    try:
        for pod in cluster.get("pods", namespace=NAMESPACE, selector="app.kubernetes.io/component=operator"):
            if pod["spec"]["nodeName"] == first:
                cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", NAMESPACE, "--wait")
        until(lambda: found()[0], seconds=120, said="an operator on another node is active")
        return found()
    finally:
        cluster.kubectl("uncordon", first)


def wanted(cluster: Cluster, namespace: str, name: str) -> int:
    """Return the replicas that the operator asks the Deployment for."""
    assert cluster.get(INFD, name, namespace=namespace)
    return int(cluster.get("deployment", name, namespace=namespace)["spec"]["replicas"])
