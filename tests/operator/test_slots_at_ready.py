"""A resource becomes ready with the figures that its workers report, and they go with the workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from operated import Cluster, report, running, until

from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.envtest


def test_the_slots_are_known_when_the_resource_becomes_ready(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, valkey: Any
) -> None:
    """The worker reports just before it is ready, and the next poll would be a minute away."""
    cluster.secret("redis", url=valkey.url)
    with running(controllers.kubeconfig, tmp_path, BALLAST_POLL_SECONDS="60"):
        cluster.make(redis={"secretName": "redis"})
        cluster.says("DeadlineAtRisk", "False")
        assert cluster.resource()["status"]["workers"] == "0/1"
        report(Queue.connect(valkey.url, f"{cluster.namespace}/llm"), "10.8.0.1")
        cluster.make_ready(until(cluster.pods)[0]["metadata"]["name"], "10.8.0.1")
        cluster.says("Ready", "True")

        assert cluster.resource()["status"]["slots"] == {"online": 7, "offline": 1}
        assert cluster.resource()["status"]["workers"] == "1/1"
        cluster.patch("inferencedeployments", "llm", {"spec": {"replicas": 0}})
        until(lambda: "slots" not in cluster.resource()["status"], said="no worker has slots any more")
