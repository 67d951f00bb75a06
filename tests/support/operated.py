"""The operator as a real process, in front of a real API server with the real controllers."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import yaml
from control_plane import PEM, TOKEN, ControlPlane
from queue_objects import make_status
from waiting import until

from ballast_queue.redis_store import Queue

START_SECONDS = 120
"""The operator imports some 2,000 modules, which takes long on a machine that others use."""
INFD = "/apis/ballast.dev/v1alpha1/namespaces/{}/inferencedeployments"


@dataclass
class Operator:
    """One process of the operator."""

    kubeconfig: Path
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)
    lease: str = field(default_factory=lambda: f"lease-{uuid4().hex[:8]}")
    process: subprocess.Popen[bytes] | None = None
    port: int = 0

    @property
    def log(self) -> Path:
        return self.folder / f"operator-{id(self)}.log"

    def text(self) -> str:
        return self.log.read_text() if self.log.exists() else ""

    def start(self, *, active: bool = True) -> None:
        """Start the process, by default until it is the active one."""
        environment = {
            **os.environ,
            "KUBECONFIG": str(self.kubeconfig),
            "BALLAST_NAMESPACE": "default",
            "BALLAST_WORKER_IMAGE": "worker:1",
            "BALLAST_VLLM_WORKER_IMAGE": "vllm-worker:1",
            "BALLAST_LEASE_NAME": self.lease,
            "BALLAST_HOST": "127.0.0.1",
            "BALLAST_PORT": "0",
            "BALLAST_POLL_SECONDS": "1",
            "BALLAST_RELEASE": "tests/all",
            "BALLAST_REDIS_HOSTS": "127.0.0.1",
            "BALLAST_SHARED_QUEUES": "research/*",
            **self.environment,
        }
        before = len(self.text())
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ballast_operator"], env=environment, stdout=log, stderr=log
            )
        pattern = r"listening port=(\d+)"
        self.port = int(
            until(lambda: re.search(pattern, self.text()[before:]), said="listening", seconds=START_SECONDS)[1]
        )
        if active:
            until(lambda: " active lease" in self.text()[before:], said="active")

    @property
    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(20)

    def delete_lease(self) -> None:
        """Delete the Lease, so that the next operator claims the resources at once."""
        server = yaml.safe_load(self.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        namespace = self.environment.get("BALLAST_NAMESPACE", "default")
        url = f"{server}/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases/{self.lease}"
        context = ssl.create_default_context(cafile=str(PEM))
        with suppress(httpx.HTTPError):  # a test may have stopped the API server
            httpx.delete(url, headers={"Authorization": f"Bearer {TOKEN}"}, verify=context)

    def metrics(self) -> dict[str, float]:
        """Every sample, by its name with labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return {name: float(value) for name, _, value in (x.rpartition(" ") for x in lines if not x.startswith("#"))}

    def calls(self, *, without: tuple[str, ...] = ("Lease",)) -> float:
        """Calls to the API server so far."""
        return sum(
            value
            for name, value in self.metrics().items()
            if name.startswith("ballast_operator_api_calls_total") and not any(f'kind="{k}"' in name for k in without)
        )


