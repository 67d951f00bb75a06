"""The images of a run: those of Ballast, from the Dockerfiles that it ships, and those that only the tests need."""

from __future__ import annotations

import hashlib
import json
import tarfile
from dataclasses import dataclass
from pathlib import Path

from programs import ROOT

CONTEXT = (
    "crds",
    "operator",
    "worker",
    "pyproject.toml",
    "requirements-build.txt",
    "README.md",
    "LICENSE",
    "CHANGELOG.md",
)
CPU_ONLY = ("--build-arg", "TORCH=cpu")
"""Of earlier versions, whose worker image could have torch with CUDA."""


@dataclass(frozen=True)
class Image:
    """One image, and the Dockerfile that it is built from."""

    name: str
    dockerfile: str
    is_pulled_elsewhere: bool = False
    """It replaces a published image, which a cluster with a registry would pull."""
    needs_context: bool = True
    program: str = ""
    """In place of a Dockerfile: the only program in the image."""
    base: Image | None = None
    """Another image of the tests that this one is built on."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Return the arguments of the build."""
        return () if self.base is None else ("--build-arg", f"BASE={self.base.name}")


OPERATOR = Image("ballast-operator:0.1.0", "operator/Dockerfile")
WORKER = Image("ballast-worker:0.1.0", "worker/Dockerfile")
CLIENT = Image("ballast-e2e-client:0.1.0", "e2e/client/Dockerfile")
VALKEY = Image("valkey/valkey:8.1-alpine", "e2e/valkey/Dockerfile", is_pulled_elsewhere=True, needs_context=False)
PROMETHEUS = Image("prom/prometheus:v3.5.0", "", is_pulled_elsewhere=True, needs_context=False, program="prometheus")
ALERTMANAGER = Image(
    "prom/alertmanager:v0.28.1", "e2e/alertmanager/Dockerfile", is_pulled_elsewhere=True, needs_context=False
)
VLLM_BASE = Image("ballast-e2e-vllm-cpu:0.32.0", "e2e/vllm/Dockerfile", needs_context=False)
VLLM_WORKER = Image("ballast-worker-vllm:0.1.0", "worker/Dockerfile.vllm", base=VLLM_BASE)
RAY_WORKER = Image("ballast-worker-ray:0.1.0", "worker/Dockerfile.ray", base=WORKER)
IMAGES = (OPERATOR, WORKER, CLIENT, VALKEY, PROMETHEUS, ALERTMANAGER)


def fingerprint(image: Image) -> str:
    """Return a digest of everything that an image is built from."""
    digest = hashlib.sha256(image.name.encode())
    if image.dockerfile:
        digest.update((ROOT / image.dockerfile).read_bytes())
    paths: list[Path] = []
    if image.needs_context:
        for name in CONTEXT:
            paths += sorted((ROOT / name).rglob("*")) if (ROOT / name).is_dir() else [ROOT / name]
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts and path.name != "Dockerfile":
            digest.update(f"\0{path.relative_to(ROOT)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def id_of_archive(tar: Path) -> str:
    """Return the id of an image, as a kubelet reports it."""
    with tarfile.open(tar) as archive:
        member = archive.extractfile("manifest.json")
        assert member is not None
        config = json.load(member)[0]["Config"]
    return "sha256:" + config.removesuffix(".json").rpartition("/")[2]


def is_the_image(found: str, built: str) -> bool:
    """Return whether a pod's `imageID` is the id of the built image."""
    return found.rpartition("@")[2] == built
