"""A real etcd and kube-apiserver on loopback, from the folder that `KUBEBUILDER_ASSETS` names, as envtest has it."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import yaml
from ports import free_port

PEM = Path(__file__).parent / "loopback.pem"
"""Key and self-signed certificate of 127.0.0.1: serves TLS, signs service accounts, and is its own authority."""
TOKEN = "test-admin"
START_SECONDS = 60


def assets() -> Path:
    """Where the programs lie."""
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        raise RuntimeError("KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver: see `make envtest`")
    return Path(folder).resolve()


@dataclass
class ControlPlane:
    """What runs, where it answers, and how to stop and start its parts."""

    folder: Path
    port: int = field(default_factory=free_port)
    etcd_port: int = field(default_factory=free_port)
    peer_port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def kubeconfig(self) -> Path:
        """A file for an administrator; of a user with fewer rights, see `kubeconfig_of`."""
        return self.kubeconfig_of(TOKEN)

    def kubeconfig_of(self, token: str, server: str | None = None) -> Path:
        path = self.folder / f"kubeconfig-{token[-12:]}-{(server or self.url).rsplit(':', 1)[-1]}"
        cluster = {"server": server or self.url, "certificate-authority": str(PEM)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": "default"}}],
            "current-context": "test",
        }
        text = yaml.safe_dump(content)
        if not path.exists() or path.read_text() != text:  # whoever reads it now must not find half of it
            path.write_text(text)
        return path

    def client(self, token: str = TOKEN) -> httpx.Client:
        """HTTP with the rights of `token`; give paths such as `/api/v1/namespaces`."""
        context = ssl.create_default_context(cafile=str(PEM))
        return httpx.Client(base_url=self.url, verify=context, headers={"Authorization": f"Bearer {token}"}, timeout=30)

    @cached_property
    def http(self) -> httpx.Client:
        """One client of the administrator for the life of this control plane."""
        return self.client()

    def run(self, name: str, *arguments: str) -> None:
        """Start one program; its output goes to a file named for it."""
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [assets() / name, *arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )

    def kill(self, name: str) -> None:
        """Stop one program at once."""
        process = self.processes.pop(name)
        process.kill()
        process.wait()

    def start_etcd(self) -> None:
        client, peer = (f"http://127.0.0.1:{port}" for port in (self.etcd_port, self.peer_port))
        self.run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
            "--log-level=error",
        )

    def start_apiserver(self, *more: str) -> None:
        """Start it and wait until it is ready."""
        tokens = self.folder / "tokens.csv"
        if not tokens.exists():
            tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
        self.run(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{self.etcd_port}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder}",
            f"--tls-cert-file={PEM}",
            f"--tls-private-key-file={PEM}",
            f"--token-auth-file={tokens}",
            f"--service-account-key-file={PEM}",
            f"--service-account-signing-key-file={PEM}",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--authorization-mode=RBAC",
            "--disable-admission-plugins=ServiceAccount",
            "--v=0",
            *more,
        )
        self.wait_until_ready("kube-apiserver", "/readyz")

    def start_controller_manager(self) -> None:
        """Garbage collection, deployments, replica sets and the like."""
        port = free_port()
        self.run(
            "kube-controller-manager",
            f"--kubeconfig={self.kubeconfig}",
            f"--secure-port={port}",
            "--bind-address=127.0.0.1",
            f"--cert-dir={self.folder / 'controller-manager'}",
            "--leader-elect=false",
            f"--service-account-private-key-file={PEM}",
            "--use-service-account-credentials=false",
            "--horizontal-pod-autoscaler-sync-period=1s",
            "--controllers=*,-nodeipam,-cloud-node-lifecycle,-node-route-controller,-service-lb-controller",
        )

    def wait_until_ready(self, name: str, path: str) -> None:
        until = time.monotonic() + START_SECONDS
        with self.client() as client:
            while True:
                try:
                    if client.get(path).status_code == httpx.codes.OK:
                        return
                except httpx.TransportError:
                    pass
                if self.processes[name].poll() is not None or time.monotonic() > until:
                    tail = (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{name} is not ready:\n{tail}")
                time.sleep(0.05)  # there is nothing to wait on but the port

    def kubectl(self, *arguments: str, manifest: Any = None, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run kubectl as administrator; `manifest` (objects or YAML) goes to its input."""
        text = manifest if isinstance(manifest, str) or manifest is None else json.dumps(manifest)
        return subprocess.run(
            [assets() / "kubectl", "--kubeconfig", self.kubeconfig, *arguments],
            input=text,
            capture_output=True,
            text=True,
            check=check,
        )

    def stop(self) -> None:
        if "http" in self.__dict__:
            self.http.close()
        for name in reversed(list(self.processes)):
            self.kill(name)


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Start etcd and an API server, and stop them with whatever was started beside them."""
    plane = ControlPlane(folder)
    try:
        plane.start_etcd()
        plane.start_apiserver()
        yield plane
    finally:
        plane.stop()
