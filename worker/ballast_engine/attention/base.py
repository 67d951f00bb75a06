"""The interface of attention backends, and the sizes from which they are built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ballast_engine.batch import Batch

Prepared = TypeVar("Prepared")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The sizes of a model's attention and of its paged KV."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    windows: tuple[int | None, ...]
    """Per layer: how many of the last tokens a token attends to, including itself; None: all of them."""
    num_blocks: int
    block_tokens: int
    dtype: torch.dtype

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.windows)

    @property
    def scale(self) -> float:
        """The factor of the scores before the softmax."""
        return float(self.head_dim**-0.5)


class Attention(Protocol[Prepared]):
    """A backend with its KV pages. `prepare` returns a value, so that one step can be nested in another."""

    keys: Tensor
    """`[layers, blocks, kv heads, ...]`; the backend decides the rest of the layout."""
    values: Tensor

    def prepare(self, batch: Batch) -> Prepared:
        """Compute, once per step, what every layer needs of the batch."""
        ...

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor, step: Prepared) -> Tensor:
        """Write the step's k and v `[n, kv heads, head dim]` to their slots, then attend with q `[n, heads, head dim]`.

        Returns `[n, heads * head dim]`. Row i of a request sees the positions up to its own.
        """
        ...
