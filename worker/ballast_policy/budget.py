"""What a step may cost: the online SLO as deadlines of tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, inf, log

from ballast_policy.cost import CostModel
from ballast_policy.request import Request
from ballast_policy.snapshot import PolicyConfig, Snapshot

_LOOK_AHEAD = 32
"""How many requests that prefill or wait bound the budget, the first in order; those behind have to wait anyway."""

_SHORT = 8
"""Tokens that nearly every answer comes to, while nothing is known of answers."""

_BEHIND_ALONE, _BEHIND_LENT = 1.0, 0.5
"""Of what nearly all answers come to, in how many tokens a decode must have caught up that online prefill puts behind:
online alone, and where offline work makes all decodes take twice as long."""
_EARLY = 0.25
"""The same of the mean answer, which bounds it: where all are alike, the shortest is no early point of any."""
_BEHIND_MOST, _SPARED = 2.0, 0.1
"""With all the leeway of a cap (`Allowance.leeway`): what `_BEHIND_ALONE` becomes, and the share of the decodes, those
with the least time, that online prefill does not wait for."""

_PREFILL_PACE = 1.5
"""A step with online prefill is at least so many times as long as the decodes in it alone would make it."""

_LEAST_IDLE = 0.1
"""Under a cap on interference, the least share of the TPOT that a step may take while no online is at hand."""

ONLINE_CHUNKS = 4
"""Prefill of online may fill this many chunks in one step, where step times are known and decodes can wait."""


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """Online's part of a step, before anything is lent."""

    decodes: Collection[Request]
    pending: Iterable[Request]
    """Online requests that prefill or wait, in order."""
    seconds: float
    """Predicted time of the step with what online and the reservation of offline do in it."""
    fixed: float
    """The part of `seconds` that comes again in every step: all but prefill."""
    alone: float = 0.0
    """What the step would take if online were never beside offline; 0 where online has no part in it."""
    leeway: float = 0.0
    """How far online prefill may put decodes behind that are beside offline work, 0 to 1 (`Allowance.leeway`)."""


def is_provided_for(snapshot: Snapshot, *, has_online: bool) -> bool:
    """Tell whether an online request is here, or was here lately enough for the next one to be expected."""
    return has_online or snapshot.now - snapshot.last_online <= snapshot.config.quiet_seconds


def most_prefill(config: PolicyConfig, cost: CostModel) -> int:
    """Give the most prefill tokens of a step: several chunks for online where an SLO and step times are known."""
    is_paced = cost.is_trusted and min(config.ttft, config.tpot) < inf
    return config.chunk_tokens * (ONLINE_CHUNKS if is_paced else 1)


def step_budget(snapshot: Snapshot, step: OnlineStep) -> float:
    """Give the seconds that the step may take, the smallest of five bounds.

    - `step.seconds + slack_safety * slack` over the online requests that are not overdue,
      where slack is what the request can still lose after the time that online alone needs for its next token
      (for a prefill: its own and all prefill ahead of it, chunk by chunk);
    - `step.seconds + slack_safety * slack` over the decodes together, where slack counts from the first token, so that
      the mean time per token holds: the soft minimum `burst * log(most_risk / mean(exp(-slack / burst)))`. A burst of
      prefill finds many answers young and one old as often as the reverse, and each may end before it has caught up:
      what counts is how many are close to being late, not the closest one. Who is late and can still catch up counts
      as one without slack;
    - `tpot_share * tpot` of online decodes;
    - `k0 + newcomer_share * (ttft - 2 * k0 - prefill of a typical prompt)`: an online request that comes in the
      middle of the step waits for its end, and then needs a step of its own (where it would be late anyway, `k0` and
      one TPOT at most, so that work goes on);
    - what the cap on interference leaves, where there is one: `(1 + share) * typical`.

    Slack is spent by shares because one long step is all that a newcomer sees. While more requests miss their SLO than
    may, less risk is taken, and less is lent of what the bounds leave beside online's own part (`Allowance.harvest`).
    """
    config, cost = snapshot.config, snapshot.cost
    loose, slack = _decode_slack(snapshot, step)
    slack = min(slack, _prefill_slack(snapshot, step.pending, step.fixed, config.chunk_tokens))
    bound = min(
        _newcomer(config, cost, snapshot.typical_prompt),
        config.tpot_share * loose,
        step.seconds + config.slack_safety * max(0.0, slack),
        _capped(snapshot, step.alone),
    )
    lent = snapshot.allowance.harvest
    return step.seconds + (bound - step.seconds) * lent if lent < 1 and step.seconds < bound < inf else bound


def prefill_room(snapshot: Snapshot, step: OnlineStep) -> tuple[float, float]:
    """Give the seconds to which prefill of online may bring this step, and those of one after the other.

    The first is what the decodes beside it can wait: the time until the first of their next tokens is due for its mean,
    later early in their answer by as much as they can catch up: before it comes to what nearly all
    come to (half of it beside offline work, for then they catch up slowly), and to a part of the mean one. With leeway
    they may be put behind further, and the few with the least time are not waited for. The second is one TPOT, or what
    leaves prefill a third of the step. Both are infinite without decodes.
    """
    young = _youth(snapshot, step.leeway)
    now, fixed = snapshot.now, step.fixed
    loose, waits = inf, []
    for request in step.decodes:
        tpot, num_output = request.tpot, request.num_output
        left = request.first_token + num_output * tpot - now
        if tpot > fixed:
            left += max(0.0, young - num_output) * (tpot - fixed)
        if left < inf and (left >= fixed or _catches_up(request, fixed - left, fixed)):
            if tpot < loose:
                loose = tpot
            waits.append(left)
    num_spared = int(_SPARED * step.leeway * len(waits))
    until = sorted(waits)[num_spared] if num_spared else min(waits, default=inf)
    pace = max(loose, _PREFILL_PACE * fixed)
    return max(until, pace), pace


