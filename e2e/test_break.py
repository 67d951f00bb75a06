"""Workers that end while they hold items. At the end every item has one result, and the counters agree."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jobs
import pytest
from children import wait_tidy
from client import Client
from cluster import Cluster, until
from jobs import MODEL
from online import loop

SLOTS = 4
DRAIN_SECONDS = 120
ITEMS, TOKENS = 2000, 128
"""Of a job that has long to go when something breaks."""
ANSWERS, LONG = 8, 1700
"""Twice as many answers as a worker has slots, each almost as long as the context of the model."""
Held = tuple[jobs.Submitted, dict[str, Any]]


@pytest.fixture
def holding(cluster: Cluster, namespace: str, first: str, client: Client, queue: str) -> Held:
    """Submit a job. Return it with a pod that holds items of it."""
    pods = cluster.wait_pods(first, 2, namespace=namespace)
    job = jobs.submit(client, queue, ITEMS, most=TOKENS)

    def pod_with_leases() -> Any:
        held = jobs.leases(cluster, pods)
        return next((pod for pod in pods if held[pod["metadata"]["name"]] > 0), None)

    return job, until(pod_with_leases, seconds=60, said="a pod holds leases", pause=0.1)


@pytest.fixture
def once(cluster: Cluster, namespace: str, first: str) -> Iterator[None]:
    """Start workers whose items have one attempt. If an attempt is spent, the counts of the job show a lost item."""
    cluster.hot_patch(first, {"offline": {"maxAttempts": 1}}, namespace=namespace)
    yield
    cluster.hot_patch(first, {"offline": {"maxAttempts": None}}, namespace=namespace)


def test_sigkill_of_the_container_loses_nothing(cluster: Cluster, namespace: str, holding: Held) -> None:
    job, pod = holding
    name = pod["metadata"]["name"]

    cluster.kill(name, namespace=namespace)

    assert job.counts["leased"] > 0
    cluster.wait_restarted(name, 1, namespace=namespace)
    job.finish(seconds=900, compared=6)
    wait_tidy(cluster, namespace)


@pytest.mark.short
def test_force_deletion_of_the_pod_loses_nothing(cluster: Cluster, namespace: str, first: str, holding: Held) -> None:
    job, pod = holding

    name = pod["metadata"]["name"]
    cluster.kubectl("delete", "pod", name, "-n", namespace, "--force", "--grace-period=0", "--wait=false")

    assert job.counts["leased"] > 0
    cluster.wait_pods(first, 2, namespace=namespace)
    job.finish(seconds=900, compared=6)
    wait_tidy(cluster, namespace)


@pytest.mark.usefixtures("once")
def test_a_pod_that_is_deleted_gives_its_items_back_and_no_token_is_computed_twice(
    cluster: Cluster, namespace: str, first: str, client: Client, queue: str
) -> None:
    pods = cluster.wait_pods(first, 2, namespace=namespace)
    names = {pod["metadata"]["name"] for pod in pods}
    before = sum(drawn(cluster, pod) for pod in pods)
    with loop(client, namespace, first) as online:
        job = jobs.submit(client, queue, ITEMS, most=TOKENS)
        pod = until(lambda: [pod for pod in pods if begun(cluster, pod)], seconds=60, said="begun items")[0]
        leased = job.counts["leased"]

        cluster.kubectl("delete", "pod", pod["metadata"]["name"], "-n", namespace, "--wait=false")
        until(lambda: not cluster.leases(pod), seconds=20, said="the pod holds no lease", pause=0.1)
        last = drawn(cluster, pod)

        cluster.wait_pods(first, 2, namespace=namespace)
        job.finish(seconds=900, compared=6)
        said = online.stop()

    after = cluster.pods(first, namespace=namespace)
    survivors = [other for other in after if other["metadata"]["name"] != pod["metadata"]["name"]]
    computed = last + sum(drawn(cluster, other) for other in survivors) - before
    delivered = sum(
        result["response"]["body"]["usage"]["completion_tokens"] for result in client.results(job.id, queue=queue)
    )
    print(json.dumps({"computed": computed, "delivered": delivered, "leased": leased}))
    assert leased > 0
    assert names & {other["metadata"]["name"] for other in after} == names - {pod["metadata"]["name"]}
    assert computed == delivered
    assert said["failures"] == []
    wait_tidy(cluster, namespace)


@pytest.fixture
def beside() -> list[str]:
    """Return the other pods that end at the same time."""
    return []


def test_answers_that_run_on_a_pod_in_deletion_end_whole(
    cluster: Cluster, namespace: str, first: str, client: Client, beside: list[str]
) -> None:
    pod, _ = cluster.wait_pods(first, 2, namespace=namespace)
    url = f"http://{pod['status']['podIP']}:8000/v1"
    with ThreadPoolExecutor(1) as executor:
        asked = executor.submit(client.script, "parallel.py", url, MODEL, str(LONG), str(ANSWERS), seconds=600)
        running = 'ballast_slots{class="online",state="running"}'
        until(lambda: cluster.metrics(pod)[running] == SLOTS, seconds=60, said="answers in every slot", pause=0.1)
        deleted = time.time()
        cluster.kubectl("delete", "pod", pod["metadata"]["name"], *beside, "-n", namespace, "--wait=false")
        answers = asked.result()

    ends = [answer.pop("ended", 0) for answer in answers]
    assert answers == [{"tokens": LONG, "reason": "length"}] * ANSWERS
    assert max(ends) > deleted, "each answer was whole before the deletion"
    cluster.wait_pods(first, 2, namespace=namespace)


@pytest.mark.usefixtures("once")
def test_a_drain_of_the_only_node_takes_one_pod_and_waits_for_the_other(
    cluster: Cluster, namespace: str, first: str, client: Client, holding: Held
) -> None:
    """The disruption budget allows the second pod to end after the first serves again, on another node."""
    if len(cluster.provider.nodes()) > 1:
        pytest.skip("with several nodes a drain ends: see test_nodes.py")
    job, _ = holding
    pods = cluster.pods(first, namespace=namespace)
    (node,) = {pod["spec"]["nodeName"] for pod in pods}
    until(lambda: all(cluster.leases(pod) > 0 for pod in pods), seconds=60, said="both pods hold leases", pause=0.1)
    words = ("--pod-selector", f"app.kubernetes.io/instance={first}", "--delete-emptydir-data", "--timeout=20s")
    with loop(client, namespace, first) as online:
        assert job.counts["leased"] > 0
        try:
            drained = cluster.kubectl("drain", node, *words, check=False)
        finally:
            cluster.kubectl("uncordon", node)

        now = cluster.wait_pods(first, 2, namespace=namespace)
        job.finish(seconds=900, compared=6)
        said = online.stop()

    assert drained.returncode == 1
    assert "violate the pod's disruption budget" in drained.stderr
    assert len({uid(pod) for pod in now} & {uid(pod) for pod in pods}) == 1
    assert said["failures"] == []
    wait_tidy(cluster, namespace)


def test_deletion_of_the_resource_leaves_nothing_behind(
    cluster: Cluster, namespace: str, first: str, holding: Held
) -> None:
    job, _ = holding
    assert job.counts["leased"] > 0

    cluster.kubectl("delete", "infd", first, "-n", namespace, "--timeout=60s", seconds=70)

    wait_tidy(cluster, namespace)
    assert cluster.get("pods,deployments,services,secrets", namespace=namespace) == []
    assert job.counts["leased"] == 0
    assert job.counts["waiting"] > 0
    assert job.client.differences(job.queue) == []


def drawn(cluster: Cluster, pod: dict[str, Any]) -> float:
    """Return the number of offline tokens that a worker has generated."""
    return cluster.metrics(pod)['ballast_tokens_total{class="offline",phase="decode"}']


def begun(cluster: Cluster, pod: dict[str, Any]) -> bool:
    """Return whether a worker has started items that it holds: it has leases and running offline requests."""
    samples = cluster.metrics(pod)
    return samples["ballast_leases"] > 0 and samples['ballast_slots{class="offline",state="running"}'] > 0


def uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])
