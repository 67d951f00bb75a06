"""The weights of a decoder: the tensors that a checkpoint must have, and how they are fused.

Names and shapes are those of Hugging Face checkpoints. The projections of q, k and v become one matrix, those of gate
and up another. Packed weights have the same values in the layout of the compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ballast_engine.models.config import ModelConfig
from ballast_engine.models.packing import Packing

Shape = tuple[int, ...]
Take = Callable[[str, Shape], Tensor]
"""Return the tensor of a name, in the dtype of the computation."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. A bias or a q/k norm is None if the architecture has none."""

    input_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a decoder. With tied embeddings `head` is `embedding`, unless it is packed."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    head: Tensor
    is_packed: bool = False


def expected_tensors(config: ModelConfig) -> dict[str, Shape]:
    """Return name and shape of every tensor in a checkpoint of this model."""
    shapes: dict[str, Shape] = {}

    def take(name: str, shape: Shape) -> Tensor:
        shapes[name] = shape
        return torch.empty(shape, device="meta")

    assemble(config, take)
    return shapes


def assemble(config: ModelConfig, take: Take, packing: Packing | None = None) -> DecoderWeights:
    """Build the weights from single tensors, layer by layer, so that never more than one layer exists twice."""
    hidden = config.hidden_size
    embedding = take("model.embed_tokens.weight", (config.vocab_size, hidden))
    layers = []
    for index in range(config.num_layers):
        layer = _layer(config, f"model.layers.{index}.", take)
        layers.append(layer if packing is None else _packed(layer, packing))
    norm = take("model.norm.weight", (hidden,))
    head = embedding if config.tie_embeddings else take("lm_head.weight", (config.vocab_size, hidden))
    return DecoderWeights(
        embedding=embedding,
        layers=tuple(layers),
        norm=norm,
        head=head if packing is None else packing.matrix(head),
        is_packed=packing is not None,
    )


def _packed(layer: LayerWeights, packing: Packing) -> LayerWeights:
    return replace(
        layer,
        qkv=packing.matrix(layer.qkv),
        qkv_bias=None if layer.qkv_bias is None else packing.bias(layer.qkv_bias),
        output=packing.matrix(layer.output),
        output_bias=None if layer.output_bias is None else packing.bias(layer.output_bias),
        gate_up=packing.gated(layer.gate_up),
        gate_up_bias=None if layer.gate_up_bias is None else packing.gated_bias(layer.gate_up_bias),
        down=packing.matrix(layer.down),
        down_bias=None if layer.down_bias is None else packing.bias(layer.down_bias),
    )


def _layer(config: ModelConfig, prefix: str, take: Take) -> LayerWeights:
    hidden, inner, q, kv = config.hidden_size, config.intermediate_size, config.q_size, config.kv_size

    def fused(names: tuple[str, ...], rows: tuple[int, ...], *, bias: bool) -> tuple[Tensor, Tensor | None]:
        weight = torch.cat([take(f"{prefix}{n}.weight", (r, hidden)) for n, r in zip(names, rows, strict=True)])
        if not bias:
            return weight, None
        return weight, torch.cat([take(f"{prefix}{n}.bias", (r,)) for n, r in zip(names, rows, strict=True)])

    qkv, qkv_bias = fused(
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (q, kv, kv), bias=config.qkv_bias
    )
    gate_up, gate_up_bias = fused(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), bias=config.mlp_bias)
    return LayerWeights(
        input_norm=take(f"{prefix}input_layernorm.weight", (hidden,)),
        qkv=qkv,
        qkv_bias=qkv_bias,
        q_norm=take(f"{prefix}self_attn.q_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        k_norm=take(f"{prefix}self_attn.k_norm.weight", (config.head_dim,)) if config.qk_norm else None,
        output=take(f"{prefix}self_attn.o_proj.weight", (hidden, q)),
        output_bias=take(f"{prefix}self_attn.o_proj.bias", (hidden,)) if config.output_bias else None,
        mlp_norm=take(f"{prefix}post_attention_layernorm.weight", (hidden,)),
        gate_up=gate_up,
        gate_up_bias=gate_up_bias,
        down=take(f"{prefix}mlp.down_proj.weight", (hidden, inner)),
        down_bias=take(f"{prefix}mlp.down_proj.bias", (hidden,)) if config.mlp_bias else None,
    )
