"""Settings that decide which Secrets and hosts the operator uses, and Secrets that change or are deleted."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from listener import Listener
from operated import Cluster, running, until

pytestmark = pytest.mark.envtest


def test_the_label_is_not_needed_while_the_setting_is_off(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, valkey: Any
) -> None:
    cluster.create("secrets", {"metadata": {"name": "old"}, "stringData": {"url": valkey.url}})
    with running(controllers.kubeconfig, tmp_path, BALLAST_REQUIRE_SECRET_LABEL="false"):
        cluster.make(redis={"secretName": "old"})

        cluster.says("DeadlineAtRisk", "False")


def test_a_label_that_is_removed_is_noticed_by_the_audit(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, valkey: Any
) -> None:
    cluster.secret("redis", url=valkey.url)
    with running(controllers.kubeconfig, tmp_path, BALLAST_AUDIT_SECONDS="2"):
        cluster.make(redis={"secretName": "redis"})
        cluster.says("DeadlineAtRisk", "False")
        cluster.patch("secrets", "redis", {"metadata": {"labels": {"ballast.dev/allow": None}}})

        cluster.says("Degraded", "True", "SecretNotAllowed")


def test_the_operator_never_connects_to_a_host_that_is_not_admitted(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    http = Listener()
    cluster.secret("redis", url=f"redis://127.0.0.1:{http.port}")
    with running(controllers.kubeconfig, tmp_path, BALLAST_REDIS_HOSTS="redis.example.com") as operator:
        cluster.make(redis={"secretName": "redis"})
        cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable")
        until(lambda: operator.text().count("HostNotAdmitted") > 2)

    assert http.accepted == 0
    http.close()


def test_a_deleted_copy_of_the_redis_secret_is_restored(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, valkey: Any
) -> None:
    """By the audit, and soon if a pod waits for it. A change of its content is undone, too."""
    environment = cluster.own_redis(url=valkey.url)
    with running(controllers.kubeconfig, tmp_path, **environment, BALLAST_AUDIT_SECONDS="2"):
        cluster.make()
        until(lambda: cluster.get("secrets", "llm-ballast-redis"))
        cluster.delete("secrets", "llm-ballast-redis")
        until(lambda: cluster.get("secrets", "llm-ballast-redis"), said="restored by the audit")
        changed = {"url": base64.b64encode(b"redis://elsewhere").decode()}
        cluster.patch("secrets", "llm-ballast-redis", {"data": changed})
        until(lambda: cluster.get("secrets", "llm-ballast-redis")["data"] != changed, said="its content is restored")
    with running(controllers.kubeconfig, tmp_path, **environment):
        pod = until(cluster.pods)[0]["metadata"]["name"]
        cluster.delete("secrets", "llm-ballast-redis")
        waiting = {"name": "worker", "ready": False, "restartCount": 0, "image": "", "imageID": ""}
        waiting |= {"state": {"waiting": {"reason": "ContainerCreating"}}}
        cluster.set_pod(pod, phase="Pending", containerStatuses=[waiting])
        until(lambda: cluster.get("secrets", "llm-ballast-redis"), seconds=60, said="restored for the waiting pod")
