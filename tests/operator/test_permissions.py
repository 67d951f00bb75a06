"""The operator's role: everything that it does is allowed, and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import yaml
from control_plane import ControlPlane
from faults import Call, proxy
from operated import Cluster, Operator, installed, optional_kinds, running, until
from queue_objects import make_status

from ballast_operator.permissions import CLUSTER, NAMESPACES, OWN_NAMESPACE, Permission, rules
from ballast_operator.process import PART_ENDED
from ballast_queue.redis_store import Queue
from ballast_queue.status import ClassLoad

pytestmark = pytest.mark.envtest

VERBS = {"POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
PATH = re.compile(r"^/(?:api|apis/(?P<group>[^/]+))/[^/]+(?:/namespaces/[^/]+)?/(?P<plural>[a-z]+)(?P<rest>/.*)?$")


def used(calls: list[Call]) -> set[tuple[str, str, str]]:
    """Group, resource and verb of every call."""
    found = set()
    for call in calls:
        match = PATH.match(call.path)
        if match is None:
            continue  # discovery
        parts = (match["rest"] or "").strip("/").split("/")
        resource = match["plural"] + (f"/{parts[1]}" if len(parts) > 1 else "")
        is_one = bool(parts[0])
        read = "watch" if "watch" in call.query else "get" if is_one else "list"
        verb = read if call.method == "GET" else VERBS[call.method]
        found.add((match["group"] or "", resource, verb))
        if call.method == "PATCH" and "force" in call.query and len(parts) == 1:
            found.add((match["group"] or "", resource, "create"))  # what apply needs where nothing is there
    return found


def declared(permissions: tuple[Permission, ...]) -> set[tuple[str, str, str]]:
    return {(p.group, resource, verb) for p in permissions for resource in p.resources for verb in p.verbs}


@pytest.fixture
def monitoring(controllers: ControlPlane) -> Iterator[None]:
    """The prometheus-operator's kinds, for this test alone."""
    with installed(controllers, optional_kinds()):
        yield


@pytest.mark.slow
@pytest.mark.usefixtures("monitoring")
def test_each_verb_that_is_declared_is_used_and_each_used_is_declared(
    cluster: Cluster, controllers: ControlPlane, tmp_path: Path, valkey: Any
) -> None:
    """One life of a resource under the declared role: without any of its verbs, this would end elsewhere."""
    plane = controllers
    token = service_account(plane, cluster.namespace)
    environment = cluster.own_redis(url=valkey.url) | {
        "BALLAST_AUDIT_SECONDS": "2",
        "BALLAST_GCS_REDIS_IMAGE": "valkey:1",
    }
    with proxy(plane) as between, running(between.kubeconfig_of(token), tmp_path, **environment) as operator:
        live(cluster, valkey)
        until(lambda: ("coordination.k8s.io", "leases", "update") in used(between.calls), said="the lease renewed")
        # The namespace of another test may still be terminating: nothing can be created in it.
        lines = [line for line in operator.text().lower().splitlines() if "it is being terminated" not in line]
        assert not [line for line in lines if "forbidden" in line]
        found = used(between.calls)

    assert found == declared(CLUSTER) | declared(OWN_NAMESPACE)


@pytest.mark.slow
def test_an_operator_of_some_namespaces_needs_roles_in_them_only(
    cluster: Cluster, controllers: ControlPlane, tmp_path: Path, valkey: Any
) -> None:
    plane, other = controllers, f"{cluster.namespace}-other"
    plane.kubectl("create", "namespace", other)
    elsewhere = Cluster(plane, other)
    token = service_account(plane, cluster.namespace, permissions=NAMESPACES, clusterwide=False)
    environment = cluster.own_redis(url=valkey.url)
    environment |= {"BALLAST_WATCH_NAMESPACES": f" {cluster.namespace},", "BALLAST_AUDIT_SECONDS": "1"}
    elsewhere.make()
    with proxy(plane) as between, running(between.kubeconfig_of(token), tmp_path, **environment) as operator:
        cluster.make()
        until(lambda: cluster.get("deployments", "llm") and cluster.get("secrets", "llm-ballast-redis"))
        cluster.says("Degraded", "False")
        cluster.delete("deployments", "llm")
        until(lambda: cluster.get("deployments", "llm"), said="it watches")
        audited = len([call for call in between.calls if call.path == cluster.path("inferencedeployments")])
        until(
            lambda: len([c for c in between.calls if c.path == cluster.path("inferencedeployments")]) > audited,
            said="an audit",
        )
        assert "forbidden" not in operator.text().lower()
        refused = [name for name in operator.metrics() if 'code="403"' in name]

        assert refused == []
        assert not [call for call in between.calls if other in call.path]
        assert used(between.calls) <= declared(NAMESPACES) | declared(OWN_NAMESPACE)
    assert not elsewhere.resource().get("status")
    plane.kubectl("delete", "namespace", other, "--wait=false")


