"""Blocks for the next tokens of who decodes: the first claim on KV in every step."""

from __future__ import annotations

from collections.abc import Collection

from ballast_policy.plan import Reason
from ballast_policy.request import Request
from ballast_policy.step import Step


def grow(step: Step) -> None:
    """Take the blocks that online decodes begin, and put those aside that the reservation of offline needs.

    Where they are short, offline gives up KV beyond its reservation if that suffices; else the last online requests
    are preempted, never the first; who still cannot grow is parked.
    """
    online, offline = step.online, step.offline
    num_reserved = min(len(offline.growing), step.reserved)
    if len(online.growing) + len(offline.growing) > step.free:
        num_reserved = _settle(step)
    step.count_decodes(online)
    step.growth_blocks = min(step.free, num_reserved)
    step.free -= step.growth_blocks


def _settle(step: Step) -> int:
    """Find blocks, or park who gets none; give how many decodes within the reserved slots have theirs."""
    online, growing = step.online, set(step.offline.growing)
    inside = [request for request in step.offline_running[: step.reserved] if request in growing]
    covered = min(len(inside), max(0, step.reserved_kv - sum(request.num_blocks for request in step.protected)))
    if len(online.growing) + covered > step.free:
        _make_room(step, covered)
    step.leave_slots(step.ranked(online.growing)[step.free :], Reason.NO_KV)
    if len(online.growing) + len(inside) > step.free:
        make_offline_room(step, inside, len(online.growing))
    # Who cannot grow is parked now, so that its reserved slot can be lent in this step.
    inside = [request for request in inside if request not in step.gone]
    room = step.free - len(online.growing)
    step.leave_slots(inside[room:], Reason.NO_KV)
    return min(room, len(inside))


def make_offline_room(step: Step, growing: Collection[Request], beside: int = 0) -> None:
    """Preempt offline so that its own decodes can grow, on lent KV first, never the first in order."""
    first = step.offline_running[:1]
    needed = len(growing) + beside
    lent = [request for request in step.lent_kv if request not in first]
    if not step.reclaim(lent, needed, growing=growing):
        everyone = [request for request in step.offline.everyone if request not in first]
        step.reclaim(everyone, needed, growing=growing)


def _make_room(step: Step, num_reserved: int) -> None:
    online = step.online
    if step.reclaim(step.lent_kv, len(online.growing) + num_reserved):
        return
    everyone = step.ranked(online.everyone)
    while len(online.growing) + num_reserved > step.free and len(everyone) > 1:
        step.give_up(everyone.pop(), Reason.NO_KV)
    if len(online.growing) > step.free:
        step.reclaim(step.offline.everyone, len(online.growing))
