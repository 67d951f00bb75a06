"""The tensor half of the engine: compute a batch and sample its tokens.

Only this module and the modules that it calls use tensors.
"""

from __future__ import annotations

from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from ballast_engine.attention.base import AttentionShape
from ballast_engine.attention.cpu import CpuAttention
from ballast_engine.attention.sdpa import SdpaAttention
from ballast_engine.batch import Batch, Ints
from ballast_engine.errors import InvalidRequest
from ballast_engine.footprint import Footprint
from ballast_engine.loader import LoadedModel
from ballast_engine.models.config import ModelConfig
from ballast_engine.models.decoder import Decoder
from ballast_engine.models.native import NativeDecoder
from ballast_engine.native.library import kernels
from ballast_engine.peak import measure_footprint
from ballast_engine.sampling import sample
from ballast_engine.suspension import Computation, Interrupt, Suspended, advance


def kv_bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    """Return the memory of one block: keys and values of `block_tokens` tokens in all layers."""
    return 2 * config.num_layers * config.kv_size * block_tokens * dtype.itemsize


class _Model(Protocol):
    def hidden(self, batch: Batch, interrupt: Interrupt | None = None) -> Computation[Tensor]: ...

    def logits(self, hidden: Tensor, rows: Ints) -> Tensor: ...


class Executor:
    """A loaded model with its KV pages. One thread uses it."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, block_tokens: int) -> None:
        config = loaded.config
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            dtype=loaded.dtype,
        )
        self.model = _model(loaded, shape)
        """The decoder, with the KV pages of its attention backend."""
        self._kernels = kernels() if loaded.attention == "cpu" else None
        self._loaded = loaded

    @cached_property
    def footprint(self) -> Footprint:
        """The cost of one token of the model on this machine. The first read measures it."""
        return measure_footprint(self._loaded)

    @torch.inference_mode()
    def run(self, batch: Batch, interrupt: Interrupt | None = None) -> Ints | Suspended:
        """Compute a batch and sample the next token of each sample row, unless it is interrupted between two layers.

        Without an interrupt it runs to its end, even while another batch is suspended.
        """
        return advance(self._drawn(batch, interrupt))

    @torch.inference_mode()
    def resume(self, suspended: Suspended, interrupt: Interrupt | None = None) -> Ints | Suspended:
        """Resume a suspended batch. Its KV blocks must not have changed their owners since."""
        return advance(suspended.computation, interrupt)

    def _drawn(self, batch: Batch, interrupt: Interrupt | None) -> Computation[Ints]:
        if batch.token_ids.min() < 0 or batch.token_ids.max() >= self.vocab_size:
            raise InvalidRequest(
                f"The batch has token ids from {batch.token_ids.min()} to {batch.token_ids.max()}, but the model has "
                f"{self.vocab_size} tokens: use ids from 0 to {self.vocab_size - 1}."
            )
        hidden = yield from self.model.hidden(batch, interrupt)
        if not batch.samples:
            return np.empty(0, dtype=np.int64)
        return sample(self.model.logits(hidden, batch.sample_rows), batch.samples, self._kernels)


def _model(loaded: LoadedModel, shape: AttentionShape) -> _Model:
    if loaded.attention == "sdpa":
        return Decoder(loaded.config, loaded.weights, SdpaAttention(shape))
    attention = CpuAttention(shape, threads=loaded.threads)
    if not loaded.weights.is_packed:
        return Decoder(loaded.config, loaded.weights, attention)
    return NativeDecoder(loaded.config, loaded.weights, attention)
