"""Ballast with one of its parts taken out, to show what that part is worth.

- no-budget: no SLO is told, so that nothing bounds a step; online still goes first.
- no-parking: resident offline decodes take part in every step, whether they fit the budget or not.
- no-reservation: nothing is kept for offline.
- no-suspension: a newcomer waits for the end of the step in flight.
- no-triage: online prefill is served in order, whether it can still be in time or not.
- no-lending: beside online nothing goes to offline but its reservation: what that costs by itself, filled as Ballast
  fills it. Needs an SLO and known step times; without them nothing bounds what is lent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import inf

from ballast_policy.plan import Plan, Reason
from ballast_policy.request import Phase, Request
from ballast_policy.snapshot import PolicyConfig, Snapshot
from ballast_sim.deployment import Ballast
from ballast_sim.replica import Policy


class Unsuspended(Ballast):
    """Every step runs to its end."""

    def plan(self, snapshot: Snapshot) -> Plan:
        """Decide the next step."""
        return replace(super().plan(snapshot), suspendable_seconds=0.0)


class Unlent(Ballast):
    """While online is here or expected, offline has its reservation and no more."""

    def plan(self, snapshot: Snapshot) -> Plan:
        """Decide the next step."""
        return super().plan(replace(snapshot, allowance=replace(snapshot.allowance, harvest=0.0)))


class Unparked(Ballast):
    """Who decodes takes part, as far as there is KV for its next token."""

    def plan(self, snapshot: Snapshot) -> Plan:
        """Decide the next step, and take back what was parked for time alone."""
        plan = super().plan(snapshot)
        config, cost = snapshot.config, snapshot.cost
        reasons = {because.request.seq: because.reason for because in plan.because}
        free = snapshot.free_blocks - sum(_blocks(request, tokens, config) for request, tokens in plan.grants)
        slots = config.slots - _num_running(snapshot, plan)
        kept, parked, seconds = [], [], plan.predicted_seconds
        for request in plan.park:
            needed = _blocks(request, 1, config)
            if reasons.get(request.seq) is Reason.STEP_BUDGET and request.remaining == 1 and needed <= free and slots:
                free -= needed
                slots -= 1
                seconds += cost.decode(request.num_tokens)
                kept.append((request, 1))
            else:
                parked.append(request)
        return replace(plan, grants=plan.grants + tuple(kept), park=tuple(parked), predicted_seconds=seconds)


def _num_running(snapshot: Snapshot, plan: Plan) -> int:
    """Slots held once the plan is carried out."""
    out = {request.seq for request in (*plan.park, *plan.preempt)}
    kept = sum(1 for request in snapshot.residents if request.phase is Phase.RUNNING and request.seq not in out)
    return kept + len(plan.admit) + len(plan.resume)


def _blocks(request: Request, tokens: int, config: PolicyConfig) -> int:
    """Most blocks that a grant may take: what the cache gives is left out of account."""
    computed = 0 if request.phase is Phase.WAITING else request.num_computed
    held = 0 if request.phase is Phase.WAITING else request.num_blocks
    return max(0, -(-(computed + tokens) // config.block_tokens) - held)


@dataclass(frozen=True, slots=True)
class Ablation:
    """What a run with one part taken out differs in."""

    policy: Callable[[], Policy] = Ballast
    has_budget: bool = True
    has_reservation: bool = True
    is_triaged: bool = True

    def told(self, config: PolicyConfig) -> PolicyConfig:
        """What the policy is told instead of `config`."""
        if not self.has_budget:
            config = replace(config, ttft=inf, tpot=inf)
        config = replace(config, is_triaged=self.is_triaged)
        return config if self.has_reservation else replace(config, offline_share=0.0)


ABLATIONS: Mapping[str, Ablation] = {
    "ballast-no-parking": Ablation(policy=Unparked),
    "ballast-no-budget": Ablation(has_budget=False),
    "ballast-no-reservation": Ablation(has_reservation=False),
    "ballast-no-suspension": Ablation(policy=Unsuspended),
    "ballast-no-triage": Ablation(is_triaged=False),
    "ballast-no-lending": Ablation(policy=Unlent),
}
