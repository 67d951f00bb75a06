"""The work of one step as flat arrays: all that the executor knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ballast_engine.request import SamplingParams

Ints = NDArray[np.int64]


class SampleRow(NamedTuple):
    """A request whose next token is sampled from the logits of this step."""

    sampling: SamplingParams
    position: int
    """Index of the new token, from the start of the prompt."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A flat mixed batch of decode tokens and prefill chunks, request after request.

    It has n tokens of r requests; s requests sample. The first `num_decodes` requests decode one token each.
    """

    token_ids: Ints
    """[n] input token ids."""
    positions: Ints
    """[n] position of each token in its request, from 0."""
    slot_mapping: Ints
    """[n] where each token's K and V are written: block id * block size + offset in the block."""
    query_start: Ints
    """[r + 1] first row of each request in the flat arrays."""
    context_lens: Ints
    """[r] tokens that the last row of each request attends to: computed before plus computed now."""
    block_table: Ints
    """[r, widest] block ids of each request, padded with 0."""
    sample_rows: Ints
    """[s] rows of the flat arrays whose logits are sampled."""
    samples: tuple[SampleRow, ...]
    """[s] how each of these rows is sampled."""
    num_decodes: int

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        """Requests that take part in this step."""
        return len(self.context_lens)
