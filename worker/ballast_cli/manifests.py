"""Reads an `InferenceDeployment`: from a file, or from the cluster through `kubectl` and whatever it logs in with."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import CRD_NAME, KIND
from ballast_cli.errors import NotFound, Unreachable, Usage


def from_file(path: Path, namespace: str | None) -> tuple[InferenceDeployment, ...]:
    """Every `InferenceDeployment` of a YAML file; `-` in place of a path is standard input.

    Raises:
        Usage: the file cannot be read, holds none, or holds one that is not valid.
    """
    source = "standard input" if str(path) == "-" else str(path)
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise Usage(f"{source} cannot be read as YAML: {error}") from error
    found = [each for each in documents if isinstance(each, dict) and each.get("kind") == KIND]
    if not found:
        kinds = ", ".join(str(each.get("kind")) if isinstance(each, dict) else "no object" for each in documents)
        raise Usage(f"{source} holds {kinds or 'nothing'}, wanted at least one {KIND}")
    return tuple(_read(each, source, namespace) for each in found)


def from_cluster(name: str, namespace: str | None) -> InferenceDeployment:
    """The resource as the API server has it.

    Raises:
        NotFound: there is none of that name.
        Unreachable: no kubectl, or no API server that answers.
    """
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise Unreachable(
            "kubectl, through which Ballast reads clusters, is not on the PATH: install it, or give a file"
        )
    command = [kubectl, "get", CRD_NAME, name, "-o", "json", *(["-n", namespace] if namespace else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - arguments, no shell
    if done.returncode != 0:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1].removeprefix("Error from server ")
        if "(NotFound)" in said or "doesn't have a resource type" in said:
            raise NotFound(f"{said}: `kubectl get infd -A` lists what there is")
        raise Unreachable(f"kubectl cannot read {KIND} {name}: {said}")
    return _read(json.loads(done.stdout), f"{KIND} {name}", None)


def _read(manifest: dict[str, Any], source: str, namespace: str | None) -> InferenceDeployment:
    if namespace:
        manifest = manifest | {"metadata": manifest.get("metadata", {}) | {"namespace": namespace}}
    try:
        return InferenceDeployment.read(manifest, source)
    except InvalidConfig as error:
        raise Usage(str(error)) from error
