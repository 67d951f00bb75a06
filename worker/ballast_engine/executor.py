"""The tensor half of the engine: a batch goes in, sampled tokens come out. Everything that touches a tensor is below."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ballast_engine.attention.base import AttentionShape
from ballast_engine.attention.sdpa import SdpaAttention
from ballast_engine.batch import Batch
from ballast_engine.loader import LoadedModel
from ballast_engine.models.config import ModelConfig
from ballast_engine.models.decoder import Decoder
from ballast_engine.sampling import sample


def kv_bytes_per_block(config: ModelConfig, dtype: torch.dtype, block_tokens: int) -> int:
    """Memory of one block: keys and values of `block_tokens` tokens in all layers."""
    return 2 * config.num_layers * config.kv_size * block_tokens * dtype.itemsize


class Executor:
    """A loaded model with its KV pages. Used by one thread."""

    def __init__(self, loaded: LoadedModel, *, num_blocks: int, block_tokens: int) -> None:
        config = loaded.config
        self.num_blocks = num_blocks
        self.block_tokens = block_tokens
        self.kv_bytes_per_block = kv_bytes_per_block(config, loaded.dtype, block_tokens)
        self.vocab_size = config.vocab_size
        self.max_model_len = config.max_positions
        self._device = loaded.device
        shape = AttentionShape(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            windows=config.windows,
            num_blocks=num_blocks,
            block_tokens=block_tokens,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._attention = SdpaAttention(shape)
        self._decoder = Decoder(config, loaded.model, self._attention)

    def run(self, batch: Batch) -> NDArray[np.int64]:
        """Compute a batch and draw the next token of each of its sample rows."""
        with torch.inference_mode():
            if not batch.samples:
                self._hidden(batch)
                return np.empty(0, dtype=np.int64)
            return sample(self.logits(batch), batch.samples)

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Compute a batch and give the logits `[s, vocabulary]` of its sample rows."""
        hidden = self._hidden(batch)
        return self._decoder.logits(hidden[torch.from_numpy(batch.sample_rows).to(self._device)])

    def _hidden(self, batch: Batch) -> Tensor:
        return self._decoder.hidden(
            torch.from_numpy(batch.token_ids).to(self._device),
            torch.from_numpy(batch.positions).to(self._device),
            longest=int(batch.context_lens.max()),
            step=self._attention.prepare(batch),
        )
