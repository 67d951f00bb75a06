"""The budget of a step: the time to which offline work may extend it, by the online SLO or a cap on interference."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from math import exp, inf, log, sqrt

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import Request
from ballast_policy.reservation import ROUNDING
from ballast_policy.snapshot import EngineSnapshot, PolicyConfig

_MOST_BOUNDING = 32
"""Online prompts that bound the budget, the first in order. Bounds the cost of a step (`benchmarks/plan.py`)."""
SPENT = 0.5
"""Share of its slack that online spends on one step. Half costs 1.8 points of the total (fast-steps-20),
all of it 1.1 of TTFT (bursts-40-32). Young answers fall behind for prompts that need a larger share of theirs."""
_PREFILL_PACE = 1.5
"""Least length of a step with online prefill, over decodes and experts. Twice costs 5 points of TPOT (bursts-40-32)."""
_EARLY = 0.25
"""Part of a mean answer in which it may catch up in any case. All of it costs 9 points of TPOT
(`tests/sim/test_alike.py`)."""
SUSPENDED_SHARE = 0.4
"""Share of the time for which decodes can wait that nested steps may take. 0.85 costs 0.4 points of TPOT and 1.4 of the
total (fast-steps-20)."""
_FULL = 1.25
"""Least time that offline borrows beside online decodes, in readings of their missing experts (`llm_d_protocol.py`)."""
_LONGEST = 7.0
"""Most fixed costs beyond online's in a step that cannot be suspended (`policy_change.py --only fast-steps`)."""
_LEAST_LONGEST = 0.25
"""Part of the TPOT that such a step may take in any case. Half or twice changes nothing."""
_IDLE_STEP = 2.0
"""Least length of a step without online requests, in fixed costs. Half or twice changes nothing."""
ONLINE_CHUNKS = 4
"""Chunks that online prefill may fill in one step. Half costs 0.5 points of TTFT (azure-40)."""


@dataclass(frozen=True, slots=True)
class OnlineStep:
    """The part of a step that no budget limits: online, and the reservation of offline."""

    decodes: Collection[Request]
    pending: Iterable[Request]
    """Online requests that prefill or wait, in order."""
    seconds: float
    """Predicted time."""
    fixed: float
    """The part of `seconds` that is not prefill."""
    experts: float = 0.0
    """Seconds for reading the experts that this part does not touch."""


def most_prefill(config: PolicyConfig, cost: CostModel) -> int:
    """Return the most prefill tokens of a step: several chunks if an SLO and step times are known."""
    is_paced = cost.is_trusted and min(config.ttft, config.tpot) < inf and not config.is_encoder
    return config.chunk_tokens * (ONLINE_CHUNKS if is_paced else 1)


def step_budget(snapshot: EngineSnapshot, part: OnlineStep, alone: float = 0.0) -> float:
    """Return the seconds that the step may take, which without offline takes `alone`: the smallest bound, adjusted.

    `docs/explanation/how-slots-are-shared-details.md` has the formulas. The lending ratio reduces the risk, and the
    time in steps with prefill.
    """
    config, allowance, online = snapshot.config, snapshot.allowance, part.seconds
    least_tpot, slack, saved = _decode_slack(snapshot, part)
    newcomer = _newcomer_bound(snapshot, part, saved)
    tpot = config.tpot_share * least_tpot + snapshot.cost.k5
    decodes = online + SPENT * max(0.0, slack)
    prompts = online + SPENT * max(0.0, _prefill_slack(snapshot, part))
    cap, length = _cap_bound(snapshot, alone), _longest(snapshot, part)
    smallest = min(newcomer, tpot, decodes, prompts, cap, length)
    full = online + _FULL * part.experts
    if part.experts and smallest < full <= min(tpot, cap, inf if config.can_suspend else newcomer):
        return online  # decodes save time for a full step
    ratio = 0.0 if allowance.is_alone else allowance.lending_ratio if online > part.fixed else 1.0
    return online + ratio * (smallest - online) if ratio < 1 and online < smallest < inf else smallest


