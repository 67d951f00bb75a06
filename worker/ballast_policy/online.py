"""Online's part of a step: prefill goes on, requests are resumed and admitted."""

from __future__ import annotations

from itertools import chain

from ballast_policy.plan import Reason
from ballast_policy.request import Phase, Request, RequestClass
from ballast_policy.slots import Slots
from ballast_policy.step import Step, computed
from ballast_policy.turns import Door, turns


def serve_online(step: Step) -> None:
    """Grant prefill tokens in order of priority, to residents first among equals, then to who takes a slot.

    Slots are vacant ones, lent ones (`lend` parks who holds them) and those of lower priorities. Once a request does
    not get a slot, blocks or tokens, those behind it get no slot either: only residents go on.
    """
    online = step.online
    slots = Slots(step, RequestClass.ONLINE)
    door = Door(step)
    step.promised.update((request, step.whole(request)) for request in online.prefills)
    for request in turns(step, online.prefills, online.parked, step.online_waiting, door):
        if request.phase is Phase.RUNNING:
            _go_on(step, request)
            continue
        if door.is_shut_for(request):
            continue
        left = request.num_tokens - computed(request)
        tokens = 1 if left == 1 else min(left, step.chunk - step.reserved_chunk)
        if not slots.has_one_for(request):
            door.close(request, Reason.NO_SLOT)
        elif tokens < 1:
            door.close(request, Reason.CHUNK_SPENT)
        elif not _find_kv(step, request):
            step.hold_blocks += step.whole(request)
            door.close(request, Reason.NO_KV)
        else:
            slots.make_vacant()
            step.start(request, tokens, Reason.ONLINE_FIRST)


def _go_on(step: Step, request: Request) -> None:
    tokens = min(request.remaining, step.chunk - step.reserved_chunk)
    if tokens < 1:
        step.explain(request, Reason.CHUNK_SPENT)
        return
    needed = step.needed(request, request.num_computed + tokens)
    if needed > step.free and not step.reclaim(step.lent_kv, needed):
        tokens = min(tokens, (request.num_blocks + step.free) * step.block_tokens - request.num_computed)
    if tokens < 1:
        step.explain(request, Reason.NO_KV)
        return
    step.grant(request, tokens)


def _find_kv(step: Step, request: Request) -> bool:
    """Have the blocks for the whole of a request free.

    A newcomer leaves one for each online request to grow by, and what is held for others; a parked one need not.
    """
    beside = step.promised_blocks
    if request.phase is Phase.WAITING:
        beside += step.hold_blocks + step.online.num_running
    elif not step.whole(request):
        return True
    needed = step.whole(request) + beside
    if step.free >= needed or step.reclaim(step.lent_kv, needed, newcomer=request):
        return True
    lower = [other for other in step.online.everyone if other.priority < request.priority]
    return bool(lower) and step.reclaim(chain(step.lent_kv, lower), needed, newcomer=request)
