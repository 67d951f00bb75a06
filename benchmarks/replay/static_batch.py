"""Static batching, the baseline of the benchmarks: a batch runs to its end before the next batch is admitted.

Rows that have ended are computed as padding until the last row of the batch has ended, as in a batch of fixed shape.
The baseline is kind: prompts are not padded to the longest, and each answer is returned when it is complete.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ballast_engine.batch import Batch, Ints
from ballast_engine.build import build_engine
from ballast_engine.engine import BallastEngine, Runner
from ballast_engine.footprint import Footprint
from ballast_engine.options import EngineOptions
from ballast_engine.suspension import Interrupt, Suspended
from ballast_policy.plan import StepPlan
from ballast_policy.request import Request
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig


def build_static(options: EngineOptions, policy: PolicyConfig) -> BallastEngine:
    """Return an engine that batches statically, with the slots of the policy."""
    batches: list[StaticBatch] = []

    def wrap(executor: Runner) -> Runner:
        batches.append(StaticBatch(executor, policy.slots))
        return batches[0]

    def plan(snapshot: EngineSnapshot) -> StepPlan:
        return batches[0].plan(snapshot)

    return build_engine(options, policy, planner=plan, wrap=wrap)


class StaticBatch:
    """Planner and executor of an engine: the planner admits whole batches, and the executor adds the padding.

    A row of padding computes the same as a row that has not ended, and writes to blocks outside of the engine.
    """

    def __init__(self, executor: Runner, slots: int) -> None:
        self.block_tokens = executor.block_tokens
        self.num_blocks = executor.num_blocks - -(-slots // executor.block_tokens)
        self.vocab_size = executor.vocab_size
        self.max_model_len = executor.max_model_len
        self._executor = executor
        self._padding_slots = self.num_blocks * self.block_tokens + np.arange(slots)
        self._num_rows = 0

    @property
    def footprint(self) -> Footprint:
        """The cost of one token of the model on this machine."""
        return self._executor.footprint

    def plan(self, snapshot: EngineSnapshot) -> StepPlan:
        """Continue the current batch. When it has ended, admit the next batch, with its prompts in one piece."""
        if snapshot.residents:
            return StepPlan(grants=tuple((request, request.remaining) for request in snapshot.residents))
        batch = _next_batch(snapshot)
        self._num_rows = len(batch)
        return StepPlan(
            grants=tuple((request, request.num_tokens - request.num_cached) for request in batch), admit=batch
        )

    def run(self, batch: Batch, interrupt: Interrupt | None) -> Ints | Suspended:
        """Compute a batch and its padding; return the tokens of the batch alone."""
        num_padding = self._num_rows - batch.num_requests
        if num_padding <= 0 or batch.num_decodes < batch.num_requests:
            return self._executor.run(batch, interrupt)
        drawn = self._executor.run(_padded(batch, self._padding_slots[:num_padding]), None)
        assert not isinstance(drawn, Suspended)
        return drawn[: len(batch.samples)]

    def resume(self, suspended: Suspended, interrupt: Interrupt | None) -> Ints | Suspended:
        """Continue a suspended step; no plan of this class allows a suspension."""
        return self._executor.resume(suspended, interrupt)


def _padded(batch: Batch, slots: Ints) -> Batch:
    """Add a copy of a row for each of `slots`, to which the copy writes; each row of the batch decodes one token."""
    num = batch.num_requests
    rows = np.arange(num + len(slots))
    copied = rows % num
    return replace(
        batch,
        token_ids=batch.token_ids[copied],
        positions=batch.positions[copied],
        slot_mapping=np.concatenate([batch.slot_mapping, slots]),
        query_start=np.append(rows, len(rows)),
        context_lens=batch.context_lens[copied],
        block_table=batch.block_table[copied],
        sample_rows=rows,
        samples=tuple(batch.samples[row] for row in copied),
        num_decodes=len(rows),
    )


def _next_batch(snapshot: EngineSnapshot) -> tuple[Request, ...]:
    """Return the requests for which there are slots and, if all were as long as the longest of them, KV blocks."""
    config = snapshot.config
    num_prompt = num_output = num = 0
    for request in snapshot.waiting[: config.slots]:
        num_prompt, num_output = max(num_prompt, request.num_prompt), max(num_output, request.max_output)
        if num and (num + 1) * -(-(num_prompt + num_output) // config.block_tokens) > snapshot.free_blocks:
            break
        num += 1
    return tuple(snapshot.waiting[:num])
