"""Jobs with items that workers can claim."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import NamedTuple

from ballast_queue.job import JobHead
from ballast_queue.records import head_of, readable
from ballast_queue.store import Store
from ballast_queue.unreadable import text_of

HEADS_OF_GROUP = 8
"""Heads of one tenant in one band: the nearest deadlines first, then the order of submission."""
MOST_HEADS = 512
"""Heads of all groups together. With more groups than this, each group has one."""
MOST_GROUPS = 10_000
"""Groups in the reply of `demand`. Of more, each reply has others."""
MOST_AVOIDED = 1000
"""Avoided jobs of one group in one reply. The jobs behind them are in the next one."""


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
    is_partial: bool = False
    """Whether there may be more groups."""

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
        lines = sorted(text_of(names).splitlines())
        groups = filter(None, (read(f"group {name!r}", partial(_group_of, name)) for name in lines))
        counts = {text_of(name): n for name, n in zip(held[::2], held[1::2], strict=True)}
        numbers = ((name, read(f"held items of tenant {name!r}", partial(int, n))) for name, n in counts.items())
        known = {name: number for name, number in numbers if number is not None}
        return Demand(tuple(groups), known, is_partial=len(lines) >= MOST_GROUPS)

    @readable("the claimable jobs")
    def heads(
        self,
        groups: Sequence[Group] | None = None,
        avoided: Mapping[Group, Collection[str]] | None = None,
        starts: dict[Group, str] | None = None,
    ) -> list[JobHead]:
        """Return the first jobs with claimable items of each group (of all groups by default), without avoided jobs.

        `starts` has the rank in a group behind which to read. The call sets it if the group may have other jobs behind
        the avoided ones that it read, and removes it at the end of a group.
        """
        wanted = self.demand().groups if groups is None else groups
        if not wanted:
            return []
        job_ids = self._first_jobs(wanted, avoided or {}, {} if starts is None else starts)
        if not job_ids:
            return []
        read = self._store.unreadable.try_read
        replies = zip(job_ids, self._store.call(self._store.functions.heads(job_ids)), strict=True)
        found = [read(f"job {job_id}", partial(head_of, job_id, reply)) for job_id, reply in replies]
        return [head for head in found if head is not None and head.waiting > 0]

    def _first_jobs(
        self, groups: Sequence[Group], avoided: Mapping[Group, Collection[str]], starts: dict[Group, str]
    ) -> list[str]:
        """Return the ids of the first jobs of each group. Read as many more as are avoided: these may be first."""
        each = max(1, min(HEADS_OF_GROUP, MOST_HEADS // len(groups)))
        limits = {group: each + min(len(avoided.get(group, ())), MOST_AVOIDED) for group in groups}
        found: list[str] = []
        for group, page in self._pages(limits, starts).items():
            parts = (rank.split("|", 4) for rank in page)
            dropped = avoided.get(group, ())
            usable = [part[4] for part in parts if len(part) == 5 and part[4] not in dropped]
            found += usable[:each]
            if not usable and len(page) == limits[group]:
                starts[group] = page[-1]
            elif not usable:
                starts.pop(group, None)
        return found

    def _pages(self, limits: Mapping[Group, int], starts: Mapping[Group, str]) -> dict[Group, list[str]]:
        """Return ranks of each group, as many as its limit."""
        by_limit: dict[int, list[str]] = defaultdict(list)
        for group, limit in limits.items():
            by_limit[limit].append(starts.get(group, group.prefix))
        calls = [self._store.functions.first_ranks(limit, places) for limit, places in by_limit.items()]
        pages: dict[str, list[str]] = {group.prefix: [] for group in limits}
        for rank in map(text_of, chain.from_iterable(self._store.connection.call_many(calls))):
            prefix = "|".join(rank.split("|", 2)[:2]) + "|"
            if prefix in pages:  # a hostile server may answer anything
                pages[prefix].append(rank)
        return {group: pages[group.prefix] for group in limits}


def _group_of(name: str) -> Group:
    band, tenant, _ = name.split("|")
    return Group(1000 - int(band), tenant)
