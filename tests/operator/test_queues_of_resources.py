"""Which queue a resource serves: one model for each queue, and no queue is left with work unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from operated import Cluster, Operator, running, until

from ballast_queue.redis_store import Queue
from ballast_queue.settings import QueueSettings
from ballast_queue.unused import REGISTRY

pytestmark = pytest.mark.envtest

LINE = json.dumps(
    {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x"}}
)


@pytest.fixture
def redis(cluster: Cluster, valkey: Any) -> str:
    cluster.secret("redis", url=valkey.url)
    return str(valkey.url)


def submit(redis: str, name: str) -> Queue:
    queue = Queue.connect(redis, name)
    queue.submissions.submit([LINE], tenant="default")
    return queue


def test_a_queue_that_a_change_leaves_with_work_is_reported_until_it_is_finished(
    operator: Operator, cluster: Cluster, redis: str
) -> None:
    old = f"{cluster.namespace}/llm"
    cluster.make(redis={"secretName": "redis"})
    until(lambda: (cluster.resource().get("status") or {}).get("queue") == old)
    queue = submit(redis, old)
    cluster.patch("inferencedeployments", "llm", {"spec": {"offline": {"queue": f"{cluster.namespace}/other"}}})

    message = cluster.says("Degraded", "True", "QueueLeft")["message"]
    assert old in message
    assert "1 unfinished items" in message
    (job,) = queue.jobs.all()
    queue.jobs.cancel(job.id)
    queue.timers.run_due()
    cluster.says("Degraded", "False")
    assert cluster.resource()["status"]["formerQueues"] == [old], "a pod may still serve it"
    for pod in until(lambda: [pods for pods in [cluster.pods()] if len(pods) == 2])[0]:
        cluster.make_ready(pod["metadata"]["name"])
    until(lambda: not cluster.resource()["status"]["formerQueues"])
    queue.close()


def test_a_paused_job_starts_no_replica_before_it_is_resumed(operator: Operator, cluster: Cluster, redis: str) -> None:
    queue = submit(redis, f"{cluster.namespace}/llm")
    (job,) = queue.jobs.all()
    queue.jobs.pause(job.id)
    cluster.make(redis={"secretName": "redis"}, replicas=0, scaling={"minReplicas": 0, "maxReplicas": 2})
    cluster.says("DeadlineAtRisk", "False")

    assert cluster.resource()["spec"]["replicas"] == 0
    queue.jobs.resume(job.id)
    until(lambda: cluster.resource()["spec"]["replicas"] == 1)
    queue.close()


def test_the_queue_of_a_deleted_resource_is_kept_for_its_days_and_then_removed(
    controllers: ControlPlane, cluster: Cluster, valkey: Any, tmp_path: Path
) -> None:
    environment = cluster.own_redis(url=valkey.url) | {"BALLAST_AUDIT_SECONDS": "1"}
    environment |= {"BALLAST_RELEASE": f"{cluster.namespace}/all"}
    gone, kept = (submit(valkey.url, f"{cluster.namespace}/{name}") for name in ("gone", "kept"))
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make("gone")
        cluster.make("kept", offline={"queue": kept.name})
        until(lambda: registered(kept) == {gone.name, kept.name}, said="both queues are known")
        cluster.delete("inferencedeployments", "gone")
        until(lambda: is_unused(gone), said="noticed")
        assert gone.jobs.all(), "it is kept for 30 days"
    with running(controllers.kubeconfig, tmp_path, **environment, BALLAST_UNUSED_QUEUE_DAYS="0.00001") as operator:
        until(lambda: not gone.jobs.all(), said="removed")
        until(lambda: registered(kept) == {kept.name})
        until(lambda: "unused queues removed" in operator.text(), said="logged after the removal")
        assert kept.jobs.all()
    for queue in (gone, kept):
        queue.close()


def test_a_paused_job_expires_although_no_worker_serves_its_queue(
    operator: Operator, cluster: Cluster, redis: str
) -> None:
    queue = submit(redis, f"{cluster.namespace}/llm")
    queue.settings.apply(QueueSettings(abandoned_seconds=0.1))
    (job,) = queue.jobs.all()
    queue.jobs.pause(job.id)
    cluster.make(redis={"secretName": "redis"}, replicas=0)

    until(lambda: queue.jobs.get(job.id).state == "expired")
    queue.close()


def registered(queue: Queue) -> set[str]:
    """Return the queues of this namespace that the operator knows."""
    own = queue.name.partition("/")[0]
    pairs = queue.store.connection.hash_pairs(REGISTRY)
    return {name for field, _ in pairs if (name := field.decode().partition(" ")[0]).startswith(own)}


def is_unused(queue: Queue) -> bool:
    pairs = queue.store.connection.hash_pairs(REGISTRY)
    return any(value for field, value in pairs if field.decode().partition(" ")[0] == queue.name)


def test_two_models_on_queues_of_the_same_name_in_two_servers_are_no_conflict(
    operator: Operator, cluster: Cluster, redis: str
) -> None:
    offline = {"queue": f"{cluster.namespace}/shared"}
    cluster.secret("another", url=redis)
    cluster.make("one", model={"uri": "file:///models/one"}, offline=offline, redis={"secretName": "redis"})
    cluster.make("two", model={"uri": "file:///models/two"}, offline=offline, redis={"secretName": "another"})

    until(lambda: cluster.get("deployments", "one") and cluster.get("deployments", "two"))
