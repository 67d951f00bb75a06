"""The decoder with compiled kernels: float32, two calls per step, the same arithmetic as `decoder`.

It is fast, and exact: the bits of a row's logits do not depend on the rest of the batch.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from ballast_engine.attention.cpu import CpuAttention, CpuStep
from ballast_engine.batch import Batch, Ints
from ballast_engine.models.config import ModelConfig
from ballast_engine.models.rope import RopeTable
from ballast_engine.models.weights import DecoderWeights
from ballast_engine.native.library import LAYER_TENSORS, CDecoder, CLayer, kernels
from ballast_engine.suspension import Computation, Interrupt


class NativeDecoder:
    """A decoder with packed weights and the pages of a CpuAttention."""

    def __init__(self, config: ModelConfig, weights: DecoderWeights, attention: CpuAttention) -> None:
        self._config = config
        self._weights = weights
        self.attention = attention
        """The attention backend, with the KV pages."""
        self._kernels = kernels()
        self._rope = RopeTable(config)
        self._layers = (CLayer * config.num_layers)()
        for raw, layer, own in zip(self._layers, weights.layers, attention.layers, strict=True):
            for name in LAYER_TENSORS:
                tensor: Tensor | None = getattr(layer, name)
                setattr(raw, name, None if tensor is None else tensor.data_ptr())
            raw.attention = own
        self._raw = CDecoder(
            num_layers=config.num_layers,
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            norm_eps=config.norm_eps,
            embedding=weights.embedding.data_ptr(),
            norm=weights.norm.data_ptr(),
            head=weights.head.data_ptr(),
            layers=ctypes.cast(self._layers, ctypes.POINTER(CLayer)),
        )
        wide = config.q_size + 2 * config.kv_size + config.q_size
        self._scratch_width = config.hidden_size + max(wide, config.intermediate_size)
        self._scratch = torch.empty(0)

    def hidden(self, batch: Batch, interrupt: Interrupt | None = None) -> Computation[Tensor]:
        """Compute the hidden states `[n, hidden]` after the last layer, before the final norm."""
        step = self.attention.prepare(batch)
        x = torch.empty(batch.num_tokens, self._config.hidden_size)
        layer = self._layers_from(0, step, x, interrupt)
        while layer < self._config.num_layers:
            interrupt = yield
            layer = self._layers_from(layer, step, x, interrupt)
        return x

    def _layers_from(self, layer: int, step: CpuStep, x: Tensor, interrupt: Interrupt | None) -> int:
        """Compute layers. A nested step may have enlarged angles and scratch, so their addresses are read again."""
        batch = step.batch
        self._rope.reserve(int(batch.context_lens.max()))
        step.raw.cosines, step.raw.sines = self._rope.cos.data_ptr(), self._rope.sin.data_ptr()
        scratch = self._scratch_of(batch.num_tokens * self._scratch_width)
        team = self.attention.team
        return self._kernels.layers(self._raw, step.raw, x, scratch, first=layer, interrupt=interrupt, team=team)

    def logits(self, hidden: Tensor, rows: Ints) -> Tensor:
        """Return the logits `[s, vocabulary]` of some rows of `hidden`."""
        scratch = self._scratch_of(len(rows) * self._config.hidden_size)
        return self._kernels.head(self._raw, hidden, rows, scratch, team=self.attention.team)

    def _scratch_of(self, size: int) -> Tensor:
        if len(self._scratch) < size:
            self._scratch = torch.empty(size)
        return self._scratch
