"""Sample the next token of each row. A sample depends only on the seed, the position and the logits.

The order is that of vLLM: temperature, min_p, top_k, top_p, then one draw from the rest. `min_p` compares with the
largest probability after temperature. `top_p` sums the probabilities, renormalized over the tokens that min_p and top_k
left, and keeps the token that crosses the sum. Of equal probabilities the lower token id counts as larger, so that
exactly `top_k` tokens remain. A temperature below 1e-5 is greedy, and the lowest token id wins a tie. `sampling.c` does
the same in the kernels. Its exponentials differ in the last bit, so a draw on the boundary of two tokens may differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ballast_engine.batch import Ints, SampleRow
from ballast_engine.native.library import DRAW, Kernels

GREEDY_BELOW = 1e-5


def sample(logits: Tensor, rows: Sequence[SampleRow], kernels: Kernels | None = None) -> Ints:
    """Sample one token for each row of `logits` `[s, vocabulary]`, with the compiled kernels if they are given."""
    drawn = [index for index, row in enumerate(rows) if row.sampling.temperature >= GREEDY_BELOW]
    if not drawn:
        return _argmax(logits)
    if kernels is not None:
        return kernels.sample(logits.float().contiguous(), _draws(rows))
    if len(drawn) == len(rows):
        return _draw(logits, rows)
    tokens = _argmax(logits)
    tokens[drawn] = _draw(logits[drawn], [rows[index] for index in drawn])
    return tokens


def _draws(rows: Sequence[SampleRow]) -> NDArray[np.void]:
    how, sampled = np.empty(len(rows), dtype=DRAW), [row.sampling for row in rows]
    for name in ("temperature", "min_p", "top_p", "top_k"):
        how[name] = [getattr(one, name) for one in sampled]
    how["uniform"] = _uniforms_of(rows)
    return how


def _uniforms_of(rows: Sequence[SampleRow]) -> NDArray[np.float64]:
    seeds = np.array([row.sampling.seed & 0xFFFFFFFFFFFFFFFF for row in rows], dtype=np.uint64)
    return uniforms(seeds, np.array([row.position for row in rows], dtype=np.uint64))


def uniforms(seeds: NDArray[np.uint64], positions: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each seed and position: splitmix64 of the position in the stream of the seed."""
    with np.errstate(over="ignore"):
        bits = _mixed(_mixed(seeds) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15))
    uniform: NDArray[np.float64] = (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return uniform


def _mixed(z: NDArray[np.uint64]) -> NDArray[np.uint64]:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _argmax(logits: Tensor) -> NDArray[np.int64]:
    greedy: NDArray[np.int64] = logits.float().numpy().argmax(axis=-1)  # a third of torch's time for few rows
    return greedy


def _draw(logits: Tensor, rows: Sequence[SampleRow]) -> NDArray[np.int64]:
    vocabulary = logits.shape[-1]
    wide = logits.float()
    # As multiples of the largest probability, which is exactly 1: no temperature overflows, and min_p compares with it.
    mass = ((wide - wide.amax(dim=-1, keepdim=True)) / _column([row.sampling.temperature for row in rows])).exp()
    min_p = [row.sampling.min_p for row in rows]
    if any(min_p):
        mass = mass.where(mass >= _column(min_p), 0.0)
    top_k = [row.sampling.top_k if 0 < row.sampling.top_k < vocabulary else vocabulary for row in rows]
    top_p = [row.sampling.top_p for row in rows]
    if min(top_k) < vocabulary or min(top_p) < 1.0:
        mass = _truncated(mass, top_k, top_p)
    uniform = torch.from_numpy(_uniforms_of(rows)).unsqueeze(1)
    cumulative = mass.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    below = torch.minimum(uniform * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens: NDArray[np.int64] = torch.searchsorted(cumulative, below, right=True).squeeze(1).numpy()
    return tokens


def _truncated(mass: Tensor, top_k: list[int], top_p: list[float]) -> Tensor:
    """Set the tokens to 0 that top_k and top_p exclude: count the tokens that each row keeps, then keep the largest."""
    limits, nucleus = torch.tensor(top_k).unsqueeze(1), torch.tensor(top_p, dtype=torch.float64).unsqueeze(1)
    largest = torch.from_numpy(np.sort(mass.numpy(), axis=-1)).flip(-1)  # a fraction of the time of torch's sort
    is_within = torch.arange(mass.shape[-1]) < limits
    sums = (largest * is_within).cumsum(dim=-1, dtype=torch.float64)
    inside = ((sums < nucleus * sums[:, -1:]) & is_within).sum(dim=-1, keepdim=True) + 1
    kept = torch.where(nucleus < 1.0, inside.minimum(limits), limits)
    smallest = largest.gather(1, kept - 1)
    ties = mass == smallest
    num_ties = kept - (mass > smallest).sum(dim=-1, keepdim=True)
    return mass.where((mass > smallest) | (ties & (ties.cumsum(dim=-1) <= num_ties)), 0.0)


def _column(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32).unsqueeze(1)
