"""The answers of the small model by transformers, with which every greedy text is compared."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from programs import ROOT

MODEL = ROOT / "worker" / "ballast_cli" / "demo" / "model"


@cache
def _loaded() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # the cluster runs on the same cores
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return tokenizer, AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


@cache
def _with_adapter(adapter: Path) -> Any:
    """Return the model with the weights of a LoRA adapter added to its own."""
    from copy import deepcopy

    import torch
    from safetensors.torch import load_file

    model = deepcopy(_loaded()[1])
    config = json.loads((adapter / "adapter_config.json").read_text())
    weights = load_file(adapter / "adapter_model.safetensors")
    with torch.inference_mode():
        for name, down in weights.items():
            module, found, _ = name.partition(".lora_A")
            if found:
                up = weights[f"{module}.lora_B.weight"]
                own = model.get_submodule(module.removeprefix("base_model.model.")).weight
                own += config["lora_alpha"] / config["r"] * (up @ down)
    return model


def greedy(prompt: str, most: int, adapter: Path | None = None) -> str:
    """Return the greedy continuation of a prompt, with or without a LoRA adapter in the directory `adapter`."""
    import torch

    tokenizer, model = _loaded()
    if adapter is not None:
        model = _with_adapter(adapter)
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0]
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
