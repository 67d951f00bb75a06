"""Which requests are preempted when KV blocks are short."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from ballast_policy.request import Request


def unrecoverable(request: Request, block_tokens: int) -> int:
    """Return the tokens to compute again after a preemption: those whose KV is in no shared block."""
    shared = (request.num_blocks - request.num_private_blocks) * block_tokens
    return max(0, request.num_computed - shared)


def choose(
    candidates: Iterable[Request], num_blocks: int, block_tokens: int, growing: Collection[Request] = ()
) -> list[Request] | None:
    """Return requests whose preemption frees at least `num_blocks`; None if all candidates free fewer.

    Lower priorities go first, then the least unrecoverable work. If a later and larger request makes earlier ones
    unnecessary, these are spared, the most expensive first. Each request of `growing` needs one of the `num_blocks`,
    which its preemption saves.
    """
    gains = {request: request.num_private_blocks + (request in growing) for request in candidates}
    if sum(gains.values()) < num_blocks:
        return None
    usable = [request for request, gain in gains.items() if gain]
    usable.sort(key=lambda request: (request.priority, unrecoverable(request, block_tokens), -request.seq))
    chosen: list[Request] = []
    surplus = -num_blocks
    for request in usable:
        if surplus >= 0:
            break
        chosen.append(request)
        surplus += gains[request]
    for request in reversed(chosen.copy()):
        if gains[request] <= surplus:
            chosen.remove(request)
            surplus -= gains[request]
    return chosen
