"""Which offline residents the reservation covers, in slots and in KV blocks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice

from ballast_policy.request import Request
from ballast_policy.snapshot import EngineSnapshot
from ballast_policy.step.class_requests import ClassRequests


@dataclass
class Coverage:
    """The reservation in one step. Each figure and each set is computed when a phase first asks for it."""

    snapshot: EngineSnapshot
    online: ClassRequests
    offline: ClassRequests
    gone: Collection[Request]
    """Residents that the step parks or preempts; the step adds to it."""
    slots: int
    """Reserved slots that offline has work for."""

    @property
    def slots_in_use(self) -> int:
        """Return the reserved slots that offline holds."""
        return min(self.slots, self.offline.num_held)

    @cached_property
    def blocks(self) -> int:
        """Reserved KV blocks, without those that the largest online request needs beside them."""
        config, online = self.snapshot.config, self.online
        largest = max([request.num_tokens for request in (*online.residents, *online.waiting[:1])], default=0)
        return max(
            0, min(self.snapshot.reservation.blocks, config.num_blocks - -(-(largest + 1) // config.block_tokens))
        )

    @cached_property
    def _ranked(self) -> list[Request]:
        return self.offline.ranked(self.offline.running)

    @cached_property
    def residents(self) -> set[Request]:
        """Offline residents within the reserved blocks: those that hold a slot come first, then the parked ones."""
        parked = [request for request in self.offline.parked if request.num_blocks <= self.blocks]
        return set(_fitting(chain(self._ranked, self.offline.ranked(parked)), self.blocks))

    @cached_property
    def _order(self) -> list[Request]:
        first = self._ranked[: self.slots]
        if len(first) == len(self._ranked) or sum([request.num_blocks for request in first]) <= self.blocks:
            return self._ranked
        covered = dict.fromkeys(islice(_fitting(self._ranked, self.blocks), self.slots))
        return [*covered, *(request for request in self._ranked if request not in covered)]

    @property
    def running(self) -> list[Request]:
        """Return the offline residents that hold a slot: first those that reserved slots and blocks cover."""
        return [request for request in self._order if request not in self.gone] if self.gone else self._order

    @property
    def reclaimable(self) -> list[Request]:
        """Return the offline residents beyond the reserved blocks: online may reclaim their KV."""
        covered = self.residents
        return [request for request in self.offline.residents if request not in covered]


def _fitting(requests: Iterable[Request], num_blocks: int) -> Iterator[Request]:
    """Yield the requests whose KV fits into `num_blocks` beside that of the requests before them."""
    for request in requests:
        if request.num_blocks <= num_blocks:
            num_blocks -= request.num_blocks
            yield request
