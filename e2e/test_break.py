"""Workers that are killed while they hold items: at the end every item has one result, and the counters agree."""

from __future__ import annotations

from typing import Any

import jobs
import pytest
from client import Client
from cluster import Cluster, until


@pytest.fixture(scope="module")
def queue(namespace: str, first: str) -> str:
    return f"{namespace}/{first}"


@pytest.fixture
def holding(cluster: Cluster, namespace: str, first: str, client: Client, queue: str) -> tuple[jobs.Submitted, Any]:
    """A job under way, and a pod that holds items of it at this moment."""
    pods = cluster.wait_pods(first, 2, namespace=namespace)
    job = jobs.submit(client, queue, 2000, most=128)

    def pod_with_leases() -> Any:
        held = jobs.leases(cluster, pods)
        return next((pod for pod in pods if held[pod["metadata"]["name"]] > 0), None)

    return job, until(pod_with_leases, seconds=60, said="a pod holds leases", pause=0.1)


def test_sigkill_of_the_container_loses_nothing(
    cluster: Cluster, namespace: str, holding: tuple[jobs.Submitted, Any]
) -> None:
    job, pod = holding
    name = pod["metadata"]["name"]

    cluster.provider.kill(container(cluster, name, namespace)["containerID"].removeprefix("containerd://"))

    assert job.counts["leased"] > 0
    until(
        lambda: container(cluster, name, namespace)["restartCount"] == 1,
        seconds=60,
        said="the container is started again",
    )
    job.finish(seconds=300, compared=6)


@pytest.mark.short
def test_force_deletion_of_the_pod_loses_nothing(
    cluster: Cluster, namespace: str, first: str, holding: tuple[jobs.Submitted, Any]
) -> None:
    job, pod = holding

    name = pod["metadata"]["name"]
    cluster.kubectl("delete", "pod", name, "-n", namespace, "--force", "--grace-period=0", "--wait=false")

    assert job.counts["leased"] > 0
    cluster.wait_pods(first, 2, namespace=namespace)
    job.finish(seconds=300, compared=6)


def container(cluster: Cluster, pod: str, namespace: str) -> Any:
    """The status of a worker's one container."""
    (found,) = cluster.get("pod", pod, namespace=namespace)["status"]["containerStatuses"]
    return found
