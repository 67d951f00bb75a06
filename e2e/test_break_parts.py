"""Other parts than workers fail during a job and online traffic. No item is lost, and no online request fails."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import monotonic
from typing import Any

import jobs
import pytest
from children import wait_tidy
from client import NAMESPACE as CLIENTS
from client import POD as CLIENT
from client import Client
from cluster import Cluster, until
from online import Loop, loop
from release import NAME, NAMESPACE, Release, holder

SLOTS = 4
ITEMS, TOKENS = 500, 128
VALKEY = f"{NAME}-valkey-0"
LEASE = f"{NAME}-operator"
AWAY_SECONDS = 30


@dataclass(frozen=True)
class Traffic:
    """A job, and a client that sends online requests meanwhile."""

    cluster: Cluster
    namespace: str
    job: jobs.Submitted
    online: Loop

    def end_well(self) -> None:
        """Assert that no item was lost, no request failed, and no object is left over."""
        self.job.finish(seconds=900, compared=6)
        assert self.online.stop()["failures"] == []
        wait_tidy(self.cluster, self.namespace)


@pytest.fixture
def traffic(request: pytest.FixtureRequest, cluster: Cluster, namespace: str, first: str) -> Iterator[Traffic]:
    """Start a job and online traffic. Check afterwards that no worker was replaced or restarted."""
    client: Client = request.getfixturevalue("client")
    cluster.wait_pods(first, 2, namespace=namespace)
    before = lives(cluster, first, namespace)
    with loop(client, namespace, first) as online:
        job = jobs.submit(client, f"{namespace}/{first}", getattr(request, "param", ITEMS), most=TOKENS)
        assert job.wait_leased() > 0
        yield Traffic(cluster, namespace, job, online)
    assert lives(cluster, first, namespace) == before


def test_the_active_operator_is_killed_and_a_change_is_taken_up_by_another(
    cluster: Cluster, namespace: str, first: str, release: Release, traffic: Traffic
) -> None:
    active = holder(cluster)
    release.check_rights()

    cluster.kubectl("delete", "pod", active, "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false")
    assert traffic.job.counts["leased"] > 0
    cluster.hot_patch(first, {"offline": {"reservedPercent": 20}}, namespace=namespace)

    assert holder(cluster) not in {active, ""}
    cluster.kubectl("rollout", "status", f"deployment/{LEASE}", "-n", NAMESPACE, "--timeout=90s", seconds=100)
    traffic.end_well()


@pytest.mark.parametrize("how", ["killed", "deleted"])
def test_valkey_dies_and_comes_back_with_its_volume(
    cluster: Cluster, release: Release, traffic: Traffic, how: str
) -> None:
    claims = [pvc["metadata"]["uid"] for pvc in cluster.get("pvc", namespace=NAMESPACE)]
    assert traffic.job.counts["leased"] > 0

    if how == "killed":
        before = valkey(cluster)["restartCount"]
        cluster.kill(VALKEY, namespace=NAMESPACE)
        cluster.wait_restarted(VALKEY, before + 1, namespace=NAMESPACE)
    else:
        cluster.kubectl("delete", "pod", VALKEY, "-n", NAMESPACE, "--force", "--grace-period=0", "--wait=false")
    traffic.online.wait_more()

    until(lambda: release.valkey("ping", check=False) == "PONG", seconds=90, said="Valkey answers")
    traffic.end_well()
    assert len(claims) == 1
    assert [pvc["metadata"]["uid"] for pvc in cluster.get("pvc", namespace=NAMESPACE)] == claims


def test_online_goes_on_while_valkey_is_unreachable_for_half_a_minute(
    cluster: Cluster, namespace: str, first: str, traffic: Traffic
) -> None:
    pods = cluster.pods(first, namespace=namespace)
    frozen = valkey(cluster)["containerID"].removeprefix("containerd://")
    assert traffic.job.counts["leased"] > 0

    began = monotonic()
    cluster.provider.freeze(frozen)
    try:
        until(lambda: cluster.redis_up(pods) == {0.0}, seconds=25, said="workers say that Redis is away")
        while monotonic() < began + AWAY_SECONDS:
            traffic.online.wait_more()
        assert cluster.redis_up(pods) == {0.0}
    finally:
        cluster.provider.thaw(frozen)

    until(lambda: cluster.redis_up(pods) == {1.0}, seconds=90, said="workers say that Redis is back")
    traffic.end_well()


@pytest.mark.parametrize("traffic", [12 * ITEMS], indirect=True, ids=["a long job"])
def test_kubelet_api_server_and_etcd_are_restarted_and_nothing_is_lost(
    cluster: Cluster, namespace: str, first: str, traffic: Traffic
) -> None:
    for component in ("kubelet", "apiserver", "etcd"):
        # A restarted kubelet counts no pod as ready before its next probes: the Service of Valkey has no endpoint.
        until(lambda: has_leases(traffic), seconds=60, said="workers hold items")
        cluster.provider.restart(component)
        until(lambda: is_up(cluster), seconds=90, said=f"the cluster answers after a restart of {component}")
        traffic.online.wait_more()

    cluster.hot_patch(first, {"offline": {"reservedPercent": 25}}, namespace=namespace)
    traffic.end_well()


def has_leases(traffic: Traffic) -> bool:
    """Return whether workers hold items; False if the queue does not answer."""
    try:
        return bool(traffic.job.counts["leased"] > 0)
    except AssertionError:
        return False


def valkey(cluster: Cluster) -> dict[str, Any]:
    """Return the status of Valkey's container."""
    (found,) = cluster.get("pod", VALKEY, namespace=NAMESPACE)["status"]["containerStatuses"]
    return dict(found)


def lives(cluster: Cluster, name: str, namespace: str) -> dict[str, int]:
    """Return the number of restarts of each worker by the uid of its pod."""
    pods = cluster.pods(name, namespace=namespace)
    return {pod["metadata"]["uid"]: pod["status"]["containerStatuses"][0]["restartCount"] for pod in pods}


def is_up(cluster: Cluster) -> bool:
    """Return whether the API server and its store answer, and the kubelet reports its pods."""
    ready = cluster.kubectl("get", "--raw", "/readyz", check=False)
    reached = cluster.exec(CLIENT, "true", namespace=CLIENTS, check=False)
    return (ready.returncode, reached.returncode) == (0, 0)
