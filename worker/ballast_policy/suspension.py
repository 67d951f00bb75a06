"""The step nested in a suspended one: newcomers prefill at once, and nothing of the step in flight is touched."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from ballast_policy.plan import Plan, Reason
from ballast_policy.request import OFFLINE, ONLINE, PARKED, Request, computed
from ballast_policy.snapshot import Snapshot
from ballast_policy.step import Step

_SHARE = 0.85
"""Of what decodes can wait that a nested step may take: all of it would leave answers that end at once without a
moment to spare."""


def suspendable_seconds(step: Step) -> float:
    """Give how long the step may stand still: until the first online token in it would come too late.

    Tokens that come too late anyhow count for nothing: prefill of newcomers takes from decodes what they can wait
    sooner or later. Beside online decodes a step may not be suspended where waiting for its end is cheaper: where it is
    no longer than twice the fixed costs of a nested one.
    """
    if not (step.cost.is_trusted and step.config.can_suspend) or step.config.ttft == inf:
        return 0.0
    resumed = [request for request, _ in step.decode_grants if request.request_class is ONLINE]
    decodes = step.online.decodes + resumed if resumed else step.online.decodes
    if decodes and step.seconds <= 2 * step.cost.k0:
        return 0.0
    end = step.snapshot.now + step.seconds
    slack = step.config.ttft
    now = step.snapshot.now
    for request in decodes:
        soon, late = request.arrival + request.ttft, request.first_token
        if late < soon:
            soon, late = late, soon
        budgeted = request.num_output * request.tpot if request.num_output else 0.0
        due = soon + budgeted
        if due < now:
            due = late + budgeted
        if now <= due < end + slack:
            slack = due - end
    for request in step.prefill_grants:
        if request.request_class is ONLINE and (due := request.next_deadline) >= end:
            slack = min(slack, due - end)
    return _SHARE * max(0.0, slack)


def plan_nested(snapshot: Snapshot, in_flight: Collection[Request], seconds: float) -> Plan:
    """Admit online newcomers that have their first token within `seconds`. Pure.

    The KV of `in_flight`, who takes part in the suspended step, is being written: none of them is preempted or gets a
    grant. A lent one may be parked for its slot; the token it has in flight still counts when its step ends.
    """
    step = Step(snapshot)
    busy = set(in_flight)
    parked = [request for request in step.lent_kv if request.phase is PARKED and request not in busy]
    for request in step.online.prefills:
        step.promise(request)
    for request in step.online_waiting:
        left = request.num_tokens - computed(request)
        if step.num_vacant(ONLINE) < 1 or left > step.chunk:
            break
        cost = step.cost.decode(request.num_tokens) if left == 1 else step.cost.prefill(computed(request), left)
        if step.seconds + cost > seconds:
            break
        needed = step.whole(request) + step.promised_blocks + step.online.num_running
        lent = (other for other in parked if other not in step.gone)
        if step.free < needed and not step.reclaim(lent, needed, newcomer=request):
            break
        step.start(request, left, Reason.ONLINE_FIRST)
    excess = -step.num_vacant(OFFLINE)
    vacated = step.config.slots - step.online.num_held
    excess = max(excess, step.offline.num_running - vacated)
    if step.admit and excess > 0:
        step.leave_slots(step.offline_running[-excess:], Reason.SLOT_RECLAIMED)
    return step.as_plan(seconds, online_seconds=step.seconds)
