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
    """Continue the batch at hand; let the next one in when none is left. Prefill all of it, then decode all of it."""
    admit = () if snapshot.residents else _next_batch(snapshot)
    members = (*snapshot.residents, *admit)
    prefills = [request for request in members if request.remaining > 1]
    if not prefills:
        return Plan(grants=tuple((request, 1) for request in members), admit=admit)
    grants = []
    left = snapshot.config.chunk_tokens
    for request in prefills:
        tokens = min(left, request.remaining - (request.num_cached if request in admit else 0))
        if tokens:
            grants.append((request, tokens))
            left -= tokens
    granted = {request.seq for request, _ in grants}
    return Plan(grants=tuple(grants), admit=tuple(request for request in admit if request.seq in granted))


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
