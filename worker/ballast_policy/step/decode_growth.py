"""Blocks for the next tokens of running decodes: the first claim on KV in every step."""

from __future__ import annotations

from collections.abc import Collection

from ballast_policy.plan import Reason
from ballast_policy.request import Request
from ballast_policy.step.draft import StepDraft


def grow(step: StepDraft) -> int:
    """Take the blocks that online decodes begin. Return the blocks set aside for offline decodes that are covered.

    If blocks are short, offline gives up KV beyond its reservation if that suffices, else the last online requests but
    the first are preempted. Decodes that still lack a block are parked.
    """
    online, offline, blocks = step.online, step.offline, step.blocks
    num_covered = min(len(offline.growing), step.coverage.slots)
    if len(online.growing) + len(offline.growing) > blocks.free:
        num_covered = _settle(step)
    step.count_decodes(online)
    num_set_aside = min(blocks.free, num_covered)
    blocks.free -= num_set_aside
    return num_set_aside


def reclaim_from_offline(step: StepDraft, growing: Collection[Request], beside: int = 0) -> None:
    """Preempt offline requests, never the first, until `growing` and `beside` others find a block each."""
    first = step.coverage.running[:1]
    missing = step.blocks.missing(len(growing) + beside)
    if not step.reclaim([r for r in step.coverage.reclaimable if r not in first], missing, growing):
        step.reclaim([r for r in step.offline.residents if r not in first], missing, growing)


def _settle(step: StepDraft) -> int:
    """Preempt or park until all remaining decodes find a block. Return the number of covered offline decodes."""
    online, blocks, coverage, growing = step.online, step.blocks, step.coverage, set(step.offline.growing)
    inside = [request for request in coverage.running[: coverage.slots] if request in growing]
    num_covered = min(len(inside), max(0, coverage.blocks - sum(request.num_blocks for request in coverage.residents)))
    missing = blocks.missing(len(online.growing) + num_covered)
    lent = coverage.reclaimable
    if missing > 0 and not (step.reclaim(lent, missing) or step.untie(lent, missing)):
        everyone = online.ranked(online.residents)
        while len(online.growing) + num_covered > blocks.free and len(everyone) > 1:
            step.preempt([everyone.pop()], Reason.NO_KV)
        if len(online.growing) > blocks.free:
            step.reclaim(step.offline.residents, blocks.missing(len(online.growing)))
    step.park(online.ranked(online.growing)[blocks.free :], Reason.NO_KV)
    if len(online.growing) + len(inside) > blocks.free:
        reclaim_from_offline(step, inside, len(online.growing))
    # A covered decode that cannot grow is parked now, so that its reserved slot can be lent in this step.
    inside = [request for request in inside if request not in step.draft.gone]
    num_left = blocks.free - len(online.growing)
    step.park(inside[num_left:], Reason.NO_KV)
    return min(num_left, len(inside))