def idle_budget(snapshot: EngineSnapshot, part: OnlineStep) -> float:
    """Return the budget of a step without online requests: always long enough for the next token of a request.

    A newcomer bounds it that waits for its end, or whose second token a suspended step delays; also the ratio or a cap.
    """
    config, cost = snapshot.config, snapshot.cost
    is_waited_for = config.is_encoder or not config.can_suspend
    if is_waited_for:
        bound = _newcomer_bound(snapshot, part)
    else:
        bound = min(config.ttft, max(1, _beginning(snapshot) - 1) * (config.tpot - part.seconds))
    if snapshot.now <= snapshot.expectation.online_until:
        ratio = snapshot.allowance.lending_ratio if is_waited_for else 1.0
        length = _longest(snapshot, part) if is_waited_for else inf
        bound = min(length, bound * ratio, _idle_cap_bound(snapshot))
    longest = max([request.num_tokens for request in (*snapshot.residents, *snapshot.waiting)], default=0)
    token = max(cost.decode(longest), cost.prefill(0, longest) if config.is_encoder else cost.prefill(longest, 1))
    return max(bound, _IDLE_STEP * cost.k0, (cost.k0 + token) * (1 + ROUNDING), part.seconds)


def prefill_limits(snapshot: EngineSnapshot, part: OnlineStep, patience: int = 0) -> tuple[float, float]:
    """Return the seconds to which online prefill may extend this step, and the seconds of a usual step with prefill.

    This step may last until a decode falls behind its mean TPOT. With `patience` 1, young answers may fall behind if
    they catch up, with 2 all that very probably go on until they have caught up. The second figure is one TPOT, or a
    step of which prefill has a third. Without decodes both are infinite; encoders: half of a TTFT.
    """
    if snapshot.config.is_encoder:
        return snapshot.config.ttft / 2, inf
    now, cost, usual, fixed = snapshot.now, snapshot.cost, snapshot.expectation, part.fixed
    short, prompt = _beginning(snapshot), snapshot.typical_prompt or 1
    early = min(short, _EARLY * (usual.online_answer or inf))
    prefill = cost.prefill(0, prompt)
    after_prompts = 1.0 - usual.online_rate * prefill  # share of the time that new prompts leave
    after_answers = 1.0 - usual.online_rate * (prefill + usual.online_answer * cost.decode(prompt))
    least_tpot = until = inf
    for request in part.decodes:  # written out: it runs in each step with online prefill
        tpot, num_output = request.tpot, request.num_output
        left = request.first_token + num_output * tpot - now
        if patience and num_output < short and tpot > fixed:  # answers that are alike fall behind together
            alike = (short - num_output) * (after_answers * tpot - fixed)
            left += max(0.0, (early - num_output) * (tpot - fixed), alike)
        if patience > 1 and after_prompts * tpot > fixed:
            num_tokens = max(0, usual.surely_reached(request) - max(short, num_output))
            left += num_tokens * (after_prompts * tpot - fixed)
        if left < inf and (left >= fixed or _catches_up(request, fixed - left, fixed)):
            if tpot < least_tpot:
                least_tpot = tpot
            if left < until:
                until = left
    experts = cost.experts(snapshot.config.chunk_tokens, len(part.decodes))
    pace = max(least_tpot / (1 + cost.error), _PREFILL_PACE * (fixed + experts))
    return max(until / (1 + cost.error), pace), pace


def _beginning(snapshot: EngineSnapshot) -> float:
    """Return the number of tokens within which a delayed answer must catch up. Nearly all answers are longer."""
    config, short, mean = snapshot.config, snapshot.expectation.online_short, snapshot.expectation.online_answer
    return min(short, max(_EARLY * (mean or inf), short - config.ttft / config.tpot))


def _newcomer_bound(snapshot: EngineSnapshot, part: OnlineStep, saved: float = 0.0) -> float:
    """Return the longest step after which a newcomer is in time in its own step; one TPOT if it is late in any case."""
    config, cost, prompt = snapshot.config, snapshot.cost, snapshot.typical_prompt
    takes = cost.prefill(0, prompt, len(part.decodes))
    left = config.ttft - part.fixed - takes
    if config.is_encoder:  # the newcomer shares its step with all that arrive meanwhile
        return (left if left > 0 else config.ttft / 2) / (1 + snapshot.expectation.online_rate * takes)
    if config.can_suspend and saved:
        left = max(left, part.seconds + saved - (cost.k0 + cost.prefill(0, prompt)) / SUSPENDED_SHARE)
    return left if left > part.seconds else part.seconds + min(config.tpot, config.ttft)


def _longest(snapshot: EngineSnapshot, part: OnlineStep) -> float:
    """Return the bound of a step that newcomers may wait for: any without suspension, or one of prompts alone."""
    config, cost = snapshot.config, snapshot.cost
    if config.is_encoder or (config.can_suspend and (part.decodes or part.seconds == part.fixed)):
        return inf
    return max(_LEAST_LONGEST * config.tpot, part.fixed + _LONGEST * (cost.k0 + cost.k5))


