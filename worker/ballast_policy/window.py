"""The batch window: an idle engine waits a moment for what comes together, rather than begin with the first alone."""

from __future__ import annotations

from math import inf

from ballast_policy.snapshot import Snapshot

_MOST_WAIT = 0.5
"""Share of a TTFT that may go into waiting for others."""


def begins_at(snapshot: Snapshot) -> float:
    """Give when an idle engine begins with what waits: `first arrival + window`; -inf where it does not wait.

    It waits for no more than a step can take (its slots, its prefill tokens), and spends no more than half of
    anybody's TTFT, so that the first token does not come late.
    """
    config, waiting = snapshot.config, snapshot.waiting
    if not config.batch_window or snapshot.residents or not waiting:
        return -inf
    sizes = [request.num_tokens - request.num_cached for request in waiting]
    if len(waiting) >= config.slots or sum(sizes) >= config.chunk_tokens:
        return -inf
    cost = snapshot.cost
    takes = cost.k0 + sum(cost.prefill(0, size) for size in sizes) if cost.is_trusted else 0.0
    first = min(request.arrival for request in waiting)
    soon = min(request.arrival + _MOST_WAIT * request.ttft for request in waiting)
    return min(first + config.batch_window, soon - takes)
