"""What waits, always in policy order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf

from ballast_policy.fairness.ledger import EMPTY, INPUT_COST, Ledger
from ballast_policy.fairness.order import Place, place
from ballast_policy.fairness.tenant_slots import BelowReservation, TenantSlots
from ballast_policy.request import ONLINE, Request, RequestClass, is_overdue

Ledgers = Mapping[RequestClass, Ledger]

LEAST = 32
"""Requests of a class listed even where the first of them fill a chunk: behind one that does not fit, others may."""


class _Queue:
    """Requests of one tenant and priority, sorted by their place. Both ends are cheap; what left the front is a gap."""

    __slots__ = ("places", "requests", "start")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.requests: list[Request] = []
        self.start = 0

    def __len__(self) -> int:
        return len(self.places) - self.start

    def add(self, request: Request) -> None:
        key = place(request)
        index = bisect_left(self.places, key, self.start)
        self.places.insert(index, key)
        self.requests.insert(index, request)

    def remove(self, request: Request) -> None:
        index = bisect_left(self.places, place(request), self.start)
        if index >= len(self.requests) or self.requests[index] is not request:
            raise KeyError(f"request {request.seq} does not wait, or its order changed while it waited")
        if index > self.start:
            del self.places[index], self.requests[index]
            return
        self.start += 1
        if self.start * 2 > len(self.places):
            del self.places[: self.start], self.requests[: self.start]
            self.start = 0

    def put_off(self, now: float) -> None:
        while (first := self.requests[self.start]).slack < inf and is_overdue(first, now):
            self.remove(first)
            first.slack = inf
            self.add(first)


class Backlog:
    """Waiting requests of both classes: `class > priority > tenant > slack > prefix group > submission`.

    Adding, removing and looking at the head cost the same whatever the length. The fields that order a request
    (`request_class`, `priority`, `tenant`, `slack`, `prefix_seq`, `seq`) stay as they are while it waits; a
    preempted request comes back through `add` with the `seq` it had, and so to where it stood. Online has no slack of
    its own: it is 0 in time, and infinite once `put_off` found the first token overdue.
    """

    __slots__ = ("_bands", "_counts", "_priorities")

    def __init__(self) -> None:
        self._bands: dict[RequestClass, dict[int, dict[str, _Queue]]] = {c: {} for c in RequestClass}
        self._priorities: dict[RequestClass, list[int]] = {c: [] for c in RequestClass}
        """The bands in use, negated, so that the highest comes first."""
        self._counts: dict[RequestClass, int] = dict.fromkeys(RequestClass, 0)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[Request]:
        """Go through everything that waits, band by band; for shutdown and inspection, not for planning."""
        for request_class in RequestClass:
            for negated in self._priorities[request_class]:
                for queue in self._bands[request_class][-negated].values():
                    yield from islice(queue.requests, queue.start, None)

    def count(self, request_class: RequestClass) -> int:
        """Give how many requests of a class wait."""
        return self._counts[request_class]

    def tenants(self, request_class: RequestClass) -> set[str]:
        """Give the tenants of a class that wait (for `Ledger.lift`)."""
        return {tenant for band in self._bands[request_class].values() for tenant in band}

    def add(self, request: Request) -> None:
        """Let a request wait."""
        if request.request_class is ONLINE:
            request.slack = 0.0
        bands = self._bands[request.request_class]
        band = bands.get(request.priority)
        if band is None:
            band = bands[request.priority] = {}
            insort(self._priorities[request.request_class], -request.priority)
        queue = band.get(request.tenant)
        if queue is None:
            queue = band[request.tenant] = _Queue()
        queue.add(request)
        self._counts[request.request_class] += 1

    def remove(self, request: Request) -> None:
        """Take a request out, at any time: admitted, aborted or given back. KeyError if it does not wait."""
        bands = self._bands[request.request_class]
        queue = bands.get(request.priority, {}).get(request.tenant)
        if queue is None:
            raise KeyError(f"request {request.seq} does not wait: nothing of its tenant and priority does")
        queue.remove(request)
        self._counts[request.request_class] -= 1
        if not queue:
            del bands[request.priority][request.tenant]
            if not bands[request.priority]:
                del bands[request.priority]
                self._priorities[request.request_class].remove(-request.priority)

    def put_off(self, now: float) -> None:
        """Let online requests whose first token is overdue wait behind the others of their tenant and priority.

        Of each tenant and priority those at the front: they are due in the order they came in.
        """
        for band in self._bands[ONLINE].values():
            for queue in band.values():
                queue.put_off(now)

    def head(
        self,
        limit_per_class: int,
        ledgers: Ledgers | None = None,
        room: Mapping[str, int] | None = None,
        num_tokens: float = inf,
        slots: Mapping[RequestClass, TenantSlots] | None = None,
    ) -> list[Request]:
        """Give the first that wait, online before offline, at most so many of each class.

        Tenants take turns as they would if each request were admitted as it is listed: its input is charged to a
        copy of the ledger, and in a class with `slots` a tenant below its reservation goes first. `room` limits how
        many offline requests of a tenant are worth listing (slots it may still take): one more than that is listed,
        which says why it waits, and does not count. A class ends early, behind `LEAST` requests, once it has
        `num_tokens` to compute: a step computes no more than its chunk.
        """
        out: list[Request] = []
        for request_class in RequestClass:
            if not self._counts[request_class]:
                continue
            listing = _Listing(
                limit_per_class,
                num_tokens,
                (ledgers or {}).get(request_class, EMPTY),
                dict(room) if room and request_class is RequestClass.OFFLINE else {},
                (slots or {}).get(request_class),
            )
            for negated in self._priorities[request_class]:
                if listing.is_full:
                    break
                queues = self._bands[request_class][-negated]
                if len(queues) == 1 and not listing.room:
                    (queue,) = queues.values()
                    listing.take_all(queue)
                else:
                    listing.take_turns(queues)
            out += listing.requests
        return out


class _Listing:
    """The head of one class in the making."""

    __slots__ = ("ledger", "left", "num_tokens", "requests", "room", "slots")

    def __init__(
        self, limit: int, num_tokens: float, ledger: Ledger, room: dict[str, int], slots: TenantSlots | None
    ) -> None:
        self.requests: list[Request] = []
        self.left = limit
        self.num_tokens = num_tokens
        self.ledger = ledger
        self.room = room
        self.slots = slots

    @property
    def is_full(self) -> bool:
        return self.left <= 0 or (self.num_tokens <= 0 and len(self.requests) >= LEAST)

    def take_all(self, queue: _Queue) -> None:
        """List one tenant's requests in their order."""
        for request in islice(queue.requests, queue.start, queue.start + self.left):
            if self.is_full:
                return
            self._take(request)

    def take_turns(self, queues: Mapping[str, _Queue]) -> None:
        """List the requests of one band: of a tenant that is behind its reservation, else of the least served one."""
        requests, room, slots = self.requests, self.room, self.slots
        services, weight = self.ledger.services, self.ledger.weight
        turns = _Turns(
            [(services.get(tenant, 0.0), q.places[q.start], q.start, tenant) for tenant, q in queues.items()],
            slots,
        )
        while turns.of and self.left > 0 and (self.num_tokens > 0 or len(requests) < LEAST):  # `is_full` written out
            service, _, index, tenant = turn = turns.next()
            queue = queues[tenant]
            request = queue.requests[index]
            index += 1
            if tenant in room:
                room[tenant] -= 1
                if room[tenant] < 0:
                    requests.append(request)
                    turns.end(turn)
                    continue
            size = request.num_tokens - request.num_cached
            requests.append(request)  # as `_take` does it
            self.left -= 1
            self.num_tokens -= size
            if slots is not None:
                slots.count(tenant)
            if index == len(queue.requests):
                turns.end(turn)
            else:
                service += INPUT_COST * size / weight(tenant)
                turns.go_on(turn, (service, queue.places[index], index, tenant))

    def _take(self, request: Request) -> None:
        self.requests.append(request)
        self.left -= 1
        self.num_tokens -= request.num_tokens - request.num_cached
        if self.slots is not None:
            self.slots.count(request.tenant)


_Turn = tuple[float, Place, int, str]
"""Service so far, then the place and the index of the tenant's next request."""


class _Turns:
    """Whose request of a band is listed next."""

    __slots__ = ("_below", "_heap", "of")

    def __init__(self, turns: list[_Turn], slots: TenantSlots | None) -> None:
        self._heap = turns
        self.of = {turn[3]: turn for turn in self._heap}
        """By tenant; what else the heap holds is over."""
        heapify(self._heap)
        self._below = None if slots is None else BelowReservation(slots, self.of)

    def next(self) -> _Turn:
        """Give the turn of who is behind by most, else of the least served."""
        heap, of, below = self._heap, self.of, self._below
        if below is not None and below.soonest <= below.slots.num_held and (tenant := below.first(of)) is not None:
            return of[tenant]
        while of.get((first := heap[0])[3]) is not first:
            heappop(heap)
        return first

    def go_on(self, turn: _Turn, following: _Turn) -> None:
        """Let a tenant wait for its next turn."""
        self.of[turn[3]] = following
        if turn is self._heap[0]:
            heapreplace(self._heap, following)
        else:
            heappush(self._heap, following)

    def end(self, turn: _Turn) -> None:
        """Take out a tenant that has no more to list."""
        del self.of[turn[3]]
