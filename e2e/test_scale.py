"""Replicas: set by a user, set by load, and scaled to zero and back by a job that waits in the queue."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

import jobs
import pytest
from children import wait_tidy
from client import Client
from cluster import INFD, Cluster, tiny, until

SLOTS = 2
RESOURCE = tiny(
    "elastic",
    slots=SLOTS,
    engine={"threads": 1, "kvMemoryMebibytes": 64},
    rollout={"startupSeconds": 300},
    template={"resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"cpu": "400m"}}},
)
"""Workers of less than half a core, so that two of them do more than one where there are two cores."""
POLL_SECONDS = 10
"""How often the operator looks at workers in Redis, by its own default."""
WINDOWS = {"scaleUpSeconds": 10, "scaleDownSeconds": 20, "idleSeconds": 20}


@pytest.fixture(scope="module")
def elastic(cluster: Cluster, namespace: str) -> str:
    cluster.apply(RESOURCE, namespace=namespace)
    cluster.wait_ready("elastic", namespace=namespace, seconds=300)
    return "elastic"


@pytest.fixture(scope="module")
def queue(namespace: str, elastic: str) -> str:
    return f"{namespace}/{elastic}"


@pytest.fixture
def scaling(cluster: Cluster, namespace: str, elastic: str) -> Iterator[None]:
    """Start a resource of one to two replicas that scales by load, with short windows."""
    cluster.patch("elastic", {"scaling": {"minReplicas": 1, "maxReplicas": 2, **WINDOWS}}, namespace=namespace)
    yield
    cluster.patch("elastic", {"scaling": None, "replicas": 1}, namespace=namespace)


def test_kubectl_scale_adds_a_worker_and_then_removes_the_idle_one(
    cluster: Cluster, namespace: str, elastic: str, client: Client, queue: str
) -> None:
    """The idle worker is the older one. Without Ballast, Kubernetes would remove the younger one."""
    (first,) = cluster.wait_pods(elastic, 1, namespace=namespace)

    cluster.kubectl("scale", f"infd/{elastic}", "-n", namespace, "--replicas=2")
    both = cluster.wait_pods(elastic, 2, namespace=namespace, seconds=300)
    assert asked(cluster, namespace) == (2, 2)

    job = jobs.submit(client, queue, 150, most=64)
    assert job.wait_leased() > 0
    (asked_one,) = (pod for pod in both if pod["metadata"]["uid"] != first["metadata"]["uid"])
    with ThreadPoolExecutor(1) as beside:
        address = asked_one["status"]["podIP"]
        place = (address, "8000", jobs.MODEL)
        online = beside.submit(client.script, "replay.py", *place, "saturate", str(2 * SLOTS), "60", seconds=180)
        wait_polled(client, queue, f"http://{address}:8000")
        assert not online.done()
        cluster.kubectl("scale", f"infd/{elastic}", "-n", namespace, "--replicas=1")
        (last,) = cluster.wait_pods(elastic, 1, namespace=namespace)
        answers = online.result()

    assert len(both) == 2
    assert last["metadata"]["uid"] == asked_one["metadata"]["uid"]
    assert answers["failures"] == []
    job.finish(seconds=400, compared=3)
    wait_tidy(cluster, namespace)


@pytest.mark.usefixtures("scaling")
def test_online_load_brings_a_second_worker_which_leaves_after_it(
    cluster: Cluster, namespace: str, elastic: str, client: Client
) -> None:
    cluster.wait_pods(elastic, 1, namespace=namespace, seconds=300)
    place = (f"{elastic}.{namespace}.svc", "8000", jobs.MODEL)

    answers = client.script("replay.py", *place, "saturate", str(4 * SLOTS), "75", seconds=240)
    up = because(cluster, namespace)
    both = cluster.wait_pods(elastic, 2, namespace=namespace, seconds=300)

    print(answers["sent"], up)
    assert answers["failures"] == []
    assert any(said.startswith("Scaled from 1 to 2 replicas: ") and "one replica takes" in said for said in up)
    until(lambda: asked(cluster, namespace) == (1, 1), seconds=180, said="one replica again")
    (last,) = cluster.wait_pods(elastic, 1, namespace=namespace)
    assert last["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in both}
    wait_tidy(cluster, namespace)


def test_an_idle_deployment_goes_to_zero_and_a_job_brings_it_back(
    cluster: Cluster, namespace: str, elastic: str, client: Client, queue: str
) -> None:
    cluster.patch("elastic", {"scaling": {"minReplicas": 0, "maxReplicas": 2, **WINDOWS}}, namespace=namespace)
    until(lambda: asked(cluster, namespace) == (0, 0), seconds=240, said="no replica")
    until(lambda: not cluster.get("pods", namespace=namespace), seconds=90, said="no pod")
    assert cluster.condition(elastic, "Ready", namespace=namespace)["reason"] == "ScaledToZero"

    job = jobs.submit(client, queue, 20, most=16)

    until(lambda: asked(cluster, namespace)[0] == 1, seconds=60, said="a replica is asked for")
    job.finish(seconds=300, compared=3)
    until(lambda: asked(cluster, namespace) == (0, 0), seconds=240, said="no replica again")
    until(lambda: not cluster.get("pods", namespace=namespace), seconds=90, said="no pod again")
    wait_tidy(cluster, namespace)


def asked(cluster: Cluster, namespace: str) -> tuple[int, int]:
    """Return the replicas that the resource wants, and those that it has."""
    found = cluster.get(INFD, "elastic", namespace=namespace)
    return found["spec"]["replicas"], found["status"].get("replicas", 0)


def wait_polled(client: Client, queue: str, address: str) -> None:
    """Wait until only the worker at this address reports a running request, and the operator has polled since."""

    def asked_ones() -> list[str]:
        workers = json.loads(client.ballast("top", "--json", queue=queue))["workers"]
        return [worker["address"] for worker in workers if worker["online"]["running"] > 0]

    until(lambda: asked_ones() == [address], seconds=30, said=f"{address} alone says that it serves")
    seen = monotonic()
    until(lambda: monotonic() > seen + 1.2 * POLL_SECONDS, seconds=2 * POLL_SECONDS, said="a poll of the operator")


def because(cluster: Cluster, namespace: str) -> list[str]:
    """Return the messages of the resource's events about its replicas."""
    events = cluster.get("events", namespace=namespace)
    return [str(event["message"]) for event in events if event["involvedObject"]["kind"] == "InferenceDeployment"]
