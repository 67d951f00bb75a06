"""Limits of vLLM that the planner does not know: residents, sizes of a step, and models that compute whole prompts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ballast_policy.plan import Because, Reason, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, PARKED, WAITING, Request

CPU_MULTIPLE = 32
"""Tokens of which a step on a CPU shall be a multiple. oneDNN prepares a matrix product for each number of tokens, and
vLLM keeps 32 of them for each layer (`benchmarks/vllm_step_sizes.py`)."""


def limit_residents(plan: StepPlan, residents: Sequence[Request], most: int, num_leaving: int = 0) -> StepPlan:
    """Return the plan with preemptions in place of parked requests, so that at most `most` requests hold KV.

    The parked requests with the lowest priority and the fewest computed tokens go first, offline before online. Another
    `num_leaving` requests keep their places in this step. The last admissions wait for them.
    """
    num_kept = len(residents) - len(plan.preempt)
    if num_kept + len(plan.admit) > most:
        plan = _preempt_parked(plan, residents, num_kept + len(plan.admit) - most)
        num_kept = len(residents) - len(plan.preempt)
    num_free = max(0, most - num_leaving - num_kept)
    if len(plan.admit) <= num_free:
        return plan
    deferred = plan.admit[num_free:]
    return replace(
        plan,
        grants=tuple([grant for grant in plan.grants if grant[0] not in deferred]),
        admit=plan.admit[:num_free],
        because=(*plan.because, *[Because(r, Reason.NO_SLOT) for r in deferred]),
    )


def _preempt_parked(plan: StepPlan, residents: Sequence[Request], excess: int) -> StepPlan:
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


def even_step(plan: StepPlan, multiple: int) -> StepPlan:
    """Return the plan with a multiple of some tokens, if an offline prompt can do without the rest in this step."""
    total = sum([num_tokens for _, num_tokens in plan.grants])
    rest = total % multiple
    if rest and total > multiple:
        for index in reversed(range(len(plan.grants))):
            record, num_tokens = plan.grants[index]
            if record.request_class is OFFLINE and num_tokens > rest:
                grants = (*plan.grants[:index], (record, num_tokens - rest), *plan.grants[index + 1 :])
                return replace(plan, grants=grants)
    return plan


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
