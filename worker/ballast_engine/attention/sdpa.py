"""Attention with torch alone: gather the pages of each request for `scaled_dot_product_attention`.

It runs in every dtype. It is the reference for the other backends, and the fallback if they cannot
run. It copies the context of each request in every layer, and makes several calls per request.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ballast_engine.attention.base import AttentionShape
from ballast_engine.batch import Batch


@dataclass(frozen=True, slots=True)
class _Request:
    rows: slice
    context: int
    blocks: Tensor
    masks: dict[int | None, Tensor | None]
    """By window: the keys that each row sees, `[rows, context]`; None if every row sees all keys."""


@dataclass(frozen=True, slots=True)
class SdpaStep:
    """A batch as this backend needs it."""

    blocks: Tensor
    offsets: Tensor
    requests: tuple[_Request, ...]


class SdpaAttention:
    """Head-major pages `[layers, blocks, kv heads, block tokens, head dim]` for keys and values."""

    def __init__(self, shape: AttentionShape) -> None:
        size = (shape.num_layers, shape.num_blocks, shape.num_kv_heads, shape.block_tokens, shape.head_dim)
        self.shape = shape
        self.keys = torch.zeros(size, dtype=shape.dtype)
        self.values = torch.zeros(size, dtype=shape.dtype)

    def prepare(self, batch: Batch) -> SdpaStep:
        """Build the masks."""
        slots, positions = torch.from_numpy(batch.slot_mapping), torch.from_numpy(batch.positions)
        tables = torch.from_numpy(batch.block_table)
        requests = []
        for index in range(batch.num_requests):
            rows = slice(int(batch.query_start[index]), int(batch.query_start[index + 1]))
            context = int(batch.context_lens[index])
            blocks = tables[index, : -(-context // self.shape.block_tokens)]
            masks = {window: _mask(positions[rows], context, window) for window in set(self.shape.windows)}
            requests.append(_Request(rows=rows, context=context, blocks=blocks, masks=masks))
        return SdpaStep(
            blocks=slots // self.shape.block_tokens, offsets=slots % self.shape.block_tokens, requests=tuple(requests)
        )

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: SdpaStep) -> Tensor:
        """Write K and V, then gather and attend, request by request."""
        keys, values = self.keys[layer], self.values[layer]
        keys[step.blocks, :, step.offsets] = k
        values[step.blocks, :, step.offsets] = v
        out = torch.empty_like(q)
        window = self.shape.windows[layer]
        for request in step.requests:
            seen = _gathered(keys, request), _gathered(values, request)
            out[request.rows] = self._attend(q[request.rows], *seen, request.masks[window])
        return out.flatten(1)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        """Attend with q `[rows, heads, head dim]` to k and v `[kv heads, context, head dim]`."""
        rows, group = q.shape[0], self.shape.num_heads // self.shape.num_kv_heads
        grouped = q.view(rows, self.shape.num_kv_heads, group, -1).permute(1, 2, 0, 3)
        if mask is None:
            # Every row sees every key: the rows of a group are rows of one query, and k and v are read once.
            packed = grouped.reshape(1, self.shape.num_kv_heads, group * rows, -1)
            seen = scaled_dot_product_attention(packed, k[None], v[None], scale=self.shape.scale)
            out = seen.view(self.shape.num_kv_heads, group, rows, -1)
        else:
            k, v = (shared[:, None].expand(-1, group, -1, -1) for shared in (k, v))
            out = scaled_dot_product_attention(grouped, k, v, attn_mask=mask, scale=self.shape.scale)
        return out.permute(2, 0, 1, 3).reshape(rows, self.shape.num_heads, -1)


def _gathered(pages: Tensor, request: _Request) -> Tensor:
    heads, dim = pages.shape[1], pages.shape[-1]
    return pages[request.blocks].transpose(0, 1).reshape(heads, -1, dim)[:, : request.context]


def _mask(positions: Tensor, context: int, window: int | None) -> Tensor | None:
    if len(positions) == 1 and (window is None or window >= context):
        return None
    keys = torch.arange(context)
    seen = keys <= positions[:, None]
    if window is not None:
        seen &= keys > positions[:, None] - window
    return seen
