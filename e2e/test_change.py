"""Changes of a resource during a job and online requests. Hot fields take effect, cold fields roll, bad values halt."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jobs
import pytest
from children import wait_tidy
from client import Client
from cluster import Cluster, until
from endpoints import recorded
from online import loop

SLOTS = 4
REPLICAS = 2
"""Of docs/samples/laptop.yaml, whose rollout.maxUnavailable is 0: also the fewest that may be ready."""


@pytest.fixture
def job(cluster: Cluster, namespace: str, first: str, client: Client, queue: str) -> Iterator[jobs.Submitted]:
    """Submit a job and wait for leases. Check at the end that every item has its result."""
    cluster.wait_pods(first, REPLICAS, namespace=namespace)
    running = jobs.submit(client, queue, 4000, most=128)
    assert running.wait_leased() > 0
    yield running
    running.finish(seconds=900, compared=6)
    wait_tidy(cluster, namespace)


def test_a_hot_patch_of_the_reservation_reaches_the_same_pods(
    cluster: Cluster, namespace: str, first: str, job: jobs.Submitted
) -> None:
    before = uids(cluster, first, namespace)
    slots = reserved(cluster, first, namespace)

    cluster.hot_patch(first, {"offline": {"reservedPercent": 50}}, namespace=namespace)

    assert job.counts["leased"] > 0
    assert slots == [1, 1]  # a tenth
    assert reserved(cluster, first, namespace) == [2, 2]
    assert uids(cluster, first, namespace) == before


def test_a_cold_change_rolls_the_pods_and_no_request_fails(
    cluster: Cluster, namespace: str, first: str, client: Client, job: jobs.Submitted
) -> None:
    before = uids(cluster, first, namespace)
    with loop(client, namespace, first) as online, recorded(cluster, first, namespace=namespace) as endpoints:
        cluster.patch(first, {"model": {"maxModelLen": 512}}, namespace=namespace)
        until(lambda: not before & uids(cluster, first, namespace), seconds=240, said="all pods have the new version")
        cluster.wait_pods(first, REPLICAS, namespace=namespace)
        until(lambda: conditions(cluster, first, namespace) == WELL, seconds=60, said=f"conditions are {WELL}")
        online.wait_more()
        said = online.stop()

    print(json.dumps({"ready": endpoints.ready, "uids": len(endpoints.uids)}))
    assert min(endpoints.ready) >= REPLICAS
    assert endpoints.uids == before | uids(cluster, first, namespace)
    assert said["failures"] == []


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "image": (
        {"template": {"image": "registry.invalid/ballast-worker:none"}},
        {"template": {"image": None}},
        "ImagePull",
        "registry.invalid/ballast-worker:none",
    ),
    "model": (
        {"model": {"uri": "file:///opt/ballast/models/none"}},
        {"model": {"uri": "file:///opt/ballast/models/ballast-tiny"}},
        "ModelNotFound",
        "/opt/ballast/models/none",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_bad_change_halts_says_why_and_the_fix_recovers(
    cluster: Cluster, namespace: str, first: str, job: jobs.Submitted, what: str
) -> None:
    bad, fix, reason, words = BAD[what]
    before = uids(cluster, first, namespace)
    with loop(job.client, namespace, first) as online, recorded(cluster, first, namespace=namespace) as endpoints:
        cluster.patch(first, bad, namespace=namespace)
        found = cluster.wait_degraded(first, ".*", namespace=namespace)
        online.wait_more()

        assert found["reason"] == reason
        assert words in found["message"]
        assert f"{REPLICAS} workers of the old version remain ready" in found["message"]
        assert conditions(cluster, first, namespace)["Ready"] == "True"
        assert serving(cluster, first, namespace) == before

        cluster.patch(first, fix, namespace=namespace)
        until(lambda: conditions(cluster, first, namespace) == WELL, seconds=240, said=f"conditions are {WELL}")
        said = online.stop()

    assert uids(cluster, first, namespace) == before
    assert min(endpoints.ready) >= REPLICAS
    assert said["failures"] == []


WELL = {"Ready": "True", "Progressing": "False", "Degraded": "False", "ConfigApplied": "True"}


def conditions(cluster: Cluster, name: str, namespace: str) -> dict[str, str]:
    return {kind: cluster.condition(name, kind, namespace=namespace).get("status", "") for kind in WELL}


def uids(cluster: Cluster, name: str, namespace: str) -> set[str]:
    return {str(pod["metadata"]["uid"]) for pod in cluster.pods(name, namespace=namespace)}


def serving(cluster: Cluster, name: str, namespace: str) -> set[str]:
    return {str(pod["metadata"]["uid"]) for pod in cluster.ready_pods(name, namespace=namespace)}


def reserved(cluster: Cluster, name: str, namespace: str) -> list[float]:
    """Return the slots that each worker reserves for offline."""
    pods = cluster.pods(name, namespace=namespace)
    return [cluster.metrics(pod)['ballast_slots_reserved{class="offline"}'] for pod in pods]
