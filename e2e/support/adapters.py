"""LoRA adapters for the small model, and the objects that bring them into a pod."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from reference import MODEL

RANK = 4


def make(directory: Path, *, seed: int) -> Path:
    """Write a LoRA adapter with random weights, which are small enough to leave words in the answers."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((MODEL / "config.json").read_text())
    generator = torch.Generator().manual_seed(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    outputs = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, size in outputs.items():
            module = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{module}.lora_A.weight"] = 0.1 * torch.randn(RANK, hidden, generator=generator)
            weights[f"{module}.lora_B.weight"] = 0.1 * torch.randn(size, RANK, generator=generator)
    directory.mkdir()
    save_file(weights, directory / "adapter_model.safetensors")
    about = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": list(outputs), "peft_type": "LORA", "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(about))
    return directory


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
