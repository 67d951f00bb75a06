"""The requests of one class in one step: residents by what they compute, and the requests that wait."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ballast_policy.backlog import Ledgers
from ballast_policy.fairness.ledger import EMPTY, Ledger
from ballast_policy.fairness.order import ranked
from ballast_policy.fairness.tenant_slots import TenantSlots, reserved_first
from ballast_policy.request import OFFLINE, ONLINE, PARKED, Request


@dataclass(slots=True)
class ClassRequests:
    """The requests of one class, and sums over them. `Step` moves requests when it starts, parks or preempts them."""

    ledger: Ledger
    waiting: Sequence[Request]
    """In policy order."""
    decodes: list[Request]
    """Running, with one token to compute."""
    prefills: list[Request]
    """Running, with more than one token to compute."""
    parked: list[Request]
    growing: list[Request]
    """Decodes whose next token begins a KV block."""
    context: int
    """Sum of the contexts of `decodes`, including their next tokens."""
    num_blocks: int
    """KV blocks of the class. A block that two requests share counts twice."""
    leaving: list[Request] = field(default_factory=list)
    """Parked in this step. Their KV can still be reclaimed."""
    started: list[Request] = field(default_factory=list)
    """Admitted or resumed in this step."""
    is_counted: bool = False
    """True once the step has taken the blocks and the time of `decodes`."""

    @property
    def num_running(self) -> int:
        """Return the slots that the class held before this step, without those it has given up."""
        return len(self.decodes) + len(self.prefills)

    @property
    def num_held(self) -> int:
        """Return the slots that the class holds, including those of `started`."""
        return len(self.decodes) + len(self.prefills) + len(self.started)

    @property
    def running(self) -> list[Request]:
        """Return the residents that hold a slot."""
        return self.decodes + self.prefills

    @property
    def residents(self) -> list[Request]:
        """Return the requests that held KV before this step and still do."""
        return self.decodes + self.prefills + self.parked + self.leaving

    def below(self, request: Request) -> list[Request]:
        """Return the residents of lower priority than a request."""
        return [other for other in self.residents if other.priority < request.priority]

    def ranked(self, requests: Iterable[Request]) -> list[Request]:
        """Return requests of this class in policy order."""
        listed = list(requests)
        if len(listed) < 2:
            return listed
        ordered, reserved = ranked(listed, self.ledger), self.ledger.reserved
        return reserved_first(ordered, TenantSlots(reserved, {})) if reserved else ordered

    def tenant_slots(self) -> TenantSlots | None:
        """Return the slots that the class holds now, by tenant; None if no tenant has a reservation."""
        reserved, holders = self.ledger.reserved, self.running + self.started
        return TenantSlots(reserved, Counter([request.tenant for request in holders])) if reserved else None

    def remove(self, gone: set[Request]) -> None:
        """Remove residents that were parked or preempted."""
        self.parked = [request for request in self.parked if request not in gone]
        self.prefills = [request for request in self.prefills if request not in gone]
        self.leaving = [request for request in self.leaving if request not in gone]
        self.growing = [request for request in self.growing if request not in gone]
        self.decodes = [request for request in self.decodes if request not in gone]
        self.context = sum([request.num_tokens for request in self.decodes])


def by_class(
    residents: Iterable[Request], waiting: Sequence[Request], ledgers: Ledgers, block_tokens: int
) -> tuple[ClassRequests, ClassRequests]:
    """Return the online and the offline requests of an engine; in `waiting`, online comes first."""
    split = bisect_left(waiting, 1, key=lambda request: request.request_class is OFFLINE)
    online = [request for request in residents if request.request_class is ONLINE]
    offline = [request for request in residents if request.request_class is OFFLINE]
    return (
        _sort(online, waiting[:split], ledgers.get(ONLINE, EMPTY), block_tokens),
        _sort(offline, waiting[split:], ledgers.get(OFFLINE, EMPTY), block_tokens),
    )


def _sort(residents: list[Request], waiting: Sequence[Request], ledger: Ledger, block_tokens: int) -> ClassRequests:
    decodes: list[Request] = []
    prefills: list[Request] = []
    parked: list[Request] = []
    growing: list[Request] = []
    context = held = 0  # local: this is the longest loop of a step
    for request in residents:
        num_blocks, num_computed = request.num_blocks, request.num_computed
        held += num_blocks
        if request.phase is PARKED:
            parked.append(request)
        elif request.num_tokens - num_computed > 1:
            prefills.append(request)
        else:
            decodes.append(request)
            context += num_computed
            if num_computed >= num_blocks * block_tokens:
                growing.append(request)
    context += len(decodes)
    return ClassRequests(ledger, waiting, decodes, prefills, parked, growing, context, held)
