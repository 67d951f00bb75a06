"""The answers of the small model by transformers, with which every greedy text is compared."""

from __future__ import annotations

from functools import cache
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


def greedy(prompt: str, most: int) -> str:
    """Return the greedy continuation of a prompt."""
    import torch

    tokenizer, model = _loaded()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0]
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
