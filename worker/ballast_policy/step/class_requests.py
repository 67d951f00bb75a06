"""The requests of one class in one step, and the offline requests that the reservation covers."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, islice

from ballast_policy.fairness.ledger import EMPTY, Ledger
from ballast_policy.fairness.order import ranked
from ballast_policy.fairness.tenant_slots import TenantSlots, reserved_first
from ballast_policy.request import OFFLINE, ONLINE, PARKED, Request, RequestClass
from ballast_policy.snapshot import EngineSnapshot


@dataclass(slots=True)
class ClassRequests:
    """The requests of one class, and sums over them. `StepDraft` starts, parks and preempts them."""

    ledger: Ledger
    waiting: Sequence[Request]
    """In policy order."""
    decodes: list[Request] = field(default_factory=list)
    """Running, with one token to compute."""
    prefills: list[Request] = field(default_factory=list)
    """Running, with more than one token to compute."""
    parked: list[Request] = field(default_factory=list)
    growing: list[Request] = field(default_factory=list)
    """Decodes whose next token begins a KV block."""
    context: int = 0
    """Sum of the contexts of `decodes`, including their next tokens."""
    leaving: list[Request] = field(default_factory=list)
    """Parked in this step. Their KV can still be reclaimed."""
    started: list[Request] = field(default_factory=list)
    """Admitted or resumed in this step."""
    is_counted: bool = False
    """True once the step has taken the blocks and the time of `decodes`."""

    @property
    def running(self) -> list[Request]:
        """Return the requests that held a slot before this step and still do."""
        return self.decodes + self.prefills

    @property
    def num_held(self) -> int:
        """Return the slots that the class holds, including those of `started`."""
        return len(self.decodes) + len(self.prefills) + len(self.started)

    @property
    def residents(self) -> list[Request]:
        """Return the requests that held KV before this step and still do."""
        return self.decodes + self.prefills + self.parked + self.leaving

    def below(self, request: Request) -> list[Request]:
        return [other for other in self.residents if other.priority < request.priority]

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        ordered, reserved = ranked(requests, self.ledger), self.ledger.reserved
        return reserved_first(ordered, TenantSlots(reserved, {})) if reserved else ordered

    def remove(self, gone: set[Request]) -> None:
        for name in ("parked", "prefills", "leaving", "growing", "decodes"):
            setattr(self, name, [request for request in getattr(self, name) if request not in gone])
        self.context = sum([request.num_tokens for request in self.decodes])


def by_class(snapshot: EngineSnapshot) -> dict[RequestClass, ClassRequests]:
    """Return the requests of an engine; in `waiting`, online comes first."""
    split = bisect_left(snapshot.waiting, 1, key=lambda request: request.request_class is OFFLINE)
    waiting = {ONLINE: snapshot.waiting[:split], OFFLINE: snapshot.waiting[split:]}
    return {request_class: _sort(snapshot, request_class, waiting[request_class]) for request_class in RequestClass}


def _sort(snapshot: EngineSnapshot, request_class: RequestClass, waiting: Sequence[Request]) -> ClassRequests:
    group = ClassRequests(snapshot.ledgers.get(request_class, EMPTY), waiting)
    decodes, growing = group.decodes, group.growing  # local: this is the longest loop of a step
    block_tokens, context = snapshot.config.block_tokens, 0
    for request in [request for request in snapshot.residents if request.request_class is request_class]:
        num_computed = request.num_computed
        if request.phase is PARKED:
            group.parked.append(request)
        elif request.num_tokens - num_computed > 1:
            group.prefills.append(request)
        else:
            decodes.append(request)
            context += num_computed
            if num_computed >= request.num_blocks * block_tokens:
                growing.append(request)
    group.context = context + len(decodes)
    return group


@dataclass
class Coverage:
    """The offline residents that the reservation covers. Most steps need no set: each is computed at its first use."""

    snapshot: EngineSnapshot
    online: ClassRequests
    offline: ClassRequests
    gone: Collection[Request]
    """Residents that the step has parked or preempted so far."""
    slots: int
    """Reserved slots that offline has work for."""
    beside: Collection[Request] = ()
    """Running prompts beside the reserved slots. They get no reserved tokens, so no reserved slot passes to them."""

    @property
    def slots_in_use(self) -> int:
        """Return the slots that online cannot take."""
        return min(self.slots, self.offline.num_held - sum([r in self.beside for r in self.offline.prefills]))

    @cached_property
    def blocks(self) -> int:
        """Reserved KV blocks, without those that the largest online request needs beside them."""
        config, online = self.snapshot.config, self.online
        largest = max([request.num_tokens for request in (*online.residents, *online.waiting[:1])], default=0)
        left = config.num_blocks - -(-(largest + 1) // config.block_tokens)
        return max(0, min(self.snapshot.reservation.blocks, left))

    @cached_property
    def _ranked(self) -> list[Request]:
        return self.offline.ranked(self.offline.running)

    @cached_property
    def residents(self) -> set[Request]:
        """Offline residents whose KV fits into the reserved blocks: running requests first, then parked requests."""
        parked = [request for request in self.offline.parked if request.num_blocks <= self.blocks]
        return set(_fitting(chain(self._ranked, self.offline.ranked(parked)), self.blocks))

    @cached_property
    def _order(self) -> list[Request]:
        first = self._ranked[: self.slots]
        if sum([request.num_blocks for request in first]) <= self.blocks:
            return self._ranked
        covered = dict.fromkeys(islice(_fitting(self._ranked, self.blocks), self.slots))
        return [*covered, *(request for request in self._ranked if request not in covered)]

    @property
    def running(self) -> list[Request]:
        """Return the running offline requests, first those that reserved slots and blocks cover."""
        left = [request for request in self._order if request not in self.gone] if self.gone else self._order
        if self.beside and any(request in self.beside for request in left[: self.slots]):  # one lost its slot
            left = sorted(left, key=lambda request: request in self.beside)
        return left

    @property
    def reclaimable(self) -> list[Request]:
        """Return the offline residents beyond the reserved blocks: online may reclaim their KV."""
        return [request for request in self.offline.residents if request not in self.residents]


def _fitting(requests: Iterable[Request], num_blocks: int) -> Iterator[Request]:
    """Yield the requests whose KV fits into `num_blocks` beside that of the requests before them."""
    for request in requests:
        if request.num_blocks <= num_blocks:
            num_blocks -= request.num_blocks
            yield request
