"""The decoder in plain torch, in every dtype. It is the reference for the compiled decoder."""

from __future__ import annotations

from typing import Generic

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, rms_norm, silu

from ballast_engine.attention.base import Attention, Prepared
from ballast_engine.batch import Batch, Ints
from ballast_engine.models.config import ModelConfig
from ballast_engine.models.rope import RopeTable, rotate
from ballast_engine.models.weights import DecoderWeights, LayerWeights
from ballast_engine.suspension import Computation, Interrupt


class Decoder(Generic[Prepared]):
    """A decoder with one attention backend. Its rows are tokens of any requests; only attention knows which."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, attention: Attention[Prepared]) -> None:
        self._config = config
        self._weights = weights
        self.attention = attention
        """The attention backend, with the KV pages."""
        self._rope = RopeTable(config)
        self._dtype = weights.embedding.dtype

    def hidden(self, batch: Batch, interrupt: Interrupt | None = None) -> Computation[Tensor]:
        """Compute the hidden states `[n, hidden]` after the last layer, before the final norm."""
        step = self.attention.prepare(batch)
        positions = torch.from_numpy(batch.positions)
        self._rope.reserve(int(batch.context_lens.max()))
        cos = self._rope.cos[positions].unsqueeze(1).to(self._dtype)
        sin = self._rope.sin[positions].unsqueeze(1).to(self._dtype)
        x = embedding(torch.from_numpy(batch.token_ids), self._weights.embedding)
        for index, layer in enumerate(self._weights.layers):
            while interrupt is not None and interrupt.is_raised_at(index):
                interrupt = yield
            x = x + self._attend(index, layer, x, (cos, sin), step)
            x = x + self._mlp(layer, x)
        return x

    def logits(self, hidden: Tensor, rows: Ints) -> Tensor:
        """Return the logits `[s, vocabulary]` of some rows of `hidden`."""
        config = self._config
        chosen = hidden[torch.from_numpy(rows)]
        return linear(rms_norm(chosen, (config.hidden_size,), self._weights.norm, config.norm_eps), self._weights.head)

    def _attend(
        self, index: int, layer: LayerWeights, x: Tensor, angles: tuple[Tensor, Tensor], step: Prepared
    ) -> Tensor:
        config = self._config
        normed = rms_norm(x, (config.hidden_size,), layer.input_norm, config.norm_eps)
        heads = linear(normed, layer.qkv, layer.qkv_bias).view(len(x), -1, config.head_dim)
        q, k, v = torch.split(heads, [config.num_heads, config.num_kv_heads, config.num_kv_heads], dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = rms_norm(q, (config.head_dim,), layer.q_norm, config.norm_eps)
            k = rms_norm(k, (config.head_dim,), layer.k_norm, config.norm_eps)
        seen = self.attention.forward(index, rotate(q, *angles), rotate(k, *angles), v, step)
        return linear(seen, layer.output, layer.output_bias)

    def _mlp(self, layer: LayerWeights, x: Tensor) -> Tensor:
        config = self._config
        normed = rms_norm(x, (config.hidden_size,), layer.mlp_norm, config.norm_eps)
        gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down, layer.down_bias)
