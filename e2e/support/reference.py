"""What the small model answers by transformers, outside the cluster: the yardstick for every greedy text."""

from __future__ import annotations

from functools import cache
from typing import Any

from programs import ROOT

MODEL = ROOT / "worker" / "ballast_cli" / "demo" / "model"


@cache
def _loaded() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # the cluster computes on the same cores, and threads would wait for one another
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    return tokenizer, AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()


def greedy(prompt: str, most: int) -> str:
    """The continuation of a prompt, token by token the likeliest."""
    import torch

    tokenizer, model = _loaded()
    inputs = tokenizer(prompt, return_tensors="pt")
    with torch.inference_mode():
        ids = model.generate(**inputs, max_new_tokens=most, do_sample=False)[0]
    return str(tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True))
