"""A worker that resumes after its leases expired. The results of others stay, and its late results are refused."""

from __future__ import annotations

import json
from typing import Any

import jobs
import pytest
from client import Client
from cluster import Cluster, tiny, until
from release import Release

LEASE = 5
RESOURCE = tiny("fenced", replicas=2, slots=4, offline={"leaseSeconds": LEASE})


@pytest.fixture(scope="module")
def queue(cluster: Cluster, namespace: str) -> str:
    """Start two workers with short leases, and return the name of their queue."""
    cluster.start(RESOURCE, count=2, namespace=namespace)
    return f"{namespace}/fenced"


def test_a_worker_that_slept_through_its_leases_changes_nothing(
    cluster: Cluster, client: Client, release: Release, namespace: str, queue: str
) -> None:
    job = jobs.submit(client, queue, 400, most=96)
    pods = cluster.pods("fenced", namespace=namespace)
    sleeper = until(lambda: holder(cluster, pods), seconds=60, said="a pod holds leases", pause=0.1)
    (status,) = cluster.get("pod", sleeper, namespace=namespace)["status"]["containerStatuses"]
    container = status["containerID"].removeprefix("containerd://")
    place = f"ballast:{{{queue}}}:job:{job.id}"

    cluster.provider.freeze(container)
    try:
        held = [index for index, worker in leased(release, place).items() if sleeper in worker]
        words = ("hmget", f"{place}:items", *held)
        until(
            lambda: all(mark.startswith("=") for mark in release.valkey(*words).splitlines()),
            seconds=60,
            said=f"others finish items {held} of {sleeper}",
        )
        left = job.counts
    finally:
        cluster.provider.thaw(container)

    print(json.dumps({"held": held, "left": left}))
    assert held
    job.finish(seconds=300, compared=6)
    (status,) = cluster.get("pod", sleeper, namespace=namespace)["status"]["containerStatuses"]
    assert status["restartCount"] == 0


def holder(cluster: Cluster, pods: list[dict[str, Any]]) -> str:
    """Return the name of a pod that holds more than one item."""
    held = jobs.leases(cluster, pods)
    return next((name for name, count in held.items() if count > 1), "")


def leased(release: Release, place: str) -> dict[str, str]:
    """Return the items under lease, as the queue lists them: index and worker."""
    said = release.valkey("hgetall", f"{place}:live").splitlines()
    entries = dict(zip(said[::2], said[1::2], strict=True))
    return {index: entry for index, entry in entries.items() if not entry.startswith("0:")}
