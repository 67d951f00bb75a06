"""Batches made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ballast_engine.batch import Batch, SampleRow
from ballast_engine.executor import Executor
from ballast_engine.request import SamplingParams


@dataclass
class Part:
    """What one request contributes to a batch by hand."""

    tokens: Sequence[int]
    start: int
    blocks: Sequence[int]
    sampling: SamplingParams | None = None
    """None samples nothing; otherwise the last row is sampled."""
    every_row: bool = False
    """Sample every row of it."""


def make_batch(parts: Sequence[Part], block_tokens: int) -> Batch:
    """A batch of parts; decodes must come first."""
    positions = [np.arange(part.start, part.start + len(part.tokens)) for part in parts]
    slots = [
        np.asarray(part.blocks)[where // block_tokens] * block_tokens + where % block_tokens
        for part, where in zip(parts, positions, strict=True)
    ]
    starts = np.cumsum([0] + [len(part.tokens) for part in parts])
    table = np.zeros((len(parts), max(len(part.blocks) for part in parts)), dtype=np.int64)
    rows: list[int] = []
    samples: list[SampleRow] = []
    for index, part in enumerate(parts):
        table[index, : len(part.blocks)] = part.blocks
        if part.sampling is None:
            continue
        for row in range(0 if part.every_row else len(part.tokens) - 1, len(part.tokens)):
            rows.append(int(starts[index]) + row)
            samples.append(SampleRow(sampling=part.sampling, position=part.start + row + 1))
    is_decode = [len(part.tokens) == 1 for part in parts]
    return Batch(
        token_ids=np.concatenate([np.asarray(part.tokens, dtype=np.int64) for part in parts]),
        positions=np.concatenate(positions).astype(np.int64),
        slot_mapping=np.concatenate(slots).astype(np.int64),
        query_start=starts.astype(np.int64),
        context_lens=np.array([part.start + len(part.tokens) for part in parts], dtype=np.int64),
        block_table=table,
        sample_rows=np.array(rows, dtype=np.int64),
        samples=tuple(samples),
        num_decodes=next((index for index, one in enumerate(is_decode) if not one), len(parts)),
    )


@torch.inference_mode()
def logits_of(executor: Executor, batch: Batch) -> torch.Tensor:
    """The logits `[s, vocabulary]` of the sample rows."""
    computation = executor.model.hidden(batch)
    try:
        next(computation)
    except StopIteration as end:
        return executor.model.logits(end.value, batch.sample_rows)
    raise AssertionError("suspended without an interrupt")
