"""Namespaces that deny all traffic by default: what reaches workers, Redis and operator, and what does not.

The policies are those of the operator, of the chart, and of docs/how-to/network-policies.md. Connections are tried from
pods of other namespaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import jobs
import pytest
import yaml
from client import Client
from cluster import Cluster, tiny
from prober import Prober
from programs import ROOT
from release import NAME, NAMESPACE

PAGE = ROOT / "docs" / "how-to" / "network-policies.md"
BLOCK = re.compile(r"<!-- policy: (\w+) -->\n```yaml\n(.*?)```", re.DOTALL)
DENY: dict[str, Any] = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "deny-by-default"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]},
}
VALKEY = f"{NAME}-valkey.{NAMESPACE}.svc"


def make_resource(clients: str, scrapers: str) -> dict[str, Any]:
    """Return a resource of two workers that admits two namespaces, each to one port."""
    admit = [[{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": name}}}]
             for name in (clients, scrapers)]  # fmt: skip
    return tiny("closed", replicas=2, network={"ingressFrom": admit[0], "metricsFrom": admit[1]})


@pytest.fixture(scope="module")
def probers(cluster: Cluster, namespace: str) -> Iterator[dict[str, Prober]]:
    """Start a pod in each of three namespaces: of clients, of Prometheus, and of strangers."""
    labels = {"clients": {"ballast.dev/queue-client": "true"}, "scrapers": {}, "strangers": {}}
    found = {name: Prober.start(cluster, f"{namespace}-{name}", **each) for name, each in labels.items()}
    yield found
    for each in found.values():
        cluster.drop_namespace(each.namespace)


@pytest.fixture(scope="module")
def closed(cluster: Cluster, namespace: str, probers: dict[str, Prober]) -> Iterator[str]:
    """Deny everything in the namespaces of resource and release, apply the policies of the page, and start workers."""
    policies = {name: yaml.safe_load(text) for name, text in BLOCK.findall(PAGE.read_text())}
    for place, policy in ((namespace, policies["workers"]), (NAMESPACE, policies["operator"])):
        cluster.apply(DENY, policy, namespace=place)
    cluster.apply(make_resource(probers["clients"].namespace, probers["scrapers"].namespace), namespace=namespace)
    yield "closed"
    for name in (DENY["metadata"]["name"], policies["operator"]["metadata"]["name"]):
        cluster.kubectl("delete", "networkpolicy", name, "-n", NAMESPACE, "--ignore-not-found")


def test_a_resource_works_where_everything_is_denied_by_default(
    cluster: Cluster, client: Client, namespace: str, closed: str, probers: dict[str, Prober]
) -> None:
    cluster.wait_ready(closed, namespace=namespace)
    cluster.wait_pods(closed, 2, namespace=namespace)
    cluster.hot_patch(closed, {"offline": {"reservedPercent": 20}}, namespace=namespace)

    jobs.submit(client, f"{namespace}/{closed}", 50).finish(seconds=120, compared=3)
    assert probers["clients"].reach(f"{closed}.{namespace}.svc", 8000) == "open"


ADMITTED = {"clients": {8000}, "scrapers": {8001}, "strangers": set()}


@pytest.mark.parametrize("who", ADMITTED)
def test_workers_admit_each_namespace_to_its_port(
    cluster: Cluster, namespace: str, closed: str, probers: dict[str, Prober], who: str
) -> None:
    pods = cluster.wait_pods(closed, 2, namespace=namespace)
    addresses = [pod["status"]["podIP"] for pod in pods] + [f"{closed}.{namespace}.svc"]

    for port in (8000, 8001):
        found = {address for address in addresses if probers[who].reach(address, port) == "open"}
        assert found == (set(addresses) if port in ADMITTED[who] else set())


def test_valkey_admits_pods_with_the_label_alone(probers: dict[str, Prober], closed: str) -> None:
    assert {who: each.reach(VALKEY, 6380) for who, each in probers.items()} == {
        "clients": "open",
        "scrapers": "denied",
        "strangers": "denied",
    }


def test_the_operator_admits_all_to_its_metrics(release_pods: list[str], probers: dict[str, Prober]) -> None:
    assert [probers["strangers"].reach(address, 8080) for address in release_pods] == ["open", "open"]


def test_workers_reach_nothing_else(cluster: Cluster, namespace: str, closed: str, probers: dict[str, Prober]) -> None:
    (pod, _) = cluster.wait_pods(closed, 2, namespace=namespace)
    code = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=4)"

    def reaches(host: str, port: int) -> bool:
        words = (pod["metadata"]["name"], "python3", "-c", code, host, str(port))
        return cluster.exec(*words, namespace=namespace, check=False).returncode == 0

    assert reaches(VALKEY, 6380)
    assert not reaches(f"{NAME}-operator.{NAMESPACE}.svc", 8080)
    assert not reaches("kubernetes.default.svc", 443)


@pytest.fixture(scope="module")
def release_pods(cluster: Cluster, closed: str) -> list[str]:
    """Return the addresses of both operators."""
    found = cluster.get("pods", namespace=NAMESPACE, selector="app.kubernetes.io/component=operator")
    return [pod["status"]["podIP"] for pod in found]
