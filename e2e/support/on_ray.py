"""Resources of other tests that run on Ray, and the objects that KubeRay makes for them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from children import objects
from cluster import Cluster, until
from images import RAY_WORKER

START_SECONDS = 420
"""A head, then its workers, on few processors."""
KUBERAY = "app.kubernetes.io/component=kuberay-operator"
OF_RAY = "rayservices,rayclusters,statefulsets,jobs,pvc"


def on_ray(manifest: dict[str, Any], node: str) -> dict[str, Any]:
    """Return a resource that runs on Ray, with its head on a node that no test stops."""
    found = copy.deepcopy(manifest)
    found["spec"]["runtime"] = {"ray": {"head": {"nodeSelector": {"kubernetes.io/hostname": node}}}}
    found["spec"]["template"]["image"] = RAY_WORKER.name
    return found


def started(cluster: Cluster, manifest: dict[str, Any], namespace: str) -> Iterator[str]:
    """Run a resource until the end of the file. KubeRay cannot clean up in a namespace that is being deleted."""
    name, replicas = manifest["metadata"]["name"], manifest["spec"]["replicas"]
    cluster.start(manifest, count=replicas, namespace=namespace, seconds=START_SECONDS)
    yield name
    cluster.kubectl("delete", "infd", name, "-n", namespace, "--ignore-not-found", "--timeout=60s", seconds=70)
    wait_gone(cluster, name, namespace)


@contextmanager
def kuberay_on(cluster: Cluster, node: str) -> Iterator[None]:
    """Keep KubeRay, which has one pod, on a node that no test stops."""
    (found,) = cluster.get("deployments", selector=KUBERAY)
    name, namespace = found["metadata"]["name"], found["metadata"]["namespace"]

    def place(at: str | None) -> None:
        pod = {"spec": {"nodeSelector": {"kubernetes.io/hostname": at}}}
        words = ("patch", "deployment", name, "-n", namespace, "-p", json.dumps({"spec": {"template": pod}}))
        cluster.kubectl(*words)
        cluster.kubectl("rollout", "status", f"deployment/{name}", "-n", namespace, "--timeout=120s", seconds=130)

    place(node)
    try:
        yield
    finally:
        place(None)


def wait_gone(cluster: Cluster, name: str, namespace: str) -> None:
    """Wait until no object of a deleted resource is left, also none that KubeRay made."""

    def left() -> list[str]:
        found = [*objects(cluster, namespace), *cluster.get(OF_RAY, namespace=namespace)]
        return [f"{each['kind']} {each['metadata']['name']}" for each in found if name in each["metadata"]["name"]]

    until(lambda: not left(), seconds=360, said=f"nothing of {name} is left")
