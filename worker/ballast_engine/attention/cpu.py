"""Attention by the compiled kernel: a whole mixed batch in one call, on pages with its own layout.

Its limits are heads of 256 dimensions and 48 query heads per key head. Pages are float32 or bfloat16, the arithmetic is
float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ballast_engine.attention.base import AttentionShape
from ballast_engine.batch import Batch, Ints
from ballast_engine.memory import HugePages
from ballast_engine.native.library import MAX_HEAD_DIM, MAX_TILE, CAttention, CStep, kernels

_PADDING = 64


@dataclass(slots=True)
class CpuStep:
    """A batch as the kernels read it. It holds the arrays, so that the pointers stay valid."""

    raw: CStep
    batch: Batch
    tile_start: Ints
    table: Ints


class CpuAttention:
    """Keys are `[layers, blocks, kv heads, head dim, block tokens]`; in values the last two are swapped."""

    def __init__(self, shape: AttentionShape, *, threads: int) -> None:
        heads = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        self.shape = shape
        num_keys = math.prod(heads) * shape.head_dim * shape.block_tokens
        # A vector of keys may extend beyond the last block. The values there are never used.
        pages = HugePages().zeros((2 * num_keys + _PADDING,), shape.dtype).zero_()  # memory that is short fails now
        self.keys = pages[:num_keys].view(*heads, shape.head_dim, shape.block_tokens)
        self.values = pages[num_keys + _PADDING :].view(*heads, shape.block_tokens, shape.head_dim)
        self.layers = tuple(self._layer(index) for index in range(shape.num_layers))
        self._tile_rows = self.layers[0].tile_rows
        self._kernels = kernels()
        self.team = self._kernels.team(threads)

    @staticmethod
    def obstacle(*, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> str | None:
        """Return why this backend cannot run a model, or None."""
        if dtype not in {torch.float32, torch.bfloat16}:
            return f"its kernel does not support {dtype}"
        if head_dim > MAX_HEAD_DIM:
            return f"heads of {head_dim} dimensions exceed its maximum of {MAX_HEAD_DIM}"
        if num_heads // num_kv_heads > MAX_TILE:
            return f"{num_heads // num_kv_heads} query heads per key head exceed its maximum of {MAX_TILE}"
        return None

    def prepare(self, batch: Batch) -> CpuStep:
        """Divide the requests into tiles of rows, and collect the pointers."""
        tiles = np.zeros(batch.num_requests + 1, dtype=np.int64)
        np.cumsum(-(-np.diff(batch.query_start) // self._tile_rows), out=tiles[1:])
        table = np.ascontiguousarray(batch.block_table)
        raw = CStep(
            num_rows=batch.num_tokens,
            num_requests=batch.num_requests,
            table_width=table.shape[1],
            token_ids=batch.token_ids.ctypes.data,
            positions=batch.positions.ctypes.data,
            slots=batch.slot_mapping.ctypes.data,
            query_start=batch.query_start.ctypes.data,
            table=table.ctypes.data,
            tile_start=tiles.ctypes.data,
        )
        return CpuStep(raw=raw, batch=batch, tile_start=tiles, table=table)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: CpuStep) -> Tensor:
        """Write K and V, and attend, in one call."""
        wide = (q.float().contiguous(), k.float().contiguous(), v.float().contiguous())
        out = torch.empty(q.shape[0], q.shape[1] * q.shape[2])
        self._kernels.attention(self.layers[layer], step.raw, wide, out, team=self.team)
        return out.to(q.dtype)

    def _layer(self, index: int) -> CAttention:
        shape = self.shape
        return CAttention(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            block_tokens=shape.block_tokens,
            window=shape.windows[index] or 0,
            tile_rows=max(1, MAX_TILE // (shape.num_heads // shape.num_kv_heads)),
            is_bfloat16=int(shape.dtype == torch.bfloat16),
            keys=self.keys[index].data_ptr(),
            values=self.values[index].data_ptr(),
        )
