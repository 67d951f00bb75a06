"""Llama models with random weights, for benchmarks that need only a shape."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class LlamaShape:
    """The sizes of a Llama."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    """Whether the head is the embedding."""

    @property
    def kv_size(self) -> int:
        """Numbers in the keys of a token in one layer."""
        return self.kv_heads * self.hidden // self.heads

    @property
    def computed_parameters(self) -> int:
        """Weights that each decoded token is multiplied with: layers and head."""
        attention = 2 * self.hidden * (self.hidden + self.kv_size)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.hidden * self.vocabulary


def bytes_llama(hidden: int, layers: int) -> LlamaShape:
    """Return the usual proportions of a Llama of this width, with a vocabulary of bytes."""
    heads = {"heads": hidden // 64, "kv_heads": max(1, hidden // 128)}
    return LlamaShape(hidden, layers, **heads, intermediate=hidden * 8 // 3 // 16 * 16, vocabulary=258)


def make_model(
    folder: Path, shape: LlamaShape, *, longest: int = 2048, has_weights: bool = True, spread: float = 0.02
) -> Path:
    """Write the configuration, a tokenizer of bytes and, if wanted, random weights of a Llama.

    With a wide `spread` of the weights, greedy answers wander instead of repeating a token.
    """
    import torch  # noqa: PLC0415 - heavy
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    sys.path.insert(0, str(ROOT / "tests" / "vllm" / "support"))
    from small_models import make_tokenizer  # noqa: PLC0415 - the module is not a package

    torch.manual_seed(3)
    config = LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, intermediate_size=shape.intermediate, vocab_size=shape.vocabulary,
        max_position_embeddings=longest, bos_token_id=256, eos_token_id=257, initializer_range=spread,
        tie_word_embeddings=shape.is_tied, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    if has_weights:
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder
