"""The chart as a user installs it: from its package."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster import Cluster
from images import Image
from tutorial import run_steps

NAMESPACE = "ballast"
NAME = "ballast"


def holder(cluster: Cluster) -> str:
    """Return the pod of the active operator."""
    found = cluster.get("lease", f"{NAME}-operator", namespace=NAMESPACE)
    return str(found["spec"].get("holderIdentity") or "")


@dataclass
class Release:
    """The release that `helm install` created."""

    cluster: Cluster
    package: Path
    """The chart's .tgz."""
    images: dict[Image, str]
    """Ids of the images that were built for it."""
    said: str
    """The output of helm."""

    @property
    def redis_url(self) -> str:
        return self.secret(f"{NAME}-redis", "url")

    @property
    def redis_password(self) -> str:
        return self.secret(f"{NAME}-redis", "password")

    @property
    def redis_ca(self) -> str:
        """Return the certificates of authorities that sign Valkey's; empty for a release without TLS."""
        return self.secret(f"{NAME}-valkey-tls", "ca.crt") if self.redis_url.startswith("rediss://") else ""

    def secret(self, name: str, key: str) -> str:
        """Return a value of a Secret of the release."""
        secret = self.cluster.get("secret", name, namespace=NAMESPACE)
        assert secret is not None, f"no Secret {name}: the release is not there"
        return base64.b64decode(secret["data"][key]).decode()

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Return the pods of a component of the release: `operator` or `queue`."""
        found: list[dict[str, Any]] = self.cluster.get(
            "pods", namespace=NAMESPACE, selector=f"app.kubernetes.io/component={component}"
        )
        return found

    def check_rights(self) -> None:
        """Assert that the API server refused nothing to an operator, by its log and by the log before a restart."""
        lines = []
        for pod in self.pods("operator"):
            for previous in ([], ["--previous"]):
                words = ["logs", pod["metadata"]["name"], "-n", NAMESPACE, *previous]
                lines += self.cluster.kubectl(*words, check=False).stdout.splitlines()
        refused = {found.replace("\\", "") for line in lines for found in re.findall(r"cannot \w+ resource \S+", line)}
        assert not refused, f"the API server refused the operator: {sorted(refused)}"

    def valkey(
        self, *command: str, user: str = "", password: str = "", check: bool = True, stdin: str | None = None
    ) -> str:
        """Run valkey-cli in Valkey's pod over the Service, as the given or the default user of Redis."""
        words = ["valkey-cli", "-h", f"{NAME}-valkey.{NAMESPACE}.svc", "--no-auth-warning", "-e"]
        words += ["-p", "6380", "--tls", "--cacert", "/etc/valkey-tls/ca.crt"] if self.redis_ca else []
        words += ["--user", user] if user else []
        words += ["-a", password or self.redis_password, *command]
        done = self.cluster.exec(f"{NAME}-valkey-0", *words, namespace=NAMESPACE, check=check, stdin=stdin)
        return (done.stdout + done.stderr).strip()


def install(cluster: Cluster, images: dict[Image, str]) -> Release:
    """Install the chart with the commands of the tutorial, in a namespace that admits only restricted pods.

    If there are several nodes, nothing of it runs on the first one, so that a test can stop the node of each part.
    """
    remove(cluster)
    cluster.make_namespace(NAMESPACE)
    first, *others = cluster.provider.nodes()
    if others:
        cluster.kubectl("cordon", first)
    try:
        said = run_steps(cluster, "install", folder=cluster.folder, seconds=240)["install"].said
    finally:
        cluster.kubectl("uncordon", first)
    (package,) = (cluster.folder / "dist").glob("ballast-*.tgz")
    return Release(cluster, package, images, said)


def remove(cluster: Cluster) -> None:
    """Remove everything that an earlier run left."""
    cluster.helm("uninstall", NAME, "-n", NAMESPACE, "--ignore-not-found", "--wait", "--timeout", "2m")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", seconds=130)
    cluster.provider.renew_volumes()
