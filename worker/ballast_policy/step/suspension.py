"""The step that is nested in a suspended step: new online requests prefill at once."""

from __future__ import annotations

from collections.abc import Collection
from math import inf

from ballast_policy.plan import Reason, StepParts, StepPlan
from ballast_policy.request import ONLINE, PARKED, Request, computed
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.budget import SUSPENDED_SHARE
from ballast_policy.step.draft import StepDraft


def suspendable_seconds(step: StepDraft) -> float:
    """Return how long the step may be suspended: a TTFT, or a share of the time until an online token of it is late.

    Tokens that are late in any case do not count. A step with online decodes of at most twice the fixed cost of a
    nested step is not suspended: it is cheaper to wait for its end. Half of it changes 0.5 points (bursts-40-32).
    """
    seconds, online, draft = step.time.seconds, step.online, step.draft
    if not (step.cost.is_trusted and step.config.can_suspend) or step.config.ttft == inf:
        return 0.0
    decodes = online.decodes + [request for request in draft.decodes if request.request_class is ONLINE]
    if decodes and seconds <= 2 * step.cost.k0:
        return 0.0
    now, slack = step.snapshot.now, inf
    end = now + seconds
    for request in decodes:
        soon, late = sorted((request.arrival + request.ttft, request.first_token))
        budgeted = request.num_output * request.tpot if request.num_output else 0.0
        due = (soon if soon + budgeted >= now else late) + budgeted
        if now <= due < end + slack:
            slack = due - end
    for request in draft.prefill_grants:
        if request.request_class is ONLINE and (due := request.next_deadline) >= end:
            slack = min(slack, due - end)
    return max(0.0, min(step.config.ttft, SUSPENDED_SHARE * slack))


def plan_nested(snapshot: EngineSnapshot, in_flight: Collection[Request], seconds: float) -> StepPlan:
    """Return a plan that admits new online requests whose first token takes at most `seconds`.

    The suspended step writes the KV of `in_flight`: none of these requests is preempted or gets a grant. An offline
    request that borrows its slot may be parked. Its token in flight still counts when its step ends.
    """
    step = StepDraft(snapshot)
    online, offline, blocks, cost = step.online, step.offline, step.blocks, step.cost
    busy = set(in_flight)
    parked = [request for request in step.coverage.reclaimable if request.phase is PARKED and request not in busy]
    for request in online.prefills:
        blocks.promise(request)
    for request in online.waiting:
        done = computed(request)
        left = request.num_tokens - done
        if step.num_free_online_slots < 1 or left > step.time.chunk:
            break
        beside = step.time.num_tokens
        takes = cost.decode(request.num_tokens, beside) if left == 1 else cost.prefill(done, left, beside)
        if step.time.seconds + takes > seconds:
            break
        needed = blocks.whole(request) + blocks.num_promised + len(online.running)
        idle = [other for other in parked if other not in step.draft.gone]
        if blocks.free < needed and not step.reclaim(idle, blocks.missing(needed, request)):
            break
        step.start(request, left, Reason.ONLINE_FIRST)
    excess = offline.num_held - step.most_offline_slots
    if online.started and excess > 0:
        step.park(step.coverage.running[-excess:], Reason.SLOT_RECLAIMED)
    return step.as_plan(seconds, StepParts(prefill=step.time.seconds))
