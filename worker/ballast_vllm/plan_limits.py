"""Limits of vLLM that the planner does not know: sizes of a step, and prompts and images that are computed at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ballast_policy.plan import StepPlan
from ballast_policy.request import OFFLINE, Request, computed

CPU_MULTIPLE = 32
"""Tokens of which a step on a CPU shall be a multiple. oneDNN prepares a matrix product for each number of tokens, and
vLLM keeps 32 of them for each layer (`benchmarks/vllm_step_sizes.py`)."""
LARGEST_REST = 1 / 16
"""Largest part of a step that online prompts leave to the next one for its size: less than an even size gains
(`benchmarks/vllm_step_sizes.py`)."""


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """What a step of one vLLM can be."""

    most_tokens: int
    multiple: int = 1
    """Tokens of which a step is a multiple, where a prompt allows it."""
    has_whole_prompts: bool = False
    """Whether each prompt is computed at once."""
    find_images: Callable[[Any], Sequence[range]] | None = None
    """Finds the images of a request of vLLM if each of them is computed at once."""
    num_ahead: int = 0
    """Tokens behind a chunk that a drafter reads."""
    num_drafts: int = 0
    """Most drafts of a decode."""

    def apply(self, plan: StepPlan, live: Mapping[int, Any]) -> StepPlan:
        """Return what vLLM shall compute of a plan. `live`: vLLM's requests by `seq`."""
        if self.has_whole_prompts:
            return whole_prompts(plan, self.most_tokens)
        if self.multiple > 1:
            plan = even_step(plan, self.multiple)
        return self._whole_images(plan, live, self.find_images) if self.find_images else plan

    def _whole_images(
        self, plan: StepPlan, live: Mapping[int, Any], find: Callable[[Any], Sequence[range]]
    ) -> StepPlan:
        """Return the plan for a model that computes each image in one step: no chunk ends in an image.

        A chunk ends before the image instead, or behind an image that it begins with. If the step is too large then,
        the first such image takes the step, and others wait that do not fit beside it.
        """
        wanted: dict[Request, int] = {}
        first = None
        for record, granted in plan.grants:
            images = find(live[record.seq]) if _left(record) > granted else ()
            start = computed(record)
            wanted[record] = _end_of_chunk(images, start, start + granted, self.num_ahead) - start
            if first is None and wanted[record] > granted:
                first = record
        sizes = {record: tokens + self.num_drafts * (_left(record) == 1) for record, tokens in wanted.items()}
        if first is not None and sum(sizes.values()) > self.most_tokens:
            left = self.most_tokens - sizes.pop(first)
            for record, size in sizes.items():
                if size <= left:
                    left -= size
                else:
                    del wanted[record]
        admit = tuple([record for record in plan.admit if record in wanted])
        return replace(plan, grants=tuple(wanted.items()), admit=admit)


def even_step(plan: StepPlan, multiple: int) -> StepPlan:
    """Return the plan with a multiple of some tokens, if a prompt can do without the rest in this step.

    It is the last offline prompt, else the last online prompt that does not end in this step.
    """
    total = sum([num_tokens for _, num_tokens in plan.grants])
    rest = total % multiple
    index = _shortened(plan.grants, rest) if rest and total > multiple else None
    if index is None:
        return plan
    record, num_tokens = plan.grants[index]
    return replace(plan, grants=(*plan.grants[:index], (record, num_tokens - rest), *plan.grants[index + 1 :]))


def _shortened(grants: Sequence[tuple[Request, int]], rest: int) -> int | None:
    """Return the index of the prompt that leaves `rest` tokens to the next step; None if there is none."""
    online = None
    for index in reversed(range(len(grants))):
        record, num_tokens = grants[index]
        if num_tokens == 1 and _left(record) <= 1:  # decodes come first
            break
        if num_tokens > rest and record.request_class is OFFLINE:
            return index
        if num_tokens > rest and online is None and num_tokens < _left(record):
            online = index
    if online is None:
        return None
    prefill = sum([num_tokens for _, num_tokens in grants if num_tokens > 1])
    left = _left(grants[online][0]) - grants[online][1]
    takes_more_steps = ceil((left + rest) / prefill) > ceil(left / prefill)
    return None if rest > LARGEST_REST * prefill or takes_more_steps else online


def _left(record: Request) -> int:
    return record.num_tokens - computed(record)


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


def _end_of_chunk(images: Sequence[range], start: int, end: int, num_ahead: int) -> int:
    """Return where a chunk ends that shall end at `end`, so that it divides none of the images, which are in order."""
    least = start + 1
    for image in images:
        before = image.start - num_ahead
        if image.stop <= end:
            least = max(least, image.stop)
        elif before < end:
            if before >= least:
                return before
            end = least = image.stop
    return end
