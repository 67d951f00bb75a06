"""Whose turn it is within a class, and when nobody else's is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice

from ballast_policy.order import ranked, turning
from ballast_policy.plan import Reason
from ballast_policy.request import PARKED, WAITING, Request, computed
from ballast_policy.step import Step
from ballast_policy.tenant_slots import reserved_first


class Door:
    """Nobody overtakes: once one does not get in, those behind that want the same stay out.

    Want of prefill tokens stops who prefills; a single token needs none. Want of blocks or time stops who waits, not
    who is parked: it needs less of them, and its KV comes free only when it goes on. Want of a slot stops everybody,
    and so does a parked request that cannot go on.
    """

    def __init__(self, step: Step) -> None:
        self._step = step
        self._reason: Reason | None = None
        """Why the first was turned away."""
        self._shuts_prefill = self._shuts_waiting = self._shuts_all = False
        self._has_told_waiting = False

    @property
    def is_shut(self) -> bool:
        """Tell whether nobody at all gets in any more."""
        return self._shuts_all

    def close(self, request: Request, reason: Reason) -> None:
        """Turn one away and those behind it."""
        is_waiting = request.phase is WAITING
        if reason is Reason.CHUNK_SPENT:
            self._shuts_prefill = True
        elif is_waiting and reason is not Reason.NO_SLOT:
            self._shuts_waiting = True
        else:
            self._shuts_all = True
        self._reason = self._reason or reason
        self._has_told_waiting |= is_waiting
        self._step.explain(request, reason)

    def is_shut_for(self, request: Request) -> bool:
        """Tell whether one ahead of it was turned away; say so for the first that waits."""
        if self._reason is None:
            return False
        is_waiting = request.phase is WAITING
        is_shut = self._shuts_all or (self._shuts_waiting and is_waiting)
        if not is_shut and self._shuts_prefill:
            is_shut = request.num_tokens - computed(request) > 1
        if is_shut and is_waiting and not self._has_told_waiting:
            self._has_told_waiting = True
            self._step.explain(request, self._reason)
        return is_shut

    def is_shut_for_good(self, *, has_parked: bool) -> bool:
        """Tell whether asking further is no use: everybody is shut out, and the first that waits knows why."""
        return self._has_told_waiting and (self._shuts_all or (self._shuts_waiting and not has_parked))


def candidates(step: Step, parked: Sequence[Request], waiting: Sequence[Request]) -> Iterable[Request]:
    """Go through who could take a slot of one class, in policy order; among equal tenants parked ones first.

    Who is behind its reservation goes first in its priority.
    """
    ordered = _merged(step, parked, waiting)
    some = next(chain(parked, waiting), None)
    slots = step.tenant_slots(some) if some is not None else None
    return ordered if slots is None else reserved_first(ordered, slots)


def _merged(step: Step, parked: Sequence[Request], waiting: Sequence[Request]) -> Iterator[Request]:
    if not parked:
        yield from waiting
        return
    ledger = step.ledger(parked[0])
    left, turn = deque(ranked(parked, ledger)), turning(ledger)
    first, service = turn(left[0]), ledger.services.get
    for index, request in enumerate(waiting):
        until = (-request.priority, service(request.tenant, 0.0))  # `turn` written out: many wait
        while first <= until:
            yield left.popleft()
            if not left:
                yield from islice(waiting, index, None)
                return
            first = turn(left[0])
        yield request
    yield from left


def turns(
    step: Step, prefills: Iterable[Request], parked: Sequence[Request], waiting: Sequence[Request], door: Door
) -> Iterator[Request]:
    """Go through who prefills and who could take a slot, in order of priority; running ones first among equals.

    Who prefills is asked to the last, the others until the door is shut for good, and nobody who was taken out.
    """
    left = deque(step.ranked(prefills))
    num_parked = len(parked)
    for request in candidates(step, parked, waiting):
        while left and left[0].priority >= request.priority:
            if (first := left.popleft()) not in step.gone:
                yield first
        if door.is_shut_for_good(has_parked=num_parked > 0):
            break
        num_parked -= request.phase is PARKED
        if request not in step.gone:
            yield request
    for request in left:
        if request not in step.gone:
            yield request
