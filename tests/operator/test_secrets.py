"""An account that may create resources learns nothing about Secrets, and reaches nothing through the operator."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from typing import Any

import pytest
from control_plane import ControlPlane
from listener import Listener
from operated import Cluster, Operator, running, until
from resources import make_resource

from ballast_operator.cluster import Cluster as Client
from ballast_operator.named_secrets import named_secrets
from ballast_operator.redis_hosts import RedisHosts

pytestmark = pytest.mark.envtest

SECRET = "hunter2-Sup3rSecretValue"
LABEL = 'ballast.dev/allow: "true"'


@pytest.fixture(scope="module")
def operator(controllers: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    environment = {"BALLAST_REDIS_HOSTS": "127.0.0.1", "BALLAST_ALLOWED_VOLUMES": "*"}
    with running(controllers.kubeconfig, tmp_path_factory.mktemp("operator"), **environment) as found:
        yield found


@pytest.fixture
def http() -> Iterator[Listener]:
    found = Listener(f"HTTP/1.0 400 {SECRET}\r\n\r\n".encode())
    yield found
    found.close()


URLS = {
    "a password": f"{SECRET}",
    "a key": f"-----BEGIN PRIVATE KEY-----\n{SECRET}",
    "a slash in the password": f"redis://user:{SECRET}/x#y@127.0.0.1:6379",
    "a bad port": f"redis://127.0.0.1:{SECRET}",
    "a file": f"unix:///etc/{SECRET}",
    "a parameter": f"redis://127.0.0.1:1/?unknown={SECRET}",
    "a closed port": f"redis://:{SECRET}@127.0.0.1:1",
    "a host that is not admitted": f"redis://:{SECRET}@localhost:6379",
}


def test_no_content_of_a_secret_is_shown_and_all_failures_read_the_same(
    operator: Operator, cluster: Cluster, http: Listener, valkey: Any
) -> None:
    urls = URLS | {"an HTTP server": f"redis://127.0.0.1:{http.port}", "a refused login": _with_password(valkey.url)}
    names = {f"llm-{number}": url for number, url in enumerate(urls.values())}
    for name, url in names.items():
        cluster.secret(name, url=url)
        cluster.make(name, redis={"secretName": name})
    messages = {
        cluster.says("DeadlineAtRisk", "Unknown", "RedisUnreachable", name=name)["message"].replace(name, "NAME")
        for name in names
    }

    assert len(messages) == 1
    assert http.accepted, "the address was tried"
    everything = json.dumps([cluster.list("inferencedeployments"), cluster.list("events")])
    assert SECRET not in everything + operator.text() + str(operator.metrics())
    assert "HTTP/1.0" not in everything + operator.text()


def _with_password(url: str) -> str:
    return url.replace("redis://", f"redis://nobody:{SECRET}@")


PLACES: dict[str, dict[str, Any]] = {
    "redis": {"redis": {"secretName": "theirs"}},
    "API keys": {"apiKeys": {"secretName": "theirs"}},
    "credentials": {"model": {"uri": "hf://a/b", "credentialsSecret": "theirs"}},
    "image": {"template": {"imagePullSecrets": ["theirs"]}},
    "environment": {
        "template": {"env": [{"name": "X", "valueFrom": {"secretKeyRef": {"name": "theirs", "key": "url"}}}]}
    },
    "volume": {"template": {"volumes": [{"name": "x", "secret": {"secretName": "theirs", "optional": True}}]}},
    "projected volume": {
        "template": {"volumes": [{"name": "x", "projected": {"sources": [{"secret": {"name": "theirs"}}]}}]}
    },
    "CSI volume": {
        "template": {"volumes": [{"name": "x", "csi": {"driver": "d", "nodePublishSecretRef": {"name": "theirs"}}}]}
    },
    "attribute of a CSI volume": {
        "template": {
            "volumes": [
                {
                    "name": "x",
                    "csi": {
                        "driver": "smb.csi.k8s.io",
                        "volumeAttributes": {"secretname": "theirs", "secretProviderClass": "n", "source": "//s"},
                    },
                }
            ]
        }
    },
    "other volumes": {
        "template": {"volumes": [{"name": "x", "azureFile": {"secretName": "theirs", "shareName": "s"}}]}
    },
}


@pytest.mark.parametrize("place", PLACES)
def test_every_place_that_names_a_secret_is_found(place: str) -> None:
    assert named_secrets(make_resource(**PLACES[place])) == ("theirs",)


def test_a_secret_without_the_label_reaches_no_pod(operator: Operator, cluster: Cluster, valkey: Any) -> None:
    cluster.create("secrets", {"metadata": {"name": "theirs"}, "stringData": {"url": valkey.url}})
    for number, spec in enumerate(PLACES.values()):
        cluster.make(f"llm-{number}", **spec)
    for number in range(len(PLACES)):
        message = cluster.says("Degraded", "True", "SecretNotAllowed", name=f"llm-{number}")["message"]
        assert "Secret theirs" in message
        assert LABEL in message
    assert not cluster.list("deployments")

    cluster.patch("secrets", "theirs", {"metadata": {"labels": {"ballast.dev/allow": "true"}}})
    for number in range(len(PLACES)):
        until(
            lambda name=f"llm-{number}": cluster.get("deployments", name), said=f"llm-{number} after the label is set"
        )


def test_the_next_secret_without_the_label_is_named_when_the_first_has_it(operator: Operator, cluster: Cluster) -> None:
    for name in ("a", "b"):
        cluster.create("secrets", {"metadata": {"name": name}, "stringData": {"url": "redis://127.0.0.1:1"}})
    cluster.make(redis={"secretName": "a"}, apiKeys={"secretName": "b"})
    assert "Secret a " in cluster.says("Degraded", "True", "SecretNotAllowed")["message"]

    cluster.patch("secrets", "a", {"metadata": {"labels": {"ballast.dev/allow": "true"}}})
    until(lambda: "Secret b " in cluster.condition("Degraded")["message"], seconds=60, said="the other Secret")


def test_a_missing_secret_reads_like_one_without_the_label(operator: Operator, cluster: Cluster) -> None:
    """Otherwise, a resource could be used to find out which Secrets exist."""
    cluster.create("secrets", {"metadata": {"name": "theirs"}})
    cluster.make("one", redis={"secretName": "theirs"})
    cluster.make("two", redis={"secretName": "absent"})

    one = cluster.says("Degraded", "True", "SecretNotAllowed", name="one")["message"]
    assert cluster.says("Degraded", "True", name="two")["message"] == one.replace("theirs", "absent")


def test_children_stay_as_they_are_when_a_change_names_a_secret_without_the_label(
    operator: Operator, cluster: Cluster
) -> None:
    cluster.create("secrets", {"metadata": {"name": "theirs"}})
    cluster.make()
    until(lambda: cluster.get("deployments", "llm"))
    cluster.patch("inferencedeployments", "llm", {"spec": {"apiKeys": {"secretName": "theirs"}, "slots": 3}})
    cluster.says("Degraded", "True", "SecretNotAllowed")

    assert cluster.get("deployments", "llm")["metadata"]["generation"] == 1
    cluster.patch("inferencedeployments", "llm", {"spec": {"apiKeys": None}})
    cluster.says("Degraded", "False")
    until(lambda: cluster.get("deployments", "llm")["metadata"]["generation"] == 2)


def test_services_with_a_selector_in_the_own_namespace_are_admitted_and_others_are_not(
    controllers: ControlPlane, cluster: Cluster
) -> None:
    """Which hosts the operator connects to, by the Services of a real API server."""
    ports = [{"port": 6379}]
    cluster.create("services", {"metadata": {"name": "queue"}, "spec": {"selector": {"app": "queue"}, "ports": ports}})
    cluster.create("services", {"metadata": {"name": "bare"}, "spec": {"ports": ports}})
    outside = {"type": "ExternalName", "externalName": "example.com", "selector": {"app": "x"}}
    cluster.create("services", {"metadata": {"name": "outside"}, "spec": outside})
    own = cluster.namespace
    hosts = {
        f"queue.{own}.svc": True,
        f"queue.{own}.svc.cluster.local": True,
        f"QUEUE.{own}.svc.cluster.local.": True,
        f"queue.{own}.svc.": False,
        f"queue.{own}.": False,
        f"queue.{own}": False,
        "given.example.org": True,
        "a.cache.example.org": True,
        "queue": False,
        f"queue.{own}.svc.example.com": False,
        f"bare.{own}.svc": False,
        f"outside.{own}.svc": False,
        f"absent.{own}.svc": False,
        "kubernetes.default.svc": False,
        "cache.example.com": False,
        "127.0.0.1": False,
        "x/.cache.example.org": False,
        "": False,
    }

    async def admitted() -> dict[str, bool]:
        async with Client() as client:
            admitting = RedisHosts(client, ["given.example.org", "*.cache.example.org"])
            return {host: await admitting.admits(own, host) for host in hosts}

    os.environ["KUBECONFIG"] = str(controllers.kubeconfig)
    try:
        assert asyncio.run(admitted()) == hosts
    finally:
        del os.environ["KUBECONFIG"]


def test_a_quantity_that_the_api_server_refuses_is_reported_in_its_words(operator: Operator, cluster: Cluster) -> None:
    cluster.make(template={"resources": {"limits": {"memory": "lots"}}})

    assert "quantities must match" in cluster.says("Degraded", "True", "NotApplied")["message"]
    until(lambda: any(event["reason"] == "NotApplied" for event in cluster.list("events")), said="an event")
    assert cluster.get("services", "llm"), "the other children do not wait"
    cluster.patch("inferencedeployments", "llm", {"spec": {"template": {"resources": {"limits": {"memory": "1Gi"}}}}})
    cluster.says("Degraded", "False")
