"""Static batching, the baseline of the benchmarks: a batch is let in, runs to its end, and only then comes the next.

It is a kind baseline: prompts are not padded, rows that have ended cost nothing more, and each answer is told when it
is complete. What it lacks is what iteration-level scheduling adds: a slot that falls empty stays empty until the last
request of the batch has ended, and nobody joins in between.
"""

from __future__ import annotations

from ballast_policy.plan import Plan
from ballast_policy.request import Request
from ballast_policy.snapshot import Snapshot


def plan_static(snapshot: Snapshot) -> Plan:
    """Continue the batch at hand; let the next one in, with its prompts in one piece, when none is left."""
    if snapshot.residents:
        return Plan(grants=tuple((request, request.remaining) for request in snapshot.residents))
    batch = _next_batch(snapshot)
    return Plan(grants=tuple((request, request.num_tokens - request.num_cached) for request in batch), admit=batch)


def _next_batch(snapshot: Snapshot) -> tuple[Request, ...]:
    """As many as have slots and, at their longest, KV."""
    config = snapshot.config
    batch: list[Request] = []
    free = snapshot.free_blocks
    for request in snapshot.waiting[: config.slots]:
        longest = request.num_prompt + request.max_output
        free -= -(-longest // config.block_tokens)
        if free < 0:
            break
        batch.append(request)
    return tuple(batch)
