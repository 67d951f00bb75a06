"""Waiting requests, always in policy order."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from math import inf

from ballast_policy.fairness.ledger import EMPTY, INPUT_COST, Ledger
from ballast_policy.fairness.order import Place, place
from ballast_policy.fairness.tenant_slots import BelowReservation, TenantSlots
from ballast_policy.request import OFFLINE, ONLINE, Request, RequestClass, is_overdue

Ledgers = Mapping[RequestClass, Ledger]

LEAST = 32
"""Requests of a class that are listed even if the first of them fill a chunk: later ones may still fit."""


class _Queue:
    """Requests of one tenant and priority, sorted by place. Requests before `start` are gone: both ends are cheap."""

    __slots__ = ("places", "requests", "start")

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.requests: list[Request] = []
        self.start = 0

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

    def defer(self, now: float) -> None:
        while (first := self.requests[self.start]).slack < inf and is_overdue(first, now):
            self.remove(first)
            first.slack = inf
            self.add(first)


class Backlog:
    """Waiting requests of both classes: `class > priority > tenant > slack > prefix key > submission`.

    The cost of each method does not depend on the length. The fields that order a request (`request_class`, `priority`,
    `tenant`, `slack`, `prefix_seq`, `seq`) do not change while it waits. A preempted request returns to its place. The
    slack of an online request is 0, and infinite once `defer` finds its first token overdue.
    """

    def __init__(self) -> None:
        self._bands = {c: defaultdict[int, defaultdict[str, _Queue]](lambda: defaultdict(_Queue)) for c in RequestClass}
        self._counts: dict[RequestClass, int] = dict.fromkeys(RequestClass, 0)

    def __len__(self) -> int:
        return sum(self._counts.values())

    def __iter__(self) -> Iterator[Request]:
        """Yield all waiting requests, for inspection, in any order."""
        for bands in self._bands.values():
            for band in bands.values():
                for queue in band.values():
                    yield from islice(queue.requests, queue.start, None)

    def count(self, request_class: RequestClass) -> int:
        return self._counts[request_class]

    def tenants(self, request_class: RequestClass) -> set[str]:
        return {tenant for band in self._bands[request_class].values() for tenant in band}

    def add(self, request: Request) -> None:
        if request.request_class is ONLINE:
            request.slack = 0.0
        self._bands[request.request_class][request.priority][request.tenant].add(request)
        self._counts[request.request_class] += 1

    def remove(self, request: Request) -> None:
        """Remove a request. Raise KeyError if it does not wait."""
        bands = self._bands[request.request_class]
        queue = bands[request.priority].get(request.tenant) or _Queue()
        queue.remove(request)
        self._counts[request.request_class] -= 1
        if queue.start == len(queue.places):
            del bands[request.priority][request.tenant]
            if not bands[request.priority]:
                del bands[request.priority]

    def defer(self, now: float) -> None:
        """Move online requests whose first token is overdue behind the others of their tenant and priority."""
        for band in self._bands[ONLINE].values():
            for queue in band.values():
                queue.defer(now)

    def head(
        self,
        limit_per_class: int,
        ledgers: Mapping[RequestClass, Ledger] = {},
        free_slots: Mapping[str, int] = {},
        num_tokens: float = inf,
        slots: Mapping[RequestClass, TenantSlots | None] = {},
    ) -> list[Request]:
        """Return the first waiting requests, online before offline, at most `limit_per_class` of each class.

        Tenants take turns as if each request were admitted when it is listed: its input is added to their service, and
        in a class with `slots` a tenant below its reservation goes first. `free_slots`: slots that tenants with a cap
        may still take for offline requests. One request more is listed, so that the plan can state why it waits; it
        does not count. After `LEAST` requests, a class ends once the listed requests have `num_tokens` to compute.
        """
        out: list[Request] = []
        for request_class in RequestClass:
            free, ledger = dict(free_slots) if request_class is OFFLINE else {}, ledgers.get(request_class, EMPTY)
            listing = _Listing(limit_per_class, num_tokens, ledger, free, slots.get(request_class))
            for _, queues in sorted(self._bands[request_class].items(), reverse=True):
                if listing.is_full:
                    break
                if len(queues) == 1 and not listing.free_slots:
                    listing.take_all(*queues.values())
                else:
                    listing.take_turns(queues)
            out += listing.requests
        return out


@dataclass(slots=True)
class _Listing:
    left: int
    num_tokens: float
    ledger: Ledger
    free_slots: dict[str, int]
    slots: TenantSlots | None
    requests: list[Request] = field(default_factory=list)

    @property
    def is_full(self) -> bool:
        return self.left <= 0 or (self.num_tokens <= 0 and len(self.requests) >= LEAST)

    def take_all(self, queue: _Queue) -> None:
        for request in islice(queue.requests, queue.start, queue.start + self.left):
            if self.is_full:
                return
            self._take(request)

    def take_turns(self, queues: Mapping[str, _Queue]) -> None:
        """List the requests of one band: of a tenant below its reservation, else of the least served tenant."""
        services, weights, slots, free = self.ledger.services, self.ledger.weights, self.slots, self.free_slots
        turns = {t: (services.get(t, 0.0), q.places[q.start], q.start, t) for t, q in queues.items()}
        heap = list(turns.values())  # entries that `turns` no longer holds are over
        heapify(heap)
        below = None if slots is None else BelowReservation(slots, turns)
        while turns and self.left > 0 and (self.num_tokens > 0 or len(self.requests) < LEAST):
            tenant = None if below is None else below.first(turns)
            if tenant is None:
                while turns.get((first := heap[0])[3]) is not first:
                    heappop(heap)
                tenant = first[3]
            service, _, index, _ = turns[tenant]
            queue = queues[tenant]
            request = queue.requests[index]
            index += 1
            if tenant in free:
                free[tenant] -= 1
                if free[tenant] < 0:
                    self.requests.append(request)
                    del turns[tenant]
                    continue
            size = self._take(request)
            if index == len(queue.requests):
                del turns[tenant]
                continue
            service += INPUT_COST * size / weights.get(tenant, 1.0)
            turns[tenant] = following = (service, queue.places[index], index, tenant)
            heappush(heap, following)

    def _take(self, request: Request) -> int:
        """List a request; return the tokens that it has to compute."""
        size = request.num_tokens - request.num_cached
        self.requests.append(request)
        self.left -= 1
        self.num_tokens -= size
        if self.slots is not None:
            self.slots.count(request.tenant)
        return size
