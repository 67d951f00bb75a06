"""Jobs with items that workers can claim."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
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
MOST_AVOIDED = 1000
"""Avoided jobs of one group that do not hide the jobs behind them."""


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
    def heads(
        self, groups: Sequence[Group] | None = None, avoided: Mapping[Group, Collection[str]] | None = None
    ) -> list[JobHead]:
        """Return the first jobs with claimable items of each group (of all groups by default), without avoided jobs."""
        wanted = self.demand().groups if groups is None else groups
        if not wanted:
            return []
        job_ids = list(self._first_jobs(wanted, avoided or {}))
        if not job_ids:
            return []
        read = self._store.unreadable.try_read
        replies = zip(job_ids, self._store.call(self._store.functions.heads(job_ids)), strict=True)
        found = [read(f"job {job_id}", partial(head_of, job_id, reply)) for job_id, reply in replies]
        return [head for head in found if head is not None and head.waiting > 0]

    def _first_jobs(self, groups: Sequence[Group], avoided: Mapping[Group, Collection[str]]) -> Iterator[str]:
        """Yield the ids of the first jobs of each group. Read as many more as are avoided, since these may be first."""
        each = max(1, min(HEADS_OF_GROUP, MOST_HEADS // len(groups)))
        by_limit: dict[int, list[str]] = defaultdict(list)
        for group in groups:
            by_limit[each + min(len(avoided.get(group, ())), MOST_AVOIDED)].append(group.prefix)
        calls = [self._store.functions.first_ranks(limit, prefixes) for limit, prefixes in by_limit.items()]
        dropped = set(chain.from_iterable(avoided.values()))
        found = Counter[str]()
        for rank in chain.from_iterable(self._store.connection.call_many(calls)):
            parts = text_of(rank).split("|", 4)
            group_name = "|".join(parts[:2])
            if len(parts) == 5 and parts[4] not in dropped and found[group_name] < each:
                found[group_name] += 1
                yield parts[4]


def _group_of(name: str) -> Group:
    band, tenant, _ = name.split("|")
    return Group(1000 - int(band), tenant)
