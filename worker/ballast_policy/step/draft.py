"""A plan in the making: the requests, the accounts of blocks and time, and the decisions so far."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from ballast_policy.plan import Because, Reason, StepParts, StepPlan
from ballast_policy.request import OFFLINE, ONLINE, WAITING, Request, computed
from ballast_policy.reservation import most_slots
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.accounts import Blocks, StepTime, choose_victims, num_shared
from ballast_policy.step.budget import most_prefill
from ballast_policy.step.class_requests import ClassRequests, Coverage, by_class
from ballast_policy.step.kv_peak import KvPeak


@dataclass(slots=True)
class Decisions:
    """The decisions so far, in the terms of `StepPlan`, except the decodes that run already."""

    decodes: list[Request] = field(default_factory=list)
    """Requests of `admit` and `resume` that compute one token."""
    prefill_grants: dict[Request, int] = field(default_factory=dict)
    admit: list[Request] = field(default_factory=list)
    resume: list[Request] = field(default_factory=list)
    park: list[Request] = field(default_factory=list)
    preempt: list[Request] = field(default_factory=list)
    because: list[Because] = field(default_factory=list)
    gone: set[Request] = field(default_factory=set)
    """Residents that this step parks or preempts."""

    def explain(self, request: Request, reason: Reason) -> None:
        self.because.append(Because(request, reason))


class StepDraft:
    """Requests, accounts and decisions. Each method keeps them consistent."""

    def __init__(self, snapshot: EngineSnapshot) -> None:
        config, cost = snapshot.config, snapshot.cost
        self.snapshot, self.config, self.cost = snapshot, config, cost
        self._groups = by_class(snapshot)
        self.online, self.offline = self._groups[ONLINE], self._groups[OFFLINE]
        self.blocks = Blocks(snapshot.free_blocks, config.block_tokens)
        self.time = StepTime(cost, most_prefill(config, cost), cost.k0, cost.k0)
        self.draft = Decisions()
        self.tenant_slots_left = config.tenant_slots_left(self.offline.running)
        self.most_residents = config.most_residents - snapshot.num_leaving
        self.num_slots = min(config.slots, self.most_residents)
        num_offline = len(self.offline.waiting) + len(self.offline.running) + len(self.offline.parked)
        num_slots = min(snapshot.reservation.slots, num_offline)
        self.coverage = Coverage(snapshot, self.online, self.offline, self.draft.gone, num_slots)

    @property
    def num_free_online_slots(self) -> int:
        """Return the slots that online may still take: all free or lent slots."""
        return self.num_slots - self.coverage.slots_in_use - self.online.num_held

    @property
    def most_offline_slots(self) -> int:
        """Return the most slots that offline may hold: its maximum, and no more than online leaves."""
        config = self.config
        return min(most_slots(config.offline_max_share, config.slots), self.num_slots - self.online.num_held)

    @property
    def num_rows(self) -> int:
        """Return how many more requests may hold KV; negative if parked requests must be preempted."""
        draft = self.draft
        return self.most_residents - len(self.snapshot.residents) + len(draft.preempt) - len(draft.admit)

    def is_whole(self, num_tokens: int) -> bool:
        """Return whether a prompt of this size is computed in one step."""
        return self.config.is_encoder and num_tokens <= self.config.chunk_tokens

    def start(self, request: Request, num_tokens: int, reason: Reason) -> None:
        """Admit or resume a request, promise it the blocks of its prompt, and grant it tokens."""
        group, draft = self._groups[request.request_class], self.draft
        if request.phase is WAITING:
            draft.admit.append(request)
        else:
            group.parked.remove(request)
            draft.resume.append(request)
        group.started.append(request)
        if group is self.offline and request.tenant in self.tenant_slots_left:
            self.tenant_slots_left[request.tenant] -= 1
        draft.because.append(Because(request, reason))
        self.blocks.promise(request)
        self.grant(request, num_tokens)

    def grant(self, request: Request, num_tokens: int) -> None:
        """Grant a request tokens, on top of earlier grants of this step, and take their blocks and their time."""
        grants, done = self.draft.prefill_grants, computed(request)
        granted = grants.get(request, 0)
        self.blocks.take(request, granted, num_tokens)
        if request.num_tokens - done == 1:
            self.draft.decodes.append(request)
            self.time.add_decodes(1, request.num_tokens)
        else:
            grants[request] = granted + num_tokens
            self.time.add_prefill(done + granted, num_tokens)

    def count_decodes(self, group: ClassRequests, sign: int = 1) -> None:
        """Take the blocks and the time of the decodes of a class; -1 returns them, to count the class again."""
        self.blocks.free -= sign * len(group.growing)
        self.time.add_decodes(sign * len(group.decodes), sign * group.context)
        group.is_counted = True

    def park(self, requests: Sequence[Request], reason: Reason) -> None:
        """Take the slots of running residents of one class; they keep their KV."""
        if requests:
            self._remove(requests)
            self._groups[requests[0].request_class].leaving += requests
            self.draft.park += requests
            self.draft.because += map(Because, requests, repeat(reason))

    def preempt(self, requests: Sequence[Request], reason: Reason) -> None:
        draft, gone = self.draft, set(requests)
        for request in requests:
            self.blocks.release(request)
            draft.explain(request, reason)
        self._remove(requests)
        draft.park = [request for request in draft.park if request not in gone]
        draft.preempt += requests

    def reclaim(self, candidates: Iterable[Request], missing: int, growing: Collection[Request] = ()) -> bool:
        """Preempt the cheapest candidates that free `missing` blocks. If all of them free fewer, preempt none."""
        victims = choose_victims(candidates, missing, self.config.block_tokens, growing) if missing > 0 else []
        if victims:
            self.preempt(victims, Reason.KV_RECLAIMED)
        return victims is not None

    def untie(self, candidates: Sequence[Request], missing: int) -> bool:
        """Preempt all but one of the candidates that share blocks, if the next step can then reclaim `missing` blocks.

        Return whether it can. A prefix becomes free with the last request that shares it, so none frees it alone.
        """
        tied = [request for request in candidates if num_shared(request)]
        helps = len(tied) > 1 and missing <= self.freed_by(candidates)
        if helps:
            self.preempt(tied[1:], Reason.KV_RECLAIMED)
        return helps

    def freed_by(self, candidates: Sequence[Request]) -> int:
        """Return the least blocks that preempting all candidates frees: prefixes of two keys may begin alike."""
        gone = {*candidates, *self.draft.preempt}
        kept = max([num_shared(request) for request in self.snapshot.residents if request not in gone], default=0)
        private = sum([request.num_private_blocks for request in candidates])
        return private + max(0, max(map(num_shared, candidates), default=0) - kept)

    def kv_peak(self, residents: Iterable[Request]) -> KvPeak:
        """Return the peak of residents, with their private blocks and the blocks promised to them."""
        peak = KvPeak(self.snapshot.expectation, self.config.block_tokens, self.config.tail_tokens)
        for request in residents:
            peak.add(request, request.num_private_blocks + self.blocks.promised.get(request, 0))
        return peak

    def as_plan(self, budget_seconds: float, parts: StepParts, *, suspendable_seconds: float = 0.0) -> StepPlan:
        draft = self.draft
        counted = [group.decodes for group in self._groups.values() if group.is_counted]
        grants = (*zip(chain(*counted, draft.decodes), repeat(1)), *draft.prefill_grants.items())
        return StepPlan(
            grants=grants,
            admit=tuple(draft.admit),
            park=tuple(draft.park),
            resume=tuple(draft.resume),
            preempt=tuple(draft.preempt),
            because=tuple(draft.because),
            predicted_seconds=self.time.seconds if grants else 0.0,
            budget_seconds=budget_seconds,
            parts=parts if grants else StepParts(),
            suspendable_seconds=suspendable_seconds,
        )

    def _remove(self, requests: Sequence[Request]) -> None:
        gone = set(requests)
        for request_class in {request.request_class for request in requests}:
            group = self._groups[request_class]
            if group.is_counted:
                self.count_decodes(group, -1)
            group.remove(gone)
            if group.is_counted:
                self.count_decodes(group)
        self.blocks.forget(gone)
        self.draft.gone.update(gone)
