"""Reads an `InferenceDeployment`, from a file or from the cluster, and checks it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from ballast_api.errors import InvalidConfig
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import KIND
from ballast_cli.cluster import resource
from ballast_cli.errors import Usage


def from_file(path: Path, namespace: str | None) -> tuple[InferenceDeployment, ...]:
    """Every `InferenceDeployment` of a YAML file; `-` in place of a path is standard input.

    Raises:
        Usage: the file cannot be read, has no resource, or has an invalid one.
    """
    source = "standard input" if str(path) == "-" else str(path)
    if str(path) == "-" and sys.stdin is None:
        raise Usage("Standard input is closed. Name a file, or pass the resource on standard input.")
    try:
        text = sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except OSError as error:
        raise Usage(f"{source} cannot be read ({error.strerror}). Name a file, or - for standard input.") from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # a ValueError is a date that no calendar has
        raise Usage(f"{source} cannot be read as YAML: {error}") from error
    found = [each for each in documents if isinstance(each, dict) and each.get("kind") == KIND]
    if not found:
        kinds = ", ".join(_kind(each) for each in documents)
        raise Usage(f"{source} holds {kinds or 'nothing'}, expected at least one {KIND}.")
    return tuple(_read(each, source, namespace) for each in found)


def from_cluster(name: str, namespace: str | None, context: str | None = None) -> InferenceDeployment:
    """The resource as the API server has it; see `cluster.resource`."""
    return _read(resource(name, namespace, context), f"{KIND} {name}", None, is_stored=True)


def _kind(document: object) -> str:
    if not isinstance(document, dict):
        return "no object"
    return str(document.get("kind", "an object without kind"))


def _read(
    manifest: dict[str, Any], source: str, namespace: str | None, *, is_stored: bool = False
) -> InferenceDeployment:
    if namespace:
        manifest = manifest | {"metadata": manifest.get("metadata", {}) | {"namespace": namespace}}
    try:
        return InferenceDeployment.read(manifest, source, is_stored=is_stored)
    except InvalidConfig as error:
        raise Usage(str(error)) from error
