"""What a step may cost: the online SLO as deadlines of tokens, with a reserve of slack that offline may not touch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ballast_policy.cost import CostModel, attended
from ballast_policy.request import Request
from ballast_policy.snapshot import PolicyConfig, Snapshot

_LOOK_AHEAD = 32
"""How many requests that prefill or wait bound the budget, the first in order; those behind have to wait anyway."""


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """Online's part of a step, before anything is lent."""

    decodes: Iterable[Request]
    pending: Iterable[Request]
    """Online requests that prefill or wait, in order."""
    seconds: float
    """Predicted time of the step with what online and the reservation of offline do in it."""
    fixed: float
    """The part of `seconds` that comes again in every step: all but prefill."""
    vacancy: float = 1.0
    """Share of the slots open to online that no online request holds, 0 to 1."""


def is_provided_for(snapshot: Snapshot, *, has_online: bool) -> bool:
    """Tell whether an online request is here, or was here lately enough for the next one to be expected."""
    return has_online or snapshot.now - snapshot.last_online <= snapshot.config.quiet_seconds


def step_budget(snapshot: Snapshot, step: OnlineStep) -> float:
    """Give the seconds that the step may take, the smallest of three bounds.

    - `step.seconds + slack_safety * (slack - slack_reserve * ttft)` over the online requests that are not overdue,
      where slack is what the request can still lose after the time that online alone needs for its next token
      (for a prefill: its own and all prefill ahead of it, chunk by chunk);
    - `tpot_share * tpot` of online decodes, so that the mean time per token holds and not the envelope alone;
    - `k0 + newcomer_share * (ttft - 2 * k0 - prefill of a typical prompt)`: an online request that comes in the
      middle of the step waits for its end, and then needs a step of its own.

    Slack is reserved because a burst needs it, and spent by shares because one long step is all that a newcomer sees.
    Of what the bounds leave beside online's own part, less is lent the fewer slots are free for newcomers (all of it
    while `slot_headroom` of them are): longer steps keep requests in their slots for longer, so that a burst which
    online alone would have served fills the slots and queues.
    """
    config, cost, now = snapshot.config, snapshot.cost, snapshot.now
    bounds = [_newcomer(config, cost, snapshot.typical_prompt)]
    loose = slack = inf
    for request in step.decodes:
        loose = min(loose, request.tpot)
        left = request.next_deadline - now - step.seconds
        if 0 <= left < inf:
            slack = min(slack, left - config.slack_reserve * request.ttft)
    bounds.append(config.tpot_share * loose)
    slack = min(slack, _prefill_slack(snapshot, step))
    bounds.append(step.seconds + config.slack_safety * max(0.0, slack))
    bound = min(bounds)
    if step.vacancy >= config.slot_headroom or not step.seconds < bound < inf:
        return bound
    return step.seconds + (bound - step.seconds) * step.vacancy / config.slot_headroom


def _newcomer(config: PolicyConfig, cost: CostModel, typical_prompt: int) -> float:
    spare = config.ttft - 2 * cost.k0 - cost.prefill(0, typical_prompt)
    return cost.k0 + config.newcomer_share * max(0.0, spare)


def _prefill_slack(snapshot: Snapshot, step: OnlineStep) -> float:
    """Give the smallest slack, reserve left out, over what prefills or waits; inf without any that is not overdue."""
    config, cost = snapshot.config, snapshot.cost
    slack, tokens, context = inf, 0, 0.0
    for _, request in zip(range(_LOOK_AHEAD), step.pending, strict=False):
        computed = max(request.num_computed, request.num_cached)
        tokens += request.num_tokens - computed
        context += attended(computed, request.num_tokens - computed)
        num_steps = -(-tokens // config.chunk_tokens)
        alone = num_steps * step.fixed + cost.k1 * tokens + cost.k2 * context
        left = request.next_deadline - snapshot.now - alone
        if 0 <= left < inf:
            slack = min(slack, left - config.slack_reserve * request.ttft)
    return slack
