"""Limits of vLLM that the planner does not know: residents, and models that compute each prompt at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast_policy.plan import Because, Reason, StepPlan
from ballast_policy.request import ONLINE, PARKED, WAITING, Request


def limit_residents(plan: StepPlan, residents: Sequence[Request], most: int) -> StepPlan:
    """Return the plan with preemptions in place of parked requests, so that at most `most` requests hold KV.

    The parked requests with the lowest priority and the fewest computed tokens go first, offline before online.
    """
    excess = len(residents) - len(plan.preempt) + len(plan.admit) - most
    if excess <= 0:
        return plan
    kept = {*plan.preempt, *plan.resume}
    parked = [r for r in residents if r.phase is PARKED and r not in kept] + list(plan.park)
    parked.sort(key=lambda r: (r.request_class is ONLINE, r.priority, r.num_computed, -r.seq))
    victims = parked[:excess]
    gone = set(victims)
    return replace(
        plan,
        preempt=(*plan.preempt, *victims),
        park=tuple([r for r in plan.park if r not in gone]),
        because=(*plan.because, *[Because(r, Reason.NO_SLOT) for r in victims]),
    )


def whole_prompts(plan: StepPlan, most_tokens: int) -> StepPlan:
    """Return the plan for a model that computes each prompt in one step: a chunk becomes the whole prompt.

    A prompt that does not fit into the `most_tokens` of a step waits. The first one of a step always fits.
    """
    left = most_tokens
    grants: list[tuple[Request, int]] = []
    waiting = set()
    for record, _ in plan.grants:
        whole = record.num_tokens - (record.num_cached if record.phase is WAITING else record.num_computed)
        if whole <= left:
            grants.append((record, whole))
            left -= whole
        else:
            waiting.add(record)
    return replace(plan, grants=tuple(grants), admit=tuple([r for r in plan.admit if r not in waiting]))
