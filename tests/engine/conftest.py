"""Shared by the engine's tests: small checkpoints made by transformers."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

# In importlib mode pytest leaves sys.path alone, and the modules beside this one are shared by several test files.
sys.path.insert(0, str(Path(__file__).parent))

SMALL = {
    "vocab_size": 193,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, tied embeddings, one key head": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "llama, llama3 rope": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama, linear rope": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "llama, biases everywhere": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, wide heads": ("Llama", {"head_dim": 128, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, sliding window": ("Mistral", {"sliding_window": 11, "head_dim": 16}),
    "qwen2": ("Qwen2", {"num_attention_heads": 6, "num_key_value_heads": 2}),
    "qwen2, tied embeddings, window in the upper layers": (
        "Qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3", {"head_dim": 32}),
    "qwen3, tied embeddings, biases": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True, "attention_bias": True}),
}


def make_reference(name: str) -> Any:
    """A tiny random model of transformers, in float32, with norms and biases that matter."""
    import torch
    import transformers

    kind, changes = MODELS[name]
    config = getattr(transformers, f"{kind}Config")(**{**SMALL, **changes})
    config._attn_implementation = "eager"  # noqa: SLF001 -- transformers has no other way
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
            else:
                parameter.normal_(std=0.15)
    return model


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A word-level tokenizer with so many entries: enough for a checkpoint to be complete."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    vocabulary = {f"w{index}": index for index in range(vocab_size)}
    Tokenizer(WordLevel(vocabulary, unk_token="w0")).save(str(directory / "tokenizer.json"))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Torch's threads wait for each other: beside other work on few cores, a hundred times as long as they work."""
    import torch

    torch.set_num_threads(1)


@dataclass
class Checkpoints:
    """Tiny checkpoints on disk, each with the transformers model that it was saved from."""

    root: Path
    made: dict[str, tuple[Path, Any]] = field(default_factory=dict)

    def __call__(self, name: str) -> tuple[Path, Any]:
        if name not in self.made:
            directory = self.root / f"model{len(self.made)}"
            reference = make_reference(name)
            reference.save_pretrained(directory)
            write_tokenizer(directory, reference.config.vocab_size)
            self.made[name] = (directory, reference)
        return self.made[name]


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(params=MODELS)
def architecture(request: pytest.FixtureRequest) -> str:
    """The name of each tiny checkpoint, one after the other."""
    return str(request.param)
