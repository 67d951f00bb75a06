"""Online's part of a step: prefill goes on, requests are resumed and admitted."""

from __future__ import annotations

from itertools import chain

from ballast_policy.budget import OnlineStep
from ballast_policy.plan import Reason
from ballast_policy.prefill import LATE_SHARE, Prefill
from ballast_policy.request import ONLINE, RUNNING, WAITING, Request, computed
from ballast_policy.reserved import reserved_prefill_seconds
from ballast_policy.slots import Slots
from ballast_policy.step import Step
from ballast_policy.turns import Door


def online_step(step: Step, alone: float = 0.0) -> OnlineStep:
    """Give the part of the step that no lever of the budget touches: online, and the reservation of offline.

    `alone` is what `online_seconds` says, for who goes by it.
    """
    online, offline = step.online, step.offline
    fixed = step.fixed_seconds
    if offline.decodes:
        num_reserved = min(step.num_reserved_held, len(offline.decodes))
        fixed += num_reserved * step.cost.decode(offline.context // len(offline.decodes))
    seconds = fixed + step.seconds - step.fixed_seconds + reserved_prefill_seconds(step)
    resumed = [request for request in step.resume if request.request_class is ONLINE]
    pending = chain(step.ranked(online.prefills), resumed, step.online_waiting)
    return OnlineStep(
        decodes=online.decodes,
        pending=pending if not step.put_off else (request for request in pending if request not in step.put_off),
        alone=alone,
        seconds=seconds,
        fixed=fixed,
    )


def online_seconds(step: Step) -> float:
    """Give what online alone would take for its part.

    Requests that leave sooner meet fewer decodes and less prefill of others on their way.
    """
    online, cost = step.online, step.cost
    prefill = [(r, tokens) for r, tokens in step.prefill_grants.items() if r.request_class is ONLINE]
    resumed = [request for request, _ in step.decode_grants if request.request_class is ONLINE]
    if not (prefill or resumed or online.decodes):
        return 0.0
    num_decodes = len(online.decodes) + len(resumed)
    context = online.context + sum(request.num_tokens for request in resumed)
    seconds = sum([cost.prefill(computed(request), tokens) for request, tokens in prefill])
    return cost.k0 + (seconds + cost.k3 * num_decodes + cost.k4 * context) / (1 + step.snapshot.allowance.crowding)


def serve_online(step: Step) -> None:
    """Grant prefill tokens in order of priority, to residents first among equals, then to who takes a slot.

    They get as many as the decodes beside them can wait for, and who can have its first token in time goes first
    (`Prefill`). Slots are vacant ones, lent ones (`lend` parks who holds them) and those of lower priorities. Once a
    request does not get a slot, blocks or tokens, those behind it get no slot either: only residents go on.
    """
    online = step.online
    is_paced = step.cost.is_trusted and (online.prefills or online.parked or step.online_waiting)
    prefill = Prefill(step, online_step(step) if is_paced else None)
    slots = Slots(step, ONLINE)
    door = Door(step)
    for request in online.prefills:
        step.promise(request)
    first = prefill.first_put_off()
    if first is not None:
        _serve_late(step, first, prefill.tokens(first, LATE_SHARE), slots)
    for request in prefill.order(door):
        if request in step.gone:
            continue
        if request.phase is RUNNING or request in step.prefill_grants:
            _go_on(step, request, prefill.tokens(request))
            continue
        if door.is_shut_for(request):
            continue
        left = request.num_tokens - computed(request)
        tokens = 1 if left == 1 else prefill.tokens(request)
        if not slots.has_one_for(request):
            door.close(request, Reason.NO_SLOT)
        elif tokens < 1:
            door.close(request, Reason.CHUNK_SPENT)
        elif not _find_kv(step, request):
            step.hold_blocks += step.whole(request)
            door.close(request, Reason.NO_KV)
        else:
            _start(step, request, tokens, slots)


def _serve_late(step: Step, request: Request, tokens: int, slots: Slots) -> None:
    """Let one that is put off come nearer to its end, if it can; it keeps nobody else waiting."""
    if request.phase is RUNNING and tokens:
        _go_on(step, request, tokens)
    elif tokens and slots.has_one_for(request) and _find_kv(step, request):
        _start(step, request, tokens, slots)


def _start(step: Step, request: Request, tokens: int, slots: Slots) -> None:
    slots.make_vacant()
    if request.phase is WAITING and step.online_peak is not None:
        step.online_peak.add(request, step.whole(request))
    step.start(request, tokens, Reason.ONLINE_FIRST)


def _go_on(step: Step, request: Request, tokens: int) -> None:
    """Prefill one that holds a slot, as far as there are blocks; on top of what is granted to it."""
    granted = step.prefill_grants.get(request, 0)
    done = computed(request) + granted
    needed = step.needed(request, done + tokens) - (step.needed(request, done) if granted else 0)
    reason = Reason.CHUNK_SPENT
    if tokens > 0 and needed > step.free and not step.reclaim(step.lent_kv, needed):
        reason = Reason.NO_KV
        tokens = min(tokens, (max(request.num_blocks, step.blocks(done)) + step.free) * step.block_tokens - done)
    if tokens > 0:
        step.grant(request, tokens)
    elif not granted:
        step.explain(request, reason)


def _find_kv(step: Step, request: Request) -> bool:
    """Have the blocks for the whole of a request free.

    A newcomer leaves one for each online request to grow by, and what is held for others, and fits at the peak of
    online; a parked one need not.
    """
    whole = step.needed(request, request.num_tokens)
    needed = whole + step.promised_blocks
    if request.phase is WAITING:
        if not _fits_at_peak(step, request, whole):
            return False
        needed += step.hold_blocks + step.online.num_running
    elif not whole:
        return True
    if step.free >= needed or step.reclaim(step.lent_kv, needed, newcomer=request):
        return True
    lower = [other for other in step.online.everyone if other.priority < request.priority]
    return bool(lower) and step.reclaim(chain(step.lent_kv, lower), needed, newcomer=request)


def _fits_at_peak(step: Step, request: Request, whole: int) -> bool:
    """Tell whether online answers of the usual length will find blocks, with one more among them.

    What is lent, and what lower priorities hold, counts as free: it is taken back when it is needed, not before.
    """
    peak = step.online_peak
    if peak is None or not (step.online.num_started or step.online.everyone):
        return True
    free = step.free - whole - step.promised_blocks - step.hold_blocks
    missing = peak.missing(request, whole, free)
    if missing <= free:
        return True
    lower = [other for other in step.online.everyone if other.priority < request.priority]
    return missing - free <= sum(other.num_private_blocks for other in chain(step.lent_kv, lower))
