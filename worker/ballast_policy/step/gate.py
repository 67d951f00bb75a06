"""The order in which the requests of a class are served, and the slots that they take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge

from ballast_policy.fairness.order import ranked
from ballast_policy.fairness.tenant_slots import reserved_first, tenant_slots
from ballast_policy.plan import Reason
from ballast_policy.request import PARKED, WAITING, Request, computed
from ballast_policy.step.class_requests import ClassRequests
from ballast_policy.step.draft import StepDraft


@dataclass(slots=True)
class AdmissionGate:
    """Admits the requests of a class in order. It closes behind a request that cannot start.

    - Without prefill tokens, only requests with a single token to compute pass.
    - Without blocks or time, only parked requests pass: they hold most of their blocks, and free them when they finish.
    - Without a slot, or behind a parked request that cannot be resumed, no request passes.
    """

    step: StepDraft
    group: ClassRequests
    count_free: Callable[[], int]
    """Returns the free slots of the class."""
    num_rows: int
    """Newcomers that may start without a lower priority that is parked."""
    is_closed: bool = False
    _reason: Reason | None = None
    """Why the first request did not pass."""
    _stops_prefill: bool = False
    _stops_waiting: bool = False
    _has_explained: bool = False
    """True once the draft explains why the first waiting request does not pass."""
    _num_free: int = 0
    """Free slots at the last count, minus the slots taken since then. More may be free."""
    _holders: list[Request] | None = None

    def has_free_slot(self) -> bool:
        if self._num_free < 1:
            self._num_free = self.count_free()
        return self._num_free > 0

    def has_slot_for(self, request: Request) -> bool:
        """Return whether a slot is free, or a request of the class with a lower priority holds one."""
        parked = self.group.parked + self.group.leaving if self.num_rows < 1 else []
        if request.phase is WAITING and self.num_rows < 1 and all(r.priority >= request.priority for r in parked):
            return False
        return self.has_free_slot() or any(holder.priority < request.priority for holder in self.group.running)

    def start(self, request: Request, num_tokens: int, reason: Reason) -> None:
        """Start a request in a slot that `has_slot_for` found. Park the last holder if no slot is free."""
        self._num_free -= 1
        self.num_rows -= request.phase is WAITING
        if self._num_free < 0 and self.count_free() < 1:
            if self._holders is None:
                self._holders = self.group.ranked(self.group.running)
            while self._holders and self._holders[-1] in self.step.draft.gone:
                self._holders.pop()
            self.step.park(self._holders[-1:], Reason.PRIORITY)
        self.step.start(request, num_tokens, reason)

    def close(self, request: Request, reason: Reason) -> None:
        """Stop a request, and the later requests that would lack the same resource."""
        is_waiting = request.phase is WAITING
        if reason is Reason.CHUNK_SPENT:
            self._stops_prefill = True
        elif is_waiting and (reason is not Reason.NO_SLOT or self.num_rows < 1):
            self._stops_waiting = True
        else:
            self.is_closed = True
        self._reason = self._reason or reason
        self._has_explained |= is_waiting
        self.step.draft.explain(request, reason)

    def stops(self, request: Request) -> bool:
        """Return whether the gate is closed to a request. Explain it for the first waiting request."""
        if self._reason is None:
            return False
        is_waiting = request.phase is WAITING
        is_stopped = self.is_closed or (is_waiting and self._stops_waiting)
        is_stopped = is_stopped or (self._stops_prefill and request.num_tokens - computed(request) > 1)
        if is_stopped and is_waiting and not self._has_explained:
            self._has_explained = True
            self.step.draft.explain(request, self._reason)
        return is_stopped

    def in_order(self, prefills: Iterable[Request]) -> Iterator[Request]:
        """Yield `prefills`, parked and waiting requests in order of priority; at equal priority `prefills` first.

        The gate ends the parked and waiting requests. Requests that the step parks or preempts meanwhile are left out.
        """
        group, gone = self.group, self.step.draft.gone
        left, num_parked = deque(group.ranked(prefills)), len(group.parked)
        for request in candidates(group, group.waiting):
            while left and left[0].priority >= request.priority:
                if (first := left.popleft()) not in gone:
                    yield first
            if self._has_explained and (self.is_closed or (self._stops_waiting and not num_parked)):
                break
            num_parked -= request.phase is PARKED
            if request not in gone:
                yield request
        yield from (request for request in left if request not in gone)


def candidates(group: ClassRequests, waiting: Sequence[Request]) -> Iterable[Request]:
    """Return the parked requests of a class and `waiting` in policy order; at equal service parked requests first."""
    ordered: Iterable[Request] = waiting
    if group.parked:
        service, parked = group.ledger.services.get, ranked(group.parked, group.ledger)
        ordered = merge(parked, waiting, key=lambda r: (-r.priority, service(r.tenant, 0.0)))
    slots = tenant_slots(group.ledger, group.running + group.started)
    return ordered if slots is None else reserved_first(ordered, slots)
