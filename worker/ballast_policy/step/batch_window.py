"""The batch window: an idle engine waits briefly for requests that arrive together, instead of starting with one."""

from __future__ import annotations

from math import inf

from ballast_policy.snapshot import EngineSnapshot

_MOST_WAIT = 0.5
"""Share of a TTFT that may be spent on waiting for other requests."""


def begins_at(snapshot: EngineSnapshot) -> float:
    """Return when an idle engine starts a step: `first arrival + window`, or -inf if it does not wait.

    The engine waits for no more requests than a step can take (slots, prefill tokens). It spends at most half of any
    request's TTFT, so that the first token is not late.
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
