"""LoRA adapters for the small model, and the objects that bring them into a pod."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Any

from programs import ROOT
from reference import MODEL

sys.path.insert(0, str(ROOT / "tests" / "vllm" / "support"))

from small_models import make_adapter


def make(directory: Path, *, seed: int) -> Path:
    """Write a LoRA adapter whose random weights are small enough to leave words in the answers."""
    return make_adapter(directory, MODEL, seed=seed, scale=0.1)


def config_map(directory: Path) -> dict[str, Any]:
    """Return a ConfigMap with the files of an adapter, named as its directory."""
    data = {file.name: base64.b64encode(file.read_bytes()).decode() for file in directory.iterdir()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": directory.name}, "binaryData": data}


def mounted(*names: str) -> dict[str, Any]:
    """Return the fields of a pod that mount each ConfigMap at `/adapters/<name>`."""
    return {
        "volumes": [{"name": name, "configMap": {"name": name}} for name in names],
        "volumeMounts": [{"name": name, "mountPath": f"/adapters/{name}", "readOnly": True} for name in names],
    }
