"""Two releases of the chart in one cluster, and a release for some namespaces only."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from children import wait_tidy
from cluster import INFD, Cluster, tiny, until
from release import NAME, NAMESPACE, Release

OTHER = "second"
RESOURCE = tiny("kept", cpu="100m", memory="512Mi")
CHILDREN = "deployments,services,configmaps,secrets,networkpolicies,poddisruptionbudgets"
QUIET_SECONDS = 30
"""Several polls and reconciliations of both releases."""


@pytest.fixture
def second(cluster: Cluster, release: Release) -> Iterator[str]:
    """Install another release that watches all namespaces, with other settings for workers."""
    cluster.make_namespace(OTHER)
    values = ("--set=crds.enabled=false", "--set=operator.replicas=1", "--set=valkey.persistence.enabled=false")
    cluster.helm("install", OTHER, release.package, "-n", OTHER, *values, "--wait", "--timeout", "3m")
    yield OTHER
    cluster.helm("uninstall", OTHER, "-n", OTHER, "--wait", "--timeout", "2m")
    cluster.kubectl("delete", "namespace", OTHER, "--timeout=120s", seconds=130)


def test_a_second_release_writes_nothing_to_a_resource_of_the_first(
    cluster: Cluster, namespace: str, second: str
) -> None:
    cluster.apply(RESOURCE, namespace=namespace)
    cluster.wait_ready("kept", namespace=namespace)
    owner = cluster.get(INFD, "kept", namespace=namespace)["status"]["operator"]
    assert owner in {f"{NAMESPACE}/{NAME}-operator", f"{second}/{second}-ballast-operator"}
    idle = second if owner.startswith(NAMESPACE) else NAMESPACE
    until(lambda: foreign(cluster, idle) == 1, seconds=60, said="the other release reports it by its metric")
    before, events = versions(cluster, namespace), num_events(cluster, namespace)
    time.sleep(QUIET_SECONDS)

    assert versions(cluster, namespace) == before
    assert num_events(cluster, namespace) == events
    assert cluster.get(INFD, "kept", namespace=namespace)["status"]["operator"] == owner
    assert f'"release": "{owner}"' in log(cluster, idle)
    cluster.kubectl("delete", INFD, "kept", "-n", namespace, "--timeout=60s", seconds=70)
    wait_tidy(cluster, namespace)


def test_a_release_for_some_namespaces_has_rights_there_and_nowhere_else(
    cluster: Cluster, namespace: str, release: Release
) -> None:
    beside = f"{namespace}-b"
    cluster.make_namespace(beside)
    try:
        chosen = f"--set=operator.watchNamespaces={{{namespace}}}"
        cluster.helm("upgrade", NAME, release.package, "-n", NAMESPACE, chosen, "--wait", "--timeout", "3m")
        cluster.apply(RESOURCE, namespace=beside)
        cluster.apply(RESOURCE, namespace=namespace)
        cluster.wait_ready("kept", namespace=namespace)

        assert "status" not in cluster.get(INFD, "kept", namespace=beside)
        assert cluster.get(CHILDREN, namespace=beside, selector="app.kubernetes.io/instance=kept") == []
        assert [may(cluster, "get", "secrets", where) for where in (namespace, beside, "kube-system")] == [
            True,
            False,
            False,
        ]
        assert not may(cluster, "list", "customresourcedefinitions", "")
        release.check_rights()
    finally:
        cluster.helm("upgrade", NAME, release.package, "-n", NAMESPACE, "--reset-values", "--wait", "--timeout", "3m")
    cluster.wait_ready("kept", namespace=beside)
    cluster.drop_namespace(beside)


def versions(cluster: Cluster, namespace: str) -> dict[str, str]:
    """Return the resourceVersion of the resource and of each child."""
    found = [*cluster.get(CHILDREN, namespace=namespace), cluster.get(INFD, "kept", namespace=namespace)]
    return {f"{each['kind']}/{each['metadata']['name']}": each["metadata"]["resourceVersion"] for each in found}


def num_events(cluster: Cluster, namespace: str) -> int:
    """Return how often something happened to the resource."""
    found = cluster.get("events", namespace=namespace)
    mine = [each for each in found if each["involvedObject"]["kind"] == "InferenceDeployment"]
    return sum(each.get("count") or 1 for each in mine)


def operators(cluster: Cluster, namespace: str) -> list[str]:
    selector = "app.kubernetes.io/component=operator"
    return [pod["metadata"]["name"] for pod in cluster.get("pods", namespace=namespace, selector=selector)]


def foreign(cluster: Cluster, namespace: str) -> float:
    """Return the number of resources that the operators of a release leave to another one."""
    total = 0.0
    for pod in operators(cluster, namespace):
        path = f"/api/v1/namespaces/{namespace}/pods/{pod}:8080/proxy/metrics"
        text = cluster.kubectl("get", "--raw", path).stdout
        total += sum(map(float, re.findall(r"^ballast_operator_foreign_resources\S* (\S+)", text, re.MULTILINE)))
    return total


def log(cluster: Cluster, namespace: str) -> str:
    return "\n".join(cluster.kubectl("logs", pod, "-n", namespace).stdout for pod in operators(cluster, namespace))


def may(cluster: Cluster, verb: str, what: str, namespace: str) -> bool:
    """Return whether the operator may do something in a namespace, or in the cluster."""
    made = cluster.get("deployment", f"{NAME}-operator", namespace=NAMESPACE)["spec"]["template"]["spec"]
    user = f"system:serviceaccount:{NAMESPACE}:{made['serviceAccountName']}"
    where = ["-n", namespace] if namespace else []
    return cluster.kubectl("auth", "can-i", verb, what, f"--as={user}", *where, check=False).stdout.strip() == "yes"
