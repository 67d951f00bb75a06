"""The phase that fills the reservation of offline: slots, KV blocks and prefill tokens that online load never takes."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ballast_policy.plan import Reason
from ballast_policy.request import WAITING, Request, computed
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.gate import candidates


@dataclass(frozen=True, slots=True)
class Reserved:
    """What a phase keeps from the phases after it."""

    tokens: int = 0
    """Most prefill tokens for `requests`."""
    requests: Sequence[Request] = ()
    """Offline residents within the reservation that prefill, and have no grant yet."""
    held_blocks: int = 0
    """Free blocks that later admissions leave: for the first offline request that fits the reservation, and for the
    first online request that finds too few."""

    def tokens_without(self, gone: Container[Request]) -> int:
        """Return the prefill tokens that the requests outside `gone` can use."""
        return min(self.tokens, sum(request.remaining for request in self.requests if request not in gone))

    def seconds(self, step: StepDraft, free: int | None = None) -> float:
        """Return the time of these prefill tokens; of those that find blocks if the number `free` is given."""
        gone, seconds, beside = step.draft.gone, 0.0, step.time.num_tokens
        left = self.tokens_without(gone)
        for request in step.offline.ranked(request for request in self.requests if request not in gone):
            tokens = min(left, request.remaining)
            if free is not None:
                tokens = min(tokens, (request.num_blocks + free) * step.config.block_tokens - request.num_computed)
                free -= step.blocks.needed(request, request.num_computed + tokens)
            seconds += step.cost.prefill(request.num_computed, tokens, beside)
            beside += tokens
            left -= tokens
        return seconds


def fill_reservation(step: StepDraft) -> Reserved:
    """Start offline requests in free reserved slots. Return the prefill tokens and the blocks that stay reserved.

    A request that needs more KV than the reservation has left is up to `lend`. It does not stop smaller requests.
    """
    offline, coverage, tokens = step.offline, step.coverage, step.snapshot.reservation.chunk
    if step.config.is_encoder and tokens and _takes_turn(step, tokens):
        tokens = step.time.chunk
        coverage.slots = max(coverage.slots, min(step.most_offline_slots, step.num_slots - 1))
    inside = set(coverage.running[: coverage.slots]) if offline.prefills and coverage.slots else set()
    prefills = [request for request in offline.prefills if request in inside]
    coverage.beside = set(offline.prefills) - inside
    kept = min(tokens, sum(request.remaining for request in prefills))
    num_free = min(coverage.slots, step.num_slots - len(step.online.running)) - len(offline.running)
    held_blocks = _start(step, num_free, tokens - kept, kept) if num_free > 0 else 0
    return Reserved(kept, prefills, held_blocks)


def _takes_turn(step: StepDraft, tokens: int) -> bool:
    """Return whether offline gets a whole step of an encoder: the next online prompt does not fit beside `tokens`.

    In its turn, it may take all slots but one. `Host._count_ahead` leaves the excess of tokens out of later steps.
    """
    online, offline = step.online, step.offline
    first, whole = [[r.num_tokens for r in c.waiting[:1] if step.is_whole(r.num_tokens)] for c in (online, offline)]
    num_free = max(0, step.coverage.slots - len(offline.running))
    takers = (*offline.prefills, *offline.parked, *offline.waiting[:num_free])
    wanted = sum([request.num_tokens - computed(request) for request in takers])
    return bool(first) and first[0] > step.time.chunk - max([min(tokens, wanted), *whole])


def _start(step: StepDraft, num_free: int, tokens: int, kept: int) -> int:
    """Start offline requests beside `kept` tokens. Return the blocks of the first that fits but finds too few free."""
    offline, held_blocks = step.offline, 0
    used = sum([request.num_blocks for request in offline.residents])
    for request in candidates(offline, offline.waiting):
        left = request.num_tokens - computed(request)
        granted = left if left == 1 else min(left, tokens)
        if granted > 0 and step.is_whole(request.num_tokens):
            granted = left if left <= step.time.chunk - kept else 0
        is_behind = held_blocks > 0 and request.phase is WAITING
        is_stopped = is_behind or step.tenant_slots_left.get(request.tenant, 1) < 1
        if granted < 1 or is_stopped or not _fits(step, request, used):
            continue
        whole = step.blocks.whole(request)
        if whole and whole + step.blocks.num_promised > step.blocks.free:
            held_blocks = held_blocks or whole
            continue
        used += whole
        step.start(request, granted, Reason.OFFLINE_RESERVATION)
        tokens -= granted if left > 1 else 0
        num_free -= 1
        if not num_free:
            break
    return held_blocks


def _fits(step: StepDraft, request: Request, used: int) -> bool:
    """Return whether all of a request fits into the reserved blocks beside the `used` blocks of offline."""
    needed, left, tail = step.blocks.whole(request), step.coverage.blocks - used, 0
    if request.phase is WAITING and used:
        tail = -(-min(step.config.tail_tokens, request.max_output - request.num_output) // step.config.block_tokens)
    return not needed or needed + tail <= left