@dataclass
class Cluster:
    """A namespace of the API server, as a person uses it."""

    plane: ControlPlane
    namespace: str

    def request(self, method: str, path: str, **more: Any) -> Any:
        response = self.plane.http.request(method, path, **more)
        if response.status_code == httpx.codes.NOT_FOUND:
            return None
        assert response.is_success, response.text
        return response.json()

    def path(self, kind: str, name: str = "") -> str:
        group = {
            "inferencedeployments": "apis/ballast.dev/v1alpha1",
            "deployments": "apis/apps/v1",
            "statefulsets": "apis/apps/v1",
            "poddisruptionbudgets": "apis/policy/v1",
            "networkpolicies": "apis/networking.k8s.io/v1",
            "servicemonitors": "apis/monitoring.coreos.com/v1",
            "prometheusrules": "apis/monitoring.coreos.com/v1",
            "rayservices": "apis/ray.io/v1",
            "rayclusters": "apis/ray.io/v1",
        }.get(kind, "api/v1")
        return f"/{group}/namespaces/{self.namespace}/{kind}" + (f"/{name}" if name else "")

    def get(self, kind: str, name: str) -> Any:
        return self.request("GET", self.path(kind, name))

    def list(self, kind: str) -> list[Any]:
        found = self.request("GET", self.path(kind))
        return found["items"] if found else []

    def names(self, kind: str) -> list[str]:
        return [item["metadata"]["name"] for item in self.list(kind)]

    def create(self, kind: str, body: Any) -> Any:
        return self.request("POST", self.path(kind), json=body)

    def secret(self, name: str, **texts: str) -> Any:
        """Create a Secret that resources may name."""
        metadata = {"name": name, "labels": {"ballast.dev/allow": "true"}}
        return self.create("secrets", {"metadata": metadata, "stringData": texts})

    def own_redis(self, **texts: str) -> dict[str, str]:
        """Create the Secret of the operator's own Redis. Return the environment of an operator in this namespace."""
        self.create("secrets", {"metadata": {"name": "own"}, "stringData": texts})
        return {"BALLAST_NAMESPACE": self.namespace, "BALLAST_REDIS_SECRET": "own"}

    def patch(self, kind: str, name: str, body: Any, subresource: str = "") -> Any:
        path = self.path(kind, name) + (f"/{subresource}" if subresource else "")
        return self.request("PATCH", path, json=body, headers={"Content-Type": "application/merge-patch+json"})

    def delete(self, kind: str, name: str) -> None:
        self.request("DELETE", self.path(kind, name))

    def make(self, name: str = "llm", **spec: Any) -> Any:
        """Create an InferenceDeployment of which only `spec` matters."""
        return self.create("inferencedeployments", make_resource(name, self.namespace, **spec))

    def make_ray_cluster(self, owner: Any, **group: Any) -> None:
        """Create the Ray cluster `llm-1` of an owner, with one group of pods."""
        kind = {
            "apiVersion": "ray.io/v1",
            "kind": "RayCluster",
            "metadata": {"name": "llm-1", "ownerReferences": [owner]},
        }
        self.create("rayclusters", kind | {"spec": {"workerGroupSpecs": [{"groupName": "workers"} | group]}})

    def resource(self, name: str = "llm") -> Any:
        return self.get("inferencedeployments", name)

    def condition(self, kind: str, name: str = "llm") -> dict[str, Any]:
        conditions = (self.resource(name).get("status") or {}).get("conditions") or ()
        return next((found for found in conditions if found["type"] == kind), {"status": "", "reason": ""})

    def says(self, kind: str, status: str, reason: str = "", name: str = "llm") -> dict[str, Any]:
        """Wait for a condition."""

        def found() -> dict[str, Any] | None:
            condition = self.condition(kind, name)
            right = condition["status"] == status and reason in {"", condition["reason"]}
            return condition if right else None

        try:
            return until(found, said=f"{kind} is {status} {reason}")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(self.resource(name).get('status'), indent=1)}") from None

    def pods(self) -> list[Any]:
        return [pod for pod in self.list("pods") if not pod["metadata"].get("deletionTimestamp")]

    def set_pod(self, name: str, **status: Any) -> None:
        self.patch("pods", name, {"status": status}, "status")

    def make_ready(self, name: str, ip: str = "10.0.0.1") -> None:
        """Say of a pod what a kubelet says of one that serves."""
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        conditions = [{"type": kind, "status": "True", "lastTransitionTime": now} for kind in ("Ready", "PodScheduled")]
        container = {"name": "worker", "ready": True, "restartCount": 0, "image": "worker:1", "imageID": "x"}
        container |= {"state": {"running": {"startedAt": now}}, "started": True}
        self.set_pod(
            name, phase="Running", conditions=conditions, podIP=ip, podIPs=[{"ip": ip}], containerStatuses=[container]
        )


def report(queue: Queue, ip: str) -> None:
    """Report as a worker with 8 slots does, and close the queue."""
    queue.workers.publish(make_status(address=f"http://{ip}:8000", at=queue.now(), offline_reserved=1), 60)
    queue.close()


def make_resource(name: str, namespace: str, **spec: Any) -> Any:
    model = {"uri": "file:///models/tiny"}
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "InferenceDeployment",
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": model, "gpu": {"count": 0}} | spec,
    }


def optional_kinds() -> list[Any]:
    """The kinds of the prometheus-operator and of KubeRay, as far as the operator cares for their schema."""
    found = []
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    monitoring = "monitoring.coreos.com"
    ray = [(kind, "ray.io") for kind in ("RayService", "RayCluster")]
    for kind, group in (("ServiceMonitor", monitoring), ("PrometheusRule", monitoring), *ray):
        plural = f"{kind.lower()}s"
        version = {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [version]}
        metadata = {"name": f"{plural}.{group}"}
        found.append(
            {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition"}
            | {"metadata": metadata, "spec": spec}
        )
    return found


@contextmanager
def installed(plane: ControlPlane, kinds: list[Any]) -> Iterator[None]:
    """Add kinds to the cluster for the block."""
    manifest = yaml.safe_dump_all(kinds)
    plane.kubectl("apply", "--server-side", "-f", "-", manifest=manifest)
    plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
    yield
    plane.kubectl("delete", "-f", "-", "--wait", manifest=manifest)


@contextmanager
def running(kubeconfig: Path, folder: Path, *, keeps_lease: bool = False, **environment: str) -> Iterator[Operator]:
    """An operator of its own. Without its Lease, a later one claims the resources that it leaves behind."""
    operator = Operator(kubeconfig, folder, environment)
    operator.start()
    try:
        yield operator
    except BaseException:
        print(operator.text()[-4000:])  # noqa: T201 - shown with the failure
        raise
    finally:
        if operator.is_running:
            operator.kill()
        if not keeps_lease:
            operator.delete_lease()
    assert "Traceback" not in operator.text(), operator.text()