def _cap_bound(snapshot: EngineSnapshot, alone: float) -> float:
    """Return the bound of the cap on a step of online: `(1 + share) * typical`, the same for all steps."""
    share, typical = snapshot.allowance.share, snapshot.allowance.typical or alone
    return inf if share is None or not alone else (1 + share) * typical


def _idle_cap_bound(snapshot: EngineSnapshot) -> float:
    """Return the bound of the cap on a step without online, which a newcomer suspends, or whose end it waits for."""
    cost, share = snapshot.cost, snapshot.allowance.share
    if share is None:
        return inf
    if snapshot.config.can_suspend:
        typical = snapshot.allowance.typical or cost.k0
        return cost.k0 + share * typical * snapshot.expectation.online_answer
    return share * (cost.k0 + cost.prefill(0, snapshot.typical_prompt))


def _decode_slack(snapshot: EngineSnapshot, part: OnlineStep) -> tuple[float, float, float]:
    """Return the least TPOT of the online decodes, the slack that they share, and the least time that one saved."""
    next_token = snapshot.now + part.seconds
    least_tpot = slack = inf
    saved = []
    for request in part.decodes:  # the longest loop of most steps: `next_deadline` written out
        tpot = request.tpot
        budgeted = request.num_output * tpot
        left = request.arrival + request.ttft + budgeted - next_token
        if 0 <= left < slack:
            slack = left
        left = request.first_token + budgeted - next_token
        if left >= 0:
            saved.append(left)
        elif _catches_up(request, -left, part.fixed):
            saved.append(0.0)
        elif tpot < snapshot.config.tpot:  # no step is short enough for its own SLO
            tpot = snapshot.config.tpot
        if tpot < least_tpot:
            least_tpot = tpot
    if not saved or least_tpot == inf:
        return least_tpot, slack, 0.0
    most_risk = snapshot.config.most_risk * snapshot.allowance.lending_ratio
    burst = _burst(snapshot, least_tpot, len(part.decodes))
    return least_tpot, min(slack, _shared_slack(saved, burst, most_risk)), min(saved)


def _burst(snapshot: EngineSnapshot, tpot: float, num_decodes: int) -> float:
    """Return the standard deviation of the seconds of online prefill during an answer; at least one TPOT."""
    expectation, typical = snapshot.expectation, snapshot.typical_prompt
    if not typical:
        return tpot
    tokens = expectation.online_spread * sqrt(expectation.online_answer * tpot)
    return max(tpot, tokens * snapshot.cost.prefill(0, typical, num_decodes) / typical)


def _shared_slack(saved: Collection[float], burst: float, most_risk: float) -> float:
    """Return the time that all decodes can lose until `mean(exp(-slack / burst))` is `most_risk`; negative beyond.

    The exponential is the risk that a burst makes a decode late. The mean counts all decodes that are close to that.
    """
    far = 20 * burst  # the risk of a decode that saved more is nothing
    risk = sum([exp(-left / burst) for left in saved if left < far])
    if not risk:
        return inf
    return burst * log(most_risk * len(saved) / risk) if most_risk else 0.0


def _catches_up(request: Request, late: float, fixed: float) -> bool:
    """Return whether a late decode can be in time at the end of its answer while online is alone."""
    return late <= (request.max_output - request.num_output) * (request.tpot - fixed)


def _prefill_slack(snapshot: EngineSnapshot, part: OnlineStep) -> float:
    """Return the least slack of the requests that prefill or wait; inf if all are late.

    Each is behind all before it, and has its first token at the end of this step or later.
    """
    now, fixed, chunk = snapshot.now, part.fixed, snapshot.config.chunk_tokens
    cost, num_decodes, k1, k2 = snapshot.cost, len(part.decodes), snapshot.cost.k1, snapshot.cost.k2
    slack, tokens, context = inf, 0, 0.0
    for request in islice(part.pending, _MOST_BOUNDING):  # `attended` and `next_deadline` written out: many wait
        computed, cached = request.num_computed, request.num_cached
        if cached > computed:
            computed = cached
        remaining = request.num_tokens - computed
        tokens += remaining
        context += remaining * (computed + (remaining + 1) / 2)
        due = request.arrival + request.ttft
        if request.num_output:
            due += request.num_output * request.tpot
        step = fixed + cost.experts(min(tokens, chunk), num_decodes)
        left = due - now - max(part.seconds, -(-tokens // chunk) * step + k1 * tokens + k2 * context)
        if 0 <= left < slack:
            slack = left
    return slack