@pytest.mark.slow
def test_a_namespace_that_is_gone_does_not_stop_the_operator_in_another(
    cluster: Cluster, controllers: ControlPlane, tmp_path: Path
) -> None:
    """The Role goes with the namespace. With a new Role, the process ends, and its next start watches the namespace."""
    gone = f"{cluster.namespace}-gone"
    token = service_account(controllers, cluster.namespace, permissions=NAMESPACES, clusterwide=False)
    environment = {"BALLAST_NAMESPACE": cluster.namespace, "BALLAST_AUDIT_SECONDS": "1"}
    environment |= {"BALLAST_WATCH_NAMESPACES": f"{gone},{cluster.namespace}"}
    kubeconfig = controllers.kubeconfig_of(token, controllers.url)
    operator = Operator(kubeconfig, tmp_path, environment)
    operator.start()
    try:
        cluster.make()
        until(lambda: cluster.get("deployments", "llm"))
        ready = httpx.get(f"http://127.0.0.1:{operator.port}/readyz")
        assert (ready.status_code, gone in ready.text) == (503, True)
        assert operator.is_running

        controllers.kubectl("create", "namespace", gone)
        metadata, api = {"name": "operator", "namespace": gone}, "rbac.authorization.k8s.io"
        role = {"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules(NAMESPACES)}
        accounts = f"--group=system:serviceaccounts:{cluster.namespace}"
        controllers.kubectl("apply", "-f", "-", manifest=yaml.safe_dump(role))
        controllers.kubectl("create", "rolebinding", "operator", "-n", gone, "--role=operator", accounts)
        assert operator.process.wait(30) == PART_ENDED
    finally:
        operator.kill()
        controllers.kubectl("delete", "namespace", gone, "--wait=false", "--ignore-not-found")


def live(cluster: Cluster, valkey: Any) -> None:
    """Everything that the operator ever writes: children, a copy, status, scale, touches, deletions, events."""
    cluster.make(scaling={"maxReplicas": 3, "scaleUpSeconds": 0, "headroomPercent": 0})
    pod = until(cluster.pods)[0]
    cluster.make_ready(pod["metadata"]["name"], "10.9.9.9")
    queue = Queue.connect(valkey.url, f"{cluster.namespace}/llm")
    load = {"slots": 4, "batch_ceiling": 4, "online": ClassLoad(running=8)}
    queue.workers.publish(make_status(address="http://10.9.9.9:8000", at=queue.now(), **load), 60)
    until(lambda: cluster.resource()["spec"]["replicas"] == 2)
    until(lambda: cluster.get("secrets", "llm-ballast-redis"))
    before = cluster.get("secrets", "llm-ballast-redis")["data"]
    cluster.patch("secrets", "own", {"stringData": {"url": f"{valkey.url}/0"}})
    until(lambda: cluster.get("secrets", "llm-ballast-redis")["data"] != before, said="the address follows")
    until(lambda: cluster.get("prometheusrules", "llm") and cluster.get("servicemonitors", "llm"))
    off = {"monitoring": {"serviceMonitor": False, "prometheusRule": False}, "network": {"policy": False}}
    cluster.patch("inferencedeployments", "llm", {"spec": off | {"slo": {"ttftMilliseconds": 9}}})
    until(lambda: not cluster.get("prometheusrules", "llm") and not cluster.get("networkpolicies", "llm"))
    until(lambda: any("ballast.dev/config-hash" in p["metadata"]["annotations"] for p in cluster.pods()))
    on_ray = {"runtime": {"ray": {}}, "template": {"image": "ray:1"}, "scaling": None}
    cluster.patch("inferencedeployments", "llm", {"spec": on_ray})
    until(lambda: cluster.get("rayservices", "llm"))
    uid = cluster.get("rayservices", "llm")["metadata"]["uid"]
    owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": "llm", "uid": uid}
    cluster.make_ray_cluster(owner, replicas=0)
    active = {"rayClusterName": "llm-1", "rayClusterStatus": {"desiredWorkerReplicas": 0}}
    cluster.patch("rayservices", "llm", {"status": {"activeServiceStatus": active}})
    until(lambda: "Ray cluster llm-1 to" in json.dumps(cluster.list("events")), said="the Ray cluster resized")
    cluster.patch("inferencedeployments", "llm", {"spec": {"replicas": 0}})
    until(lambda: not cluster.get("rayservices", "llm") and not cluster.get("deployments", "llm"))
    cluster.patch("inferencedeployments", "llm", {"spec": {"runtime": None}})
    until(lambda: not cluster.get("statefulsets", "llm-ballast-gcs"))


def service_account(
    plane: ControlPlane, namespace: str, *, permissions: tuple[Permission, ...] = CLUSTER, clusterwide: bool = True
) -> str:
    """A token with the operator's roles and nothing else."""
    name = f"operator-{uuid4().hex[:6]}"
    subject = [{"kind": "ServiceAccount", "name": name, "namespace": namespace}]
    metadata = {"name": name, "namespace": namespace}
    api = "rbac.authorization.k8s.io"
    objects = [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata},
    ]
    own = OWN_NAMESPACE if clusterwide else (*OWN_NAMESPACE, *permissions)
    objects.append({"apiVersion": f"{api}/v1", "kind": "Role", "metadata": metadata, "rules": rules(own)})
    bindings = [("RoleBinding", "Role")]
    if clusterwide:
        about = {"apiVersion": f"{api}/v1", "kind": "ClusterRole", "metadata": {"name": name}}
        objects.append(about | {"rules": rules(permissions)})
        bindings.append(("ClusterRoleBinding", "ClusterRole"))
    for kind, role in bindings:
        binding = {"apiVersion": f"{api}/v1", "kind": kind, "metadata": metadata, "subjects": subject}
        objects.append(binding | {"roleRef": {"apiGroup": api, "kind": role, "name": name}})
    plane.kubectl("apply", "-f", "-", manifest=yaml.safe_dump_all(objects))
    return plane.kubectl("create", "token", name, "-n", namespace).stdout.strip()
