"""The block tables of residents, and the flat batch of a step."""

from __future__ import annotations

from collections.abc import Sequence as Items

import numpy as np

from ballast_engine.batch import Batch, SampleRow
from ballast_engine.sequence import Sequence


class BlockTables:
    """One row of block ids per resident, padded with 0."""

    def __init__(self, block_tokens: int, widest: int) -> None:
        self._block_tokens = block_tokens
        self._table = np.zeros((64, widest), np.int64)
        self._unused = list(range(63, -1, -1))

    def take_row(self) -> int:
        """Return a free row for a new resident."""
        if not self._unused:
            rows = len(self._table)
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
            self._unused = list(range(2 * rows - 1, rows - 1, -1))
        return self._unused.pop()

    def write(self, sequence: Sequence, start: int) -> None:
        """Copy the blocks of a request into its row, from index `start` on."""
        self._table[sequence.row, start : len(sequence.blocks)] = sequence.blocks[start:]

    def free_row(self, sequence: Sequence) -> None:
        """Free the row of a request that gives up its KV."""
        self._table[sequence.row, : len(sequence.blocks)] = 0
        self._unused.append(sequence.row)
        sequence.row = -1

    def assemble(self, decodes: Items[Sequence], chunks: Items[tuple[Sequence, int]]) -> Batch:
        """Return the batch of a step. `decodes` compute one token each, `chunks` the number beside them."""
        size = self._block_tokens
        members = [*decodes, *(sequence for sequence, _ in chunks)]
        rows = np.array([sequence.row for sequence in members], np.int64)
        starts = np.array([sequence.request.num_computed for sequence in members], np.int64)
        counts = np.ones(len(members), np.int64)
        counts[len(decodes) :] = [num for _, num in chunks]
        query_start = np.zeros(len(members) + 1, np.int64)
        np.cumsum(counts, out=query_start[1:])
        context_lens = starts + counts

        if chunks:
            owner = np.repeat(np.arange(len(members)), counts)
            positions = np.arange(query_start[-1]) - query_start[owner] + starts[owner]
            flat_rows = rows[owner]
        else:
            positions, flat_rows = starts, rows
        parts = [np.array([s.tokens[s.request.num_computed] for s in decodes], np.int64)]
        parts += [s.tokens[s.request.num_computed : s.request.num_computed + num] for s, num in chunks]
        slot_mapping = self._table[flat_rows, positions // size] * size + positions % size

        lengths = np.array([sequence.request.num_tokens for sequence in members], np.int64)
        samplers = np.flatnonzero(context_lens == lengths)
        return Batch(
            token_ids=np.concatenate(parts) if chunks else parts[0],
            positions=positions,
            slot_mapping=slot_mapping,
            query_start=query_start,
            context_lens=context_lens,
            block_table=self._table[rows, : -(-int(context_lens.max()) // size)],
            sample_rows=query_start[samplers + 1] - 1,
            samples=tuple(
                SampleRow(members[i].generation.sampling, members[i].request.num_tokens) for i in samplers.tolist()
            ),
            num_decodes=len(decodes),
        )
