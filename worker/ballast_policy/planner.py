"""Decide who runs in the next step, in the order that the guarantees give.

1. Online decodes grow: short KV comes from offline beyond its reservation, then from the last online request.
2. The reservation of offline is filled: slots as they fall vacant, KV blocks, `ceil(share * chunk)` prefill tokens.
   What online borrowed of it comes back as online requests end; nobody is stopped in the middle of an answer for it.
3. Online prefill goes on, then online requests are resumed and admitted; they take lent slots and lent KV.
4. What is left is lent to offline while the predicted time fits the budget: decodes first, then prefill, then
   admissions. Who does not fit is parked.

Who runs keeps its slot against its own priority; a vacant slot goes to the first in order, parked or waiting, and a
request of a higher priority takes the slot of the lowest. Nobody overtakes within a class: the first that does not
fit ends the admissions (one exception: an offline request larger than the whole KV reservation does not keep the
others from filling it).

An idle engine may wait a moment for a batch before all this (`window`).

A RUNNING request without a grant keeps its slot where it waits for prefill tokens and is online or within the
reservation; any other is parked.
"""

from __future__ import annotations

from math import inf

from ballast_policy.budget import idle_budget, step_budget
from ballast_policy.growth import grow
from ballast_policy.lending import lend
from ballast_policy.online import online_seconds, online_step, serve_online
from ballast_policy.plan import Because, Plan, Reason
from ballast_policy.reserved import fill_reservation
from ballast_policy.snapshot import Snapshot
from ballast_policy.step import Step
from ballast_policy.suspension import suspendable_seconds
from ballast_policy.window import begins_at


def plan(snapshot: Snapshot) -> Plan:
    """Decide the next step. Pure: the same snapshot gives the same plan, and nothing in it is changed."""
    wait_until = begins_at(snapshot)
    if snapshot.now < wait_until:
        return Plan(because=tuple(Because(r, Reason.BATCH_WINDOW) for r in snapshot.waiting), wait_until=wait_until)
    step = Step(snapshot)
    grow(step)
    fill_reservation(step)
    serve_online(step)
    is_guarded = step.has_online or snapshot.now <= snapshot.expectation.online_until
    alone = online_seconds(step)
    budget = inf
    if step.cost.is_trusted:
        budget = (step_budget if step.has_online else idle_budget)(snapshot, online_step(step, alone))
    lend(step, budget, is_guarded=is_guarded)
    _break_deadlock(step)
    return step.as_plan(budget, online_seconds=alone, suspendable_seconds=suspendable_seconds(step))


def _break_deadlock(step: Step) -> None:
    """Where nobody can compute anything for want of KV, preempt the last resident in order.

    Blocks that several residents share are freed by none of them alone, so `reclaim` may see nothing to gain.
    """
    if step.has_grants or not any(because.reason is Reason.NO_KV for because in step.because):
        return
    last = step.ranked(step.offline.everyone or step.online.everyone)[-1:]
    if len(step.offline.everyone) + len(step.online.everyone) > 1:
        step.give_up(last[0], Reason.NO_KV)
