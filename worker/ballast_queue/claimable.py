"""Jobs with items that workers can claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ballast_queue.job import JobHead
from ballast_queue.records import head_of, readable
from ballast_queue.store import Store

HEADS_OF_GROUP = 8
"""Heads of one tenant in one band: the nearest deadlines first, then the order of submission."""
MOST_HEADS = 512
"""Heads of all groups together. With more groups than this, each group has one."""


class Group(NamedTuple):
    """The jobs of one tenant in one band."""

    priority: int
    tenant: str

    @property
    def prefix(self) -> str:
        """The start of the ranks of its jobs."""
        return f"{1000 - self.priority:04d}|{self.tenant}|"


@dataclass(frozen=True, slots=True)
class Demand:
    """The offline tenants with claimable items, and the items that all workers of a queue hold."""

    groups: tuple[Group, ...] = ()
    """Groups with claimable items, higher bands first."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Items under lease by tenant."""

    @property
    def tenants(self) -> set[str]:
        """Tenants with claimable items."""
        return {group.tenant for group in self.groups}


@dataclass(frozen=True, slots=True)
class Claimable:
    """Law: reads only, and a reply stays small with any number of jobs."""

    _store: Store

    @readable("the demand")
    def demand(self) -> Demand:
        """Return the tenants with claimable items, and the number of items that each tenant holds."""
        names, held = self._store.call(self._store.functions.demand())
        found = (name.split("|") for name in sorted(names.decode().splitlines()))
        return Demand(
            tuple(Group(1000 - int(band), tenant) for band, tenant, _ in found),
            {name.decode(): int(n) for name, n in zip(held[::2], held[1::2], strict=True)},
        )

    @readable("the claimable jobs")
    def heads(self, groups: Sequence[Group] | None = None) -> list[JobHead]:
        """Return the first jobs with claimable items of each group (of all groups by default)."""
        wanted = self.demand().groups if groups is None else groups
        if not wanted:
            return []
        each = max(1, min(HEADS_OF_GROUP, MOST_HEADS // len(wanted)))
        ranks = self._store.call(self._store.functions.look(each, [group.prefix for group in wanted]))
        if not ranks:
            return []
        job_ids = [rank.decode().split("|", 4)[4] for rank in ranks]
        found = map(head_of, job_ids, self._store.call(self._store.functions.heads(job_ids)))
        return [head for head in found if head.waiting > 0]
