"""The cluster as a user at a terminal sees it: kubectl, helm, and waiting with a limit."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, TypeVar

import yaml
from programs import run
from providers import Provider

INFD = "inferencedeployments.ballast.dev"
Found = TypeVar("Found")
CONDITIONS = (
    "{range .items[*]}{.metadata.namespace}/{.metadata.name}"
    "{range .status.conditions[*]}\n  {.type}={.status} {.reason}: {.message}{end}\n{end}"
)
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}


def until(what: Callable[[], Found], *, seconds: float, said: str, pause: float = 0.5) -> Found:
    """Wait until `what` returns a true value, and return that value. Fail after the limit."""
    end = time.monotonic() + seconds
    while True:
        found = what()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"not within {seconds:g} s: {said}; last found {found!r}")
        time.sleep(pause)


def tiny(name: str, *, cpu: str = "250m", memory: str = "1Gi", **spec: Any) -> dict[str, Any]:
    """Return an InferenceDeployment with the small model on the CPU. `spec` adds fields, or replaces them."""
    usual = {
        "model": {"uri": "file:///opt/ballast/models/ballast-tiny"},
        "gpu": {"count": 0},
        "template": {"resources": {"requests": {"cpu": cpu, "memory": memory}}},
    }
    about = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "metadata": {"name": name}}
    return about | {"spec": usual | spec}


def restricted_pod(
    name: str, container: dict[str, Any], *, mounts: dict[str, dict[str, Any]], user: dict[str, int] | None = None
) -> dict[str, Any]:
    """Return a pod with one container that restricted namespaces admit. `mounts` has the volume at each path."""
    volumes = {path: path.rpartition("/")[2] for path in mounts}
    usual = {
        "name": name,
        "imagePullPolicy": "IfNotPresent",
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [{"name": volume, "mountPath": path} for path, volume in volumes.items()],
    }
    spec = {
        "terminationGracePeriodSeconds": 1,
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}, **(user or {})},
        "containers": [usual | container],
        "volumes": [{"name": volumes[path], **volume} for path, volume in mounts.items()],
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": {"app": name}}, "spec": spec}


UNPRIVILEGED = {"runAsUser": 65534, "fsGroup": 65534}
"""The user of a container whose image runs as root."""


@dataclass
class Cluster:
    """A running cluster."""

    provider: Provider
    folder: Path
    """For helm's own files, and for manifests."""

    def kubectl(
        self, *arguments: str | Path, stdin: str | None = None, check: bool = True, seconds: float = 60
    ) -> CompletedProcess[str]:
        """Call kubectl as the administrator."""
        program, kubeconfig = self.provider.program("kubectl"), self.provider.kubeconfig
        return run(program, "--kubeconfig", kubeconfig, *arguments, stdin=stdin, check=check, seconds=seconds)

    def helm(self, *arguments: str | Path, check: bool = True, seconds: float = 300) -> CompletedProcess[str]:
        """Run helm with its own folder, without the user's settings."""
        homes = {name: str(self.folder) for name in ("HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME")}
        env = {**homes, "KUBECONFIG": str(self.provider.kubeconfig)}
        return run(self.provider.program("helm"), *arguments, check=check, seconds=seconds, env=env)

    def get(self, kind: str, name: str = "", *, namespace: str = "", selector: str = "") -> Any:
        """Return an object, or the items of a list; None if there is no such object."""
        words = ["get", kind, *([name] if name else []), "-o", "json", "--ignore-not-found"]
        words += ["-n", namespace] if namespace else ["-A"] if not name else []
        words += ["-l", selector] if selector else []
        text = self.kubectl(*words).stdout
        if name:
            return json.loads(text) if text.strip() else None
        return json.loads(text)["items"] if text.strip() else []

    def apply(self, *manifests: dict[str, Any] | Path, namespace: str) -> None:
        """Apply manifests unchanged: a text, or the file at a path."""
        for each in manifests:
            if isinstance(each, Path):
                self.kubectl("apply", "-n", namespace, "-f", each)
            else:
                self.kubectl("apply", "-n", namespace, "-f", "-", stdin=yaml.safe_dump(each))

    def make_namespace(self, name: str) -> None:
        """Create a namespace that admits only restricted pods."""
        manifest = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(manifest))

    def drop_namespace(self, name: str) -> None:
        """Delete a namespace and wait until it is gone. An object that its finalizer holds makes this fail."""
        self.kubectl("delete", INFD, "--all", "-n", name, "--timeout=60s", seconds=70)
        self.kubectl("delete", "namespace", name, "--ignore-not-found", "--timeout=120s", seconds=130)

    def condition(self, name: str, kind: str, *, namespace: str) -> dict[str, Any]:
        """Return a condition of an InferenceDeployment; empty if it has none."""
        found = self.get(INFD, name, namespace=namespace) or {}
        entries = found.get("status", {}).get("conditions", ())
        return next((entry for entry in entries if entry["type"] == kind), {})

    def wait_degraded(self, name: str, reasons: str, *, namespace: str, seconds: float = 120) -> dict[str, Any]:
        """Wait until the condition `Degraded` is True for a reason that matches, and return it."""

        def degraded() -> dict[str, Any]:
            found = self.condition(name, "Degraded", namespace=namespace)
            return found if found.get("status") == "True" and re.fullmatch(reasons, found["reason"]) else {}

        return until(degraded, seconds=seconds, said=f"{namespace}/{name} is Degraded with {reasons}")

    def wait_ready(self, name: str, *, namespace: str, seconds: float = 180) -> None:
        """Wait for `Ready` with the command of the documentation."""
        self.kubectl(
            "wait", f"infd/{name}", "-n", namespace, "--for=condition=Ready", f"--timeout={seconds:g}s",
            seconds=seconds + 10,
        )  # fmt: skip

    def start(
        self, manifest: dict[str, Any], *, namespace: str, count: int = 1, seconds: float = 180
    ) -> list[dict[str, Any]]:
        """Apply a resource, and wait until it is ready. Return its worker pods, of which `count` serve."""
        name = manifest["metadata"]["name"]
        self.apply(manifest, namespace=namespace)
        self.wait_ready(name, namespace=namespace, seconds=seconds)
        return self.wait_pods(name, count, namespace=namespace, seconds=seconds)

    def start_pods(self, *manifests: dict[str, Any], namespace: str) -> None:
        """Create a namespace, and pods with other objects in it again. Wait until the pods are ready."""
        names = [f"pod/{each['metadata']['name']}" for each in manifests if each["kind"] == "Pod"]
        self.make_namespace(namespace)
        self.kubectl("delete", *names, "-n", namespace, "--ignore-not-found", "--wait")
        self.apply(*manifests, namespace=namespace)
        self.kubectl("wait", *names, "-n", namespace, "--for=condition=Ready", "--timeout=60s", seconds=70)

    @contextmanager
    def addon(self, name: str, crd: str) -> Iterator[None]:
        """Install the operator of another project while the block runs, unless the cluster has its kind already."""
        had = self.get("crd", crd) is not None
        if not had:
            self.provider.install_addon(name)
        yield
        if not had:
            self.provider.remove_addon(name)

    def pods(self, name: str, *, namespace: str) -> list[dict[str, Any]]:
        """Return the worker pods of a resource that are not in deletion, sorted by name."""
        found = self.get("pods", namespace=namespace, selector=f"app.kubernetes.io/instance={name}")
        live = [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]
        return sorted(live, key=lambda pod: str(pod["metadata"]["name"]))

    def ready_pods(self, name: str, *, namespace: str) -> list[dict[str, Any]]:
        """Return the worker pods that serve."""
        return [pod for pod in self.pods(name, namespace=namespace) if is_ready(pod)]

    def wait_pods(self, name: str, count: int, *, namespace: str, seconds: float = 180) -> list[dict[str, Any]]:
        """Wait until exactly `count` pods serve."""

        def serving() -> list[dict[str, Any]]:
            live, ready = self.pods(name, namespace=namespace), self.ready_pods(name, namespace=namespace)
            return ready if len(ready) == len(live) == count else []

        return until(serving, seconds=seconds, said=f"{count} pods of {namespace}/{name} serve")

    def patch(self, name: str, spec: dict[str, Any], *, namespace: str) -> None:
        """Change the spec of an InferenceDeployment."""
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", f"infd/{name}", "-n", namespace, "--type=merge", "-p", patch)

    def hot_patch(self, name: str, spec: dict[str, Any], *, namespace: str) -> None:
        """Change hot fields, and wait until each worker reports the new configuration."""
        self.patch(name, spec, namespace=namespace)
        wanted = f"generation {self.get(INFD, name, namespace=namespace)['metadata']['generation']}"

        def is_applied() -> bool:
            found = self.condition(name, "ConfigApplied", namespace=namespace)
            return found.get("status") == "True" and found.get("message", "").endswith(wanted)

        until(is_applied, seconds=90, said=f"all workers of {name} have {wanted}")

    def kill(self, pod: str, *, namespace: str) -> None:
        """Kill the first process of a pod's only container with SIGKILL."""
        (container,) = self.get("pod", pod, namespace=namespace)["status"]["containerStatuses"]
        self.provider.kill(container["containerID"].removeprefix("containerd://"))

    def wait_restarted(self, pod: str, count: int, *, namespace: str, seconds: float = 90) -> None:
        """Wait until the container of a pod has restarted `count` times."""

        def restarts() -> bool:
            (container,) = self.get("pod", pod, namespace=namespace)["status"]["containerStatuses"]
            return int(container["restartCount"]) >= count

        until(restarts, seconds=seconds, said=f"pod {pod} was restarted {count} times")

    def exec(
        self, pod: str, *command: str, namespace: str, stdin: str | None = None, seconds: float = 60, check: bool = True
    ) -> CompletedProcess[str]:
        """Run a command in a pod."""
        flags = ["-i"] if stdin is not None else []
        words = ["exec", *flags, "-n", namespace, pod, "--", *command]
        return self.kubectl(*words, stdin=stdin, seconds=seconds, check=check)

    def metrics(self, pod: dict[str, Any]) -> dict[str, float]:
        """Return the samples of a worker by name with labels, read through the API server."""
        meta = pod["metadata"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}:8000/proxy/metrics"
        text = self.kubectl("get", "--raw", path).stdout
        lines = (line.rpartition(" ") for line in text.splitlines() if line and not line.startswith("#"))
        return {name: float(value) for name, _, value in lines}

    def leases(self, pod: dict[str, Any]) -> float:
        """Return the number of leases that a worker reports."""
        return self.metrics(pod)["ballast_leases"]

    def redis_up(self, pods: list[dict[str, Any]]) -> set[float]:
        """Return the state of Redis that workers report."""
        return {self.metrics(pod)["ballast_redis_up"] for pod in pods}

    # The output of a failed test

    def report(self) -> str:
        """Return the events, resources, pods and the ends of the logs."""
        parts = []
        for title, words in (
            ("pods", ("get", "pods", "-A", "-o", "wide")),
            ("resources", ("get", INFD, "-A", "-o", "wide")),
            ("conditions", ("get", INFD, "-A", "-o", f"jsonpath={CONDITIONS}")),
            ("claims", ("get", "pvc,pv", "-A")),
            ("events", ("get", "events", "-A", "--sort-by=.lastTimestamp")),
        ):  # fmt: skip
            said = self.kubectl(*words, check=False)
            parts.append(f"=== {title}\n{(said.stdout + said.stderr)[-6000:]}")
        with suppress(AssertionError, KeyError, TypeError):
            parts += [self._logs(pod) for pod in self.get("pods") if pod["metadata"]["namespace"] != "kube-system"]
        return "\n".join(parts)

    def _logs(self, pod: dict[str, Any]) -> str:
        namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
        lines = []
        for previous in ([], ["--previous"]):
            words = ["logs", name, "-n", namespace, "--all-containers", "--tail=40", *previous]
            said = self.kubectl(*words, check=False)
            if said.stdout:
                lines.append(f"=== log {namespace}/{name} {' '.join(previous)}\n{said.stdout[-6000:]}")
        return "\n".join(lines)


def is_ready(pod: dict[str, Any]) -> bool:
    """Return whether a pod is ready for requests."""
    conditions = pod.get("status", {}).get("conditions", ())
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in conditions)


def keep_up() -> bool:
    """Return whether BALLAST_E2E_KEEP asks to keep the cluster after the run."""
    return bool(os.environ.get("BALLAST_E2E_KEEP"))
