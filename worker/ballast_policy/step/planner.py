"""Plan the next step: each phase takes what the phases before it leave. An idle engine may wait for a batch.

`docs/explanation/how-slots-are-shared-details.md` describes the phases, and which request keeps its slot.
"""

from __future__ import annotations

from math import inf

from ballast_policy.plan import Because, Reason, StepPlan
from ballast_policy.request import ONLINE
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.budget import idle_budget, step_budget
from ballast_policy.step.decode_growth import grow
from ballast_policy.step.draft import StepDraft
from ballast_policy.step.lending import lend, preempt_above_caps
from ballast_policy.step.online import online_parts, online_step, serve_online
from ballast_policy.step.reserved import fill_reservation
from ballast_policy.step.suspension import suspendable_seconds

_MOST_WAIT = 0.5
"""Most share of a TTFT that an idle engine waits, and leaves the rest to the queue (`tests/policy/test_window.py`)."""


def plan(snapshot: EngineSnapshot) -> StepPlan:
    """Return the plan of the next step. The same snapshot gives the same plan; nothing in the snapshot changes."""
    wait_until = starts_at(snapshot)
    if snapshot.now < wait_until:
        return StepPlan(because=tuple(Because(r, Reason.BATCH_WINDOW) for r in snapshot.waiting), wait_until=wait_until)
    step = StepDraft(snapshot)
    preempt_above_caps(step)
    growth_blocks = grow(step)
    reserved = fill_reservation(step)
    reserved, late = serve_online(step, reserved)
    alone, parts = online_parts(step)
    has_online, budget = bool(step.online.waiting or step.online.residents or step.online.started), inf
    if step.cost.is_trusted:
        part = online_step(step, reserved, late)
        budget = step_budget(snapshot, part, alone) if has_online else idle_budget(snapshot, part)
    expects_online = has_online or snapshot.now <= snapshot.expectation.online_until
    lend(step, reserved, growth_blocks=growth_blocks, budget=budget, expects_online=expects_online)
    _break_deadlock(step)
    _limit_residents(step)
    parts = parts._replace(offline=max(0.0, step.time.seconds - alone))
    return step.as_plan(budget, parts, suspendable_seconds=suspendable_seconds(step))


def starts_at(snapshot: EngineSnapshot) -> float:
    """Return when an idle engine starts a step: `first arrival + window`, or -inf if it does not wait for a batch.

    It does not wait if the requests fill a step (slots, prefill tokens), nor so long that a first token is late.
    """
    config, waiting, cost = snapshot.config, snapshot.waiting, snapshot.cost
    if not config.batch_window or snapshot.residents or snapshot.num_leaving or not waiting:
        return -inf
    sizes = [request.num_tokens - request.num_cached for request in waiting]
    if len(waiting) >= config.slots or sum(sizes) >= config.chunk_tokens:
        return -inf
    takes = cost.k0 + sum(cost.prefill(0, size) for size in sizes) if cost.is_trusted else 0.0
    first = min(request.arrival for request in waiting)
    soon = min(request.arrival + _MOST_WAIT * request.ttft for request in waiting)
    return min(first + config.batch_window, soon - takes)


def _limit_residents(step: StepDraft) -> None:
    """Preempt parked requests while too many hold KV: offline, low priorities and the least work first."""
    if (excess := -step.num_rows) > 0:
        parked = [request for group in (step.online, step.offline) for request in (*group.parked, *group.leaving)]
        parked.sort(key=lambda r: (r.request_class is ONLINE, r.priority, r.num_computed, -r.seq))
        step.preempt(parked[:excess], Reason.NO_SLOT)


def _break_deadlock(step: StepDraft) -> None:
    """Preempt the last resident in order if no request can compute for lack of KV.

    A block that several residents share is freed by none of them alone, so `reclaim` may find nothing to free.
    """
    online, offline, draft = step.online, step.offline, step.draft
    if draft.decodes or draft.prefill_grants or online.decodes or offline.decodes:
        return
    group = offline if offline.residents else online
    is_stuck = any(because.reason is Reason.NO_KV for because in draft.because)
    if is_stuck and len(offline.residents) + len(online.residents) > 1:
        step.preempt(group.ranked(group.residents)[-1:], Reason.NO_KV)
