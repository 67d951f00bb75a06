"""Jobs with items that workers can claim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ballast_queue.job import JobHead
from ballast_queue.records import head_of, readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

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
    """The claimable items of a queue.

    It only reads, and a reply stays small with any number of jobs.
    """

    _store: Store

    @readable("the demand")
    def demand(self) -> Demand:
        """Return the tenants with claimable items, and the number of items that each tenant holds."""
        names, held = self._store.call(self._store.functions.demand())
        read = self._store.unreadable.try_read
        groups = (read(f"group {name!r}", partial(_group_of, name)) for name in sorted(text_of(names).splitlines()))
        counts = {text_of(name): n for name, n in zip(held[::2], held[1::2], strict=True)}
        numbers = ((name, read(f"held items of tenant {name!r}", partial(int, n))) for name, n in counts.items())
        return Demand(tuple(filter(None, groups)), {name: number for name, number in numbers if number is not None})

    @readable("the claimable jobs")
    def heads(self, groups: Sequence[Group] | None = None) -> list[JobHead]:
        """Return the first jobs with claimable items of each group (of all groups by default)."""
        wanted = self.demand().groups if groups is None else groups
        if not wanted:
            return []
        each = max(1, min(HEADS_OF_GROUP, MOST_HEADS // len(wanted)))
        ranks = self._store.call(self._store.functions.first_ranks(each, [group.prefix for group in wanted]))
        if not ranks:
            return []
        read = self._store.unreadable.try_read
        parts = (text_of(rank).split("|", 4) for rank in ranks)
        job_ids = [part[4] for part in parts if len(part) == 5]
        if not job_ids:
            return []
        replies = zip(job_ids, self._store.call(self._store.functions.heads(job_ids)), strict=True)
        found = [read(f"job {job_id}", partial(head_of, job_id, reply)) for job_id, reply in replies]
        return [head for head in found if head is not None and head.waiting > 0]


def _group_of(name: str) -> Group:
    band, tenant, _ = name.split("|")
    return Group(1000 - int(band), tenant)