def _youth(snapshot: Snapshot, leeway: float) -> float:
    """Give the tokens of an answer before which it may be behind."""
    expectation = snapshot.expectation
    behind = max(_BEHIND_LENT, _BEHIND_ALONE - (_BEHIND_ALONE - _BEHIND_LENT) * snapshot.allowance.crowding)
    young = (expectation.online_short or _SHORT) * (behind + (_BEHIND_MOST - behind) * leeway)
    return min(young, _EARLY * expectation.online_answer) if expectation.online_answer else young


def _capped(snapshot: Snapshot, alone: float) -> float:
    """Give what the cap on interference leaves: `(1 + share) * typical`, and about half a TPOT without online at hand.

    Each step is filled to the same level, which latencies move to where the cap is: a step that is long for online's
    own work gets nothing on top. Without online at hand a newcomer has the step stand still for its first token, and
    waits for the rest of it with its second.
    """
    config, cost = snapshot.config, snapshot.cost
    if config.max_interference is None:
        return inf
    share = config.max_interference if snapshot.allowance.share is None else snapshot.allowance.share
    if alone:
        return (1 + share) * (snapshot.allowance.typical or alone)
    if config.tpot == inf or not config.max_interference:
        return inf if config.max_interference else 0.0
    part = min(1.0, max(_LEAST_IDLE, share / config.max_interference))
    return cost.k0 + max(0.0, config.tpot - cost.k0) * part / 2


def _decode_slack(snapshot: Snapshot, step: OnlineStep) -> tuple[float, float]:
    """Give the smallest TPOT of the decodes and what slack they have together."""
    config = snapshot.config
    next_token = snapshot.now + step.seconds
    loose = slack = inf
    most_risk = config.most_risk * snapshot.allowance.harvest
    saved = []
    for request in step.decodes:  # the longest loop of a calm step: `next_deadline` and `paced_deadline` written out
        tpot, ttft = request.tpot, request.ttft
        if tpot < loose:
            loose = tpot
        budgeted = request.num_output * tpot
        left = request.arrival + ttft + budgeted - next_token
        if 0 <= left < slack:
            slack = left
        left = request.first_token + budgeted - next_token
        if left >= 0:
            saved.append(left)
        elif _catches_up(request, -left, step.fixed):
            saved.append(0.0)
    return loose, min(slack, _soft_slack(saved, _burst(snapshot, loose), most_risk))


def _burst(snapshot: Snapshot, tpot: float) -> float:
    """Give the seconds that a burst of online prefill takes from a decode: the scale on which slack is safe."""
    expectation = snapshot.expectation
    meanwhile = expectation.online_rate * expectation.online_answer * tpot
    return max(tpot, snapshot.config.burst_share * meanwhile * snapshot.cost.prefill(0, snapshot.typical_prompt))


def _soft_slack(saved: Sequence[float], burst: float, most_risk: float) -> float:
    """Give what all may lose before `mean(exp(-slack / burst))` comes to `most_risk`; below 0 where it is beyond."""
    if burst == inf:
        return inf
    if not most_risk:
        return 0.0
    far = 20 * burst
    risk = sum([exp(-left / burst) for left in saved if left < far])
    return burst * log(most_risk * len(saved) / risk) if risk else inf


def _catches_up(request: Request, late: float, fixed: float) -> bool:
    """Tell whether a decode that is late can make up for it while online is alone."""
    return late <= (request.max_output - request.num_output) * (request.tpot - fixed)


def _newcomer(config: PolicyConfig, cost: CostModel, typical_prompt: int) -> float:
    """Give how long a step a newcomer of the usual length can wait for; who is late in any case stops no lending."""
    share, spare = config.newcomer_share, config.ttft - 2 * cost.k0 - cost.prefill(0, typical_prompt)
    return cost.k0 + (share * spare if spare > 0 else min(config.tpot, share * config.ttft))


def _prefill_slack(snapshot: Snapshot, pending: Iterable[Request], fixed: float, chunk: int) -> float:
    """Give the smallest slack over what prefills or waits; inf if all are overdue."""
    now, k1, k2 = snapshot.now, snapshot.cost.k1, snapshot.cost.k2
    slack, tokens, context = inf, 0, 0.0
    for request in islice(pending, _LOOK_AHEAD):  # `attended` and `next_deadline` written out: many wait
        computed, cached, ttft = request.num_computed, request.num_cached, request.ttft
        if cached > computed:
            computed = cached
        left = request.num_tokens - computed
        tokens += left
        context += left * (computed + (left + 1) / 2)
        due = request.arrival + ttft
        if request.num_output:
            due += request.num_output * request.tpot
        spare = due - now - (-(-tokens // chunk) * fixed + k1 * tokens + k2 * context)
        if 0 <= spare < slack:
            slack = spare
    return slack
