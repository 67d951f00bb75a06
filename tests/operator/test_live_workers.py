"""What workers and queue say, and what the operator makes of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
from operated import Cluster, Operator, until
from queue_objects import make_status

from ballast_queue.redis_store import Queue
from ballast_queue.status import ClassLoad

pytestmark = pytest.mark.envtest

VERSION = "ballast.dev/config-version"
TOLD = "ballast.dev/config-hash"


@pytest.fixture
def queue(cluster: Cluster, valkey: Any) -> Queue:
    """The queue of the resource `llm`, and the Secret that leads there."""
    cluster.secret("redis", url=valkey.url)
    return Queue.connect(valkey.url, f"{cluster.namespace}/llm")


def publish(queue: Queue, ip: str, *, hash_: str = "", **online: int) -> None:
    loads = {"online": ClassLoad(**online), "offline_reserved": 1}
    about = {"address": f"http://{ip}:8000", "at": queue.now(), "model": "tiny", "batch_ceiling": 4}
    status = make_status(f"w-{ip}", config_hash=hash_, **about, **loads)
    queue.workers.publish(status, 60)


def file_hash(cluster: Cluster, pod: Any) -> str:
    """What a worker in this pod would say that it has in force."""
    name = f"worker-{pod['metadata']['annotations'][VERSION]}.yaml"
    return hashlib.sha256(cluster.get("configmaps", "llm-ballast-config")["data"][name].encode()).hexdigest()


def pod_of(cluster: Cluster) -> Any:
    return until(cluster.pods)[0]


def test_a_hot_change_reaches_running_pods_and_config_applied_says_when(
    operator: Operator, cluster: Cluster, queue: Queue
) -> None:
    cluster.make(redis={"secretName": "redis"}, slo={"ttftMilliseconds": 500})
    pod = pod_of(cluster)
    cluster.make_ready(pod["metadata"]["name"], "10.9.0.1")
    publish(queue, "10.9.0.1", hash_=file_hash(cluster, pod))
    cluster.says("ConfigApplied", "True")
    assert TOLD not in pod["metadata"]["annotations"]

    cluster.patch("inferencedeployments", "llm", {"spec": {"slo": {"ttftMilliseconds": 250}}})
    told = until(lambda: pod_of(cluster)["metadata"]["annotations"].get(TOLD))
    cluster.says("ConfigApplied", "False", "Pending")
    assert told == file_hash(cluster, pod)
    publish(queue, "10.9.0.1", hash_=told)

    cluster.says("ConfigApplied", "True")
    assert [p["metadata"]["name"] for p in cluster.pods()] == [pod["metadata"]["name"]], "no pod was replaced"


def test_the_reservation_is_unknown_until_the_worker_publishes_a_whole_status(
    operator: Operator, cluster: Cluster, queue: Queue
) -> None:
    cluster.make(redis={"secretName": "redis"})
    cluster.make_ready(pod_of(cluster)["metadata"]["name"], "10.9.0.4")
    partial = make_status("w", address="http://10.9.0.4:8000", at=queue.now()).model_dump_json(exclude={"reservation"})
    queue.store.call(queue.store.functions.publish_status("w", 60, partial))
    cluster.says("OfflineReservationSatisfied", "Unknown", "NoWorkers")
    publish(queue, "10.9.0.4")

    assert cluster.says("OfflineReservationSatisfied", "True", "NoWork")


def test_a_broken_version_is_degraded_while_the_old_one_serves(operator: Operator, cluster: Cluster) -> None:
    cluster.make(slots=4)
    old = pod_of(cluster)
    cluster.make_ready(old["metadata"]["name"])
    cluster.says("Ready", "True")
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 8, "template": {"image": "worker:none"}}})
    new = until(lambda: [p for p in cluster.pods() if p["metadata"]["name"] != old["metadata"]["name"]])[0]
    waiting = {"reason": "ImagePullBackOff", "message": "manifest unknown"}
    container = {"name": "worker", "image": "worker:none", "imageID": "", "ready": False, "restartCount": 0}
    cluster.set_pod(new["metadata"]["name"], containerStatuses=[container | {"state": {"waiting": waiting}}])

    degraded = cluster.says("Degraded", "True", "ImagePull")
    assert "worker:none: manifest unknown" in degraded["message"]
    assert cluster.condition("Ready")["status"] == "True"
    files = cluster.get("configmaps", "llm-ballast-config")["data"]
    assert {f"worker-{pod['metadata']['annotations'][VERSION]}.yaml" for pod in (old, new)} == set(files)


def test_a_deployment_without_its_secret_says_so_and_goes_on_when_it_comes(
    operator: Operator, cluster: Cluster, valkey: Any
) -> None:
    cluster.make(redis={"secretName": "late"})
    assert "Secret late" in cluster.says("Degraded", "True", "SecretNotAllowed")["message"]
    cluster.secret("late", url=valkey.url)

    cluster.says("Degraded", "False")
    cluster.says("SLOMet", "Unknown", "NoWorkers")


def test_waiting_work_wakes_a_deployment_at_zero(operator: Operator, cluster: Cluster, queue: Queue) -> None:
    scaling = {"minReplicas": 0, "maxReplicas": 3}
    cluster.make(redis={"secretName": "redis"}, replicas=0, scaling=scaling)
    cluster.says("Ready", "True", "ScaledToZero")
    line = json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}})
    push(queue, line)

    until(lambda: cluster.resource()["spec"]["replicas"] == 1)
    until(cluster.pods)
    assert "1 item waits" in cluster.resource()["status"]["scaling"]["because"]


def push(queue: Queue, line: str) -> None:
    client: Any = queue.store.connection.client
    client.xadd(f"ballast:{{{queue.name}}}:inbox", {"item": line, "job": "j", "tenant": "t"})


def test_online_load_raises_replicas_and_silence_lowers_none(
    operator: Operator, cluster: Cluster, queue: Queue
) -> None:
    scaling = {"maxReplicas": 5, "scaleUpSeconds": 0, "scaleDownSeconds": 0, "headroomPercent": 0}
    cluster.make(redis={"secretName": "redis"}, scaling=scaling)
    pod = pod_of(cluster)
    cluster.make_ready(pod["metadata"]["name"], "10.9.0.2")
    publish(queue, "10.9.0.2", running=4, waiting=8)

    until(lambda: cluster.resource()["spec"]["replicas"] == 3)
    until(lambda: len(cluster.pods()) == 3)
    queue.workers.withdraw("w-10.9.0.2")
    polled: Callable[[], bool] = lambda: "no worker has reported" in operator_says(cluster)  # noqa: E731
    until(lambda: polled() or cluster.condition("SLOMet")["reason"] == "NoWorkers")
    assert cluster.resource()["spec"]["replicas"] == 3


def operator_says(cluster: Cluster) -> str:
    return str((cluster.resource().get("status") or {}).get("scaling", {}).get("because", ""))


def test_replicas_that_leave_are_marked_with_their_load_first(
    operator: Operator, cluster: Cluster, queue: Queue
) -> None:
    cluster.make(redis={"secretName": "redis"}, replicas=2)
    until(lambda: len(cluster.pods()) == 2)
    busy, idle = cluster.pods()
    for number, pod in enumerate((busy, idle)):
        cluster.make_ready(pod["metadata"]["name"], f"10.9.1.{number}")
        publish(queue, f"10.9.1.{number}", hash_=file_hash(cluster, pod), running=3 - 3 * number)
    cluster.says("ConfigApplied", "True")
    cluster.patch("inferencedeployments", "llm", {"spec": {"replicas": 1}})

    until(lambda: len(cluster.pods()) == 1)
    (left,) = cluster.pods()
    assert left["metadata"]["name"] == busy["metadata"]["name"]
    assert left["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] == "3000"


def test_of_two_resources_with_one_queue_each_counts_its_own_workers(
    operator: Operator, cluster: Cluster, valkey: Any
) -> None:
    cluster.secret("redis", url=valkey.url)
    shared = Queue.connect(valkey.url, f"{cluster.namespace}/shared")
    more = {"redis": {"secretName": "redis"}, "offline": {"queue": shared.name}}
    scaling = {"maxReplicas": 5, "scaleUpSeconds": 0, "headroomPercent": 0}
    publish(shared, "10.9.3.1")
    publish(shared, "10.9.3.2", running=4, waiting=16)
    cluster.make("calm", **more, scaling=scaling)
    cluster.make("busy", **more, scaling=scaling)
    for name, ip in (("calm", "10.9.3.1"), ("busy", "10.9.3.2")):
        pods = until(lambda name=name: [p for p in cluster.pods() if p["metadata"]["name"].startswith(name)])
        cluster.make_ready(pods[0]["metadata"]["name"], ip)

    until(lambda: cluster.resource("busy")["spec"]["replicas"] == 5)
    until(lambda: cluster.resource("calm")["status"].get("slots") == {"online": 7, "offline": 1})
    assert cluster.resource("calm")["spec"]["replicas"] == 1
    shared.close()


def test_a_pod_that_cannot_end_blocks_nothing(operator: Operator, cluster: Cluster) -> None:
    """As on a node that was lost: its pod stays in deletion, another takes its place."""
    cluster.make()
    stuck = pod_of(cluster)["metadata"]["name"]
    cluster.make_ready(stuck)
    cluster.says("Ready", "True")
    cluster.patch("pods", stuck, {"metadata": {"finalizers": ["example.org/lost-node"]}})
    cluster.delete("pods", stuck)
    new = until(cluster.pods)[0]["metadata"]["name"]
    cluster.make_ready(new, "10.0.0.2")
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
    until(lambda: [pod for pod in cluster.pods() if pod["metadata"]["name"] not in {stuck, new}], said="a rollout")

    assert cluster.get("pods", stuck)["metadata"]["deletionTimestamp"]
    cluster.says("Ready", "True")
    cluster.patch("pods", stuck, {"metadata": {"finalizers": None}})
