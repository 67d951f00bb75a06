"""Limits of vLLM that the planner does not know: the sizes of a step, and models that compute whole prompts."""

from __future__ import annotations

from dataclasses import replace

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, WAITING, Request

CPU_MULTIPLE = 32
"""Tokens of which a step on a CPU shall be a multiple. oneDNN prepares a matrix product for each number of tokens, and
vLLM keeps 32 of them for each layer (`benchmarks/vllm_step_sizes.py`)."""
LARGEST_REST = 1 / 16
"""Largest part of a step that online prompts leave to the next one for its size: less than an even size gains
(`benchmarks/vllm_step_sizes.py`)."""


def even_step(plan: StepPlan, multiple: int) -> StepPlan:
    """Return the plan with a multiple of some tokens, if a prompt can do without the rest in this step.

    It is the last offline prompt, else the last online prompt that does not end in this step. The rest of online is a
    small part of the step, and takes no step more.
    """
    total, found = sum([num_tokens for _, num_tokens in plan.grants]), None
    rest = total % multiple
    if not rest or total < multiple:
        return plan
    for index in reversed(range(len(plan.grants))):
        record, num_tokens = plan.grants[index]
        if num_tokens == 1 and _left(record) <= 1:  # decodes come first
            break
        if num_tokens > rest and record.request_class is OFFLINE:
            found = index
            break
        if num_tokens > rest and found is None and num_tokens < _left(record):
            found = index
    if found is None:
        return plan
    record, num_tokens = plan.grants[found]
    if record.request_class is not OFFLINE:
        prefill = sum([granted for _, granted in plan.grants if granted > 1])
        left = _left(record) - num_tokens
        if rest > LARGEST_REST * prefill or -(-left // prefill) < -(-(left + rest) // prefill):
            return plan
    grants = (*plan.grants[:found], (record, num_tokens - rest), *plan.grants[found + 1 :])
    return replace(plan, grants=grants)


def _left(record: Request) -> int:
    return record.num_tokens - (record.num_cached if record.phase is WAITING else record.num_computed)


def whole_prompts(plan: StepPlan, most_tokens: int) -> StepPlan:
    """Return the plan for a model that computes each prompt in one step: a chunk becomes the whole prompt.

    A prompt that does not fit into the `most_tokens` of a step waits. The first one of a step always fits.
    """
    left = most_tokens
    grants: list[tuple[Request, int]] = []
    waiting = set()
    for record, _ in plan.grants:
        whole = _left(record)
        if whole <= left:
            grants.append((record, whole))
            left -= whole
        else:
            waiting.add(record)
    return replace(plan, grants=tuple(grants), admit=tuple([r for r in plan.admit if r not in waiting]))
