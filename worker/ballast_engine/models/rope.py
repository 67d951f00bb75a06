"""Rotary position embedding: the angles of each position, and their application."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ballast_engine.models.config import ModelConfig, Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """Return the radians per position of each pair of dimensions, `[head_dim / 2]`, in float32 as in transformers."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    return _llama3(frequencies, rope) if rope.kind == "llama3" else frequencies / rope.factor


def _llama3(frequencies: Tensor, rope: Rope) -> Tensor:
    """Keep short wavelengths, divide long ones by the factor, and blend between."""
    longest = rope.original_max_positions / rope.low_freq_factor
    shortest = rope.original_max_positions / rope.high_freq_factor
    wavelengths = 2 * math.pi / frequencies
    scaled = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.original_max_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * scaled / rope.factor + smooth * scaled
    between = (wavelengths >= shortest) & (wavelengths <= longest)
    return torch.where(between, blended, scaled)


class RopeTable:
    """Cosines and sines `[positions, head_dim / 2]` in float32. The table grows with the contexts."""

    def __init__(self, config: ModelConfig) -> None:
        self._frequencies = inverse_frequencies(config.rope, config.head_dim)
        self._limit = config.max_positions
        self.cos = self.sin = torch.empty(0, config.head_dim // 2)
        self.reserve(min(self._limit, 4096))

    def reserve(self, positions: int) -> None:
        """Extend the table to at least `positions` rows."""
        if positions <= len(self.cos):
            return
        rows = min(max(positions, 2 * len(self.cos)), max(positions, self._limit))
        angles = torch.outer(torch.arange(rows).float(), self._frequencies)
        self.cos, self.sin = angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate heads `[n, heads, head_dim]` by the angles `[n, 1, head_dim / 2]` of their positions."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
