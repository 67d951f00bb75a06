"""The previous version: its chart and its images, built from git."""

from __future__ import annotations

import os
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from subprocess import run as run_raw

from cluster import Cluster
from programs import ROOT, run

FIRST = "94fc9d9ff1b1"
"""While there is no tag: the last commit before TLS, users in Redis, and Secrets with labels."""


@dataclass(frozen=True)
class Previous:
    """The chart and the images before the upgrade."""

    commit: str
    package: Path
    values: tuple[str, ...]
    """Of helm: images of that version have its commit for a tag."""
    worker: str
    """The worker's image."""


def previous(cluster: Cluster) -> Previous:
    """Build the previous version, or the commit or tag BALLAST_E2E_PREVIOUS."""
    commit = run("git", "rev-parse", f"{_chosen()}^{{commit}}").stdout.strip()[:12]
    folder = cluster.folder / f"previous-{commit}"
    packed = run_raw(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True, timeout=60).stdout
    with tarfile.open(fileobj=BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    for part in ("operator", "worker"):
        cluster.provider.bring(folder, f"{part}/Dockerfile", f"ballast-{part}:{commit}")
    cluster.helm("package", folder / "helm" / "ballast", "--destination", folder / "dist")
    (package,) = (folder / "dist").glob("ballast-*.tgz")
    values = tuple(f"--set-string=image.{part}.tag={commit}" for part in ("operator", "worker"))
    return Previous(commit, package, values, f"ballast-worker:{commit}")


def _chosen() -> str:
    named = os.environ.get("BALLAST_E2E_PREVIOUS")
    if named:
        return named
    tag = run("git", "describe", "--tags", "--abbrev=0", "HEAD^", check=False).stdout.strip()
    return tag or FIRST
