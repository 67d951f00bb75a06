"""The reservation of offline: slots, KV blocks and prefill tokens that no online load takes away."""

from __future__ import annotations

from ballast_policy.plan import Reason
from ballast_policy.request import WAITING, Request, computed
from ballast_policy.step import Step
from ballast_policy.turns import candidates


def fill_reservation(step: Step) -> None:
    """Give vacant slots to offline until it holds its reserved ones, and keep prefill tokens for who prefills there.

    A request that needs more KV than the reservation has left counts on lent KV, which `lend` decides; it does not
    keep a smaller one behind it from the reservation.
    """
    offline, config = step.offline, step.config
    tokens = step.snapshot.reservation.chunk
    if offline.prefills and step.reserved:
        inside = set(step.offline_running[: step.reserved])
        step.reserved_prefills = [request for request in offline.prefills if request in inside]
        step.reserved_tokens = tokens
        tokens -= step.reserved_chunk
    vacant = min(step.reserved, config.slots - step.online.num_running) - offline.num_running
    if vacant > 0:
        _give_slots(step, vacant, tokens)
    step.reserved_tokens = step.reserved_chunk


def _give_slots(step: Step, vacant: int, tokens: int) -> None:
    offline = step.offline
    for request in candidates(step, offline.parked, step.offline_waiting):
        left = request.num_tokens - computed(request)
        granted = 1 if left == 1 else min(left, tokens)
        is_behind = step.hold_blocks > 0 and request.phase is WAITING
        if granted < 1 or is_behind or not step.tenant_has_room(request):
            continue
        missing = _missing_blocks(step, request)
        if missing is None:
            continue
        if missing > 0:
            step.hold_blocks = step.hold_blocks or step.whole(request)
            continue
        offline.num_blocks += step.whole(request)
        step.start(request, granted, Reason.OFFLINE_RESERVATION)
        step.count_slot(request)
        tokens -= granted if left > 1 else 0
        vacant -= 1
        if not vacant:
            break
    if step.admit:
        step.offline_waiting = [request for request in step.offline_waiting if request not in step.admit]


def _missing_blocks(step: Step, request: Request) -> int | None:
    """Give how many blocks are not free yet for the whole of a request; None if it does not fit the reservation."""
    needed = step.whole(request)
    left = step.reserved_kv - step.offline.num_blocks
    is_waiting = request.phase is WAITING
    tail = step.tail_blocks(request) if is_waiting and step.offline.num_blocks else 0
    if needed and needed + tail > left:
        return None
    return max(0, needed + step.promised_blocks - step.free) if needed else 0


def reserved_prefill_seconds(step: Step, free: int | None = None) -> float:
    """Give the time that the kept prefill tokens take: they go to who prefills within the reservation, in order.

    Once it is known that no more than `free` blocks will be, tokens that find none of them take no time.
    """
    left, seconds = step.reserved_chunk, 0.0
    if not left:
        return seconds
    for request in step.ranked(request for request in step.reserved_prefills if request not in step.gone):
        tokens = min(left, request.remaining)
        if free is not None:
            tokens = min(tokens, (request.num_blocks + free) * step.block_tokens - request.num_computed)
            free -= step.needed(request, request.num_computed + tokens)
        seconds += step.cost.prefill(request.num_computed, tokens)
        left -= tokens
    return seconds
