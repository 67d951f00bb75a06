"""Static batching, the baseline of the benchmarks: a batch is let in, runs to its end, and only then comes the next.

Rows that have ended are computed on as padding until the longest has ended, as in a batch of fixed shape; nobody joins
in between. It is a kind baseline all the same: prompts are not padded to the longest, and each answer is told when it
is complete.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import replace

from ballast_engine.engine import BallastEngine
from ballast_engine.request import FinishReason, Output
from ballast_engine.scheduler import Step
from ballast_engine.sequence import Sequence
from ballast_policy.plan import Plan
from ballast_policy.request import Phase, Request
from ballast_policy.snapshot import Snapshot


def plan_static(snapshot: Snapshot) -> Plan:
    """Continue the current batch; admit the next one, with its prompts in one piece, when none is left."""
    if snapshot.residents:
        return Plan(grants=tuple((request, request.remaining) for request in snapshot.residents))
    batch = _next_batch(snapshot)
    return Plan(grants=tuple((request, request.num_tokens - request.num_cached) for request in batch), admit=batch)


class StaticEngine(BallastEngine):
    """An engine whose rows stay in the batch until the last of them has ended."""

    @property
    def _padding(self) -> list[Sequence]:
        """Residents whose answer is complete."""
        return [s for s in self._scheduler.live.values() if self._by_id.get(s.request_id) is not s]

    def _release(self, sequence: Sequence, reason: FinishReason) -> None:
        is_complete = reason in {FinishReason.STOP, FinishReason.LENGTH}
        if not is_complete or sequence.request.phase is Phase.WAITING:
            super()._release(sequence, reason)
        self._drop_padding()

    def _drop_padding(self) -> None:
        """Free the padding once nothing else is resident, and rows that the context has no room for."""
        padding = self._padding
        is_over = len(padding) == len(self._scheduler.residency)
        for sequence in padding:
            if is_over or sequence.request.num_tokens > self.max_tokens:
                self._scheduler.leave(sequence, self._clock(), is_complete=True)

    def _finish(self, step: Step, tokens: Items[int]) -> list[Output]:
        padding = set(self._padding)
        decodes, drawn = [], []
        for sequence, token in zip(step.decodes, tokens, strict=False):
            if sequence in padding:
                self._scheduler.residency.settle(sequence, 1)
                sequence.append(token)
            else:
                decodes.append(sequence)
                drawn.append(token)
        outputs = super()._finish(replace(step, decodes=decodes), [*drawn, *tokens[len(step.decodes) :]])
        self._drop_padding()
        return outputs

    def _fail(self, members: Items[Sequence], error: Exception) -> list[Output]:
        padding = set(self._padding)
        return super()._fail([sequence for sequence in members if sequence not in padding], error)

    def check_integrity(self) -> None:
        """Compare the books; padding is in the engine and has no caller any more."""
        self._scheduler.check_integrity()


def _next_batch(snapshot: Snapshot) -> tuple[Request, ...]:
    """As many as have slots and, were all of them as long as the longest prompt and the longest answer, KV."""
    config = snapshot.config
    num_prompt = num_output = num = 0
    for request in snapshot.waiting[: config.slots]:
        num_prompt, num_output = max(num_prompt, request.num_prompt), max(num_output, request.max_output)
        if num and (num + 1) * -(-(num_prompt + num_output) // config.block_tokens) > snapshot.free_blocks:
            break
        num += 1
    return tuple(snapshot.waiting[:num])
