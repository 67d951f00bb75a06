"""The offline jobs that wait in the queue, and the feeder that keeps some of their items at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count, cycle
from math import inf

from ballast_policy.claim import laxity
from ballast_policy.request import Request, RequestClass
from ballast_sim.item import Item
from ballast_sim.replica import Replica
from ballast_sim.traffic import Arrival


@dataclass
class Job:
    """A batch of offline requests."""

    name: str
    items: Iterator[Arrival]
    max_output: int
    """What its items declare as their `max_tokens`; their real length is known to the simulation alone."""
    num_items: float = inf
    """inf: a backlog that never ends, for measuring harvest."""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    num_claimed: int = 0
    num_finished: int = 0
    finished_at: float = inf

    @classmethod
    def of(
        cls, name: str, lengths: Iterable[Arrival], *, tenant: str = "default", deadline: float | None = None
    ) -> Job:
        """A job of exactly these items."""
        items = list(lengths)
        longest = max((item.num_output for item in items), default=1)
        return cls(name, iter(items), longest, len(items), tenant, deadline=deadline)

    @classmethod
    def endless(cls, name: str, lengths: Iterable[Arrival], *, tenant: str = "default") -> Job:
        """A job that never runs out: its lengths come round again."""
        items = list(lengths)
        return cls(name, cycle(items), max(item.num_output for item in items), tenant=tenant)


@dataclass
class Pool:
    """All jobs. Each replica keeps enough items of every job at hand that a free slot is filled in the next step."""

    jobs: list[Job]
    declared_output: int | None = None
    """`max_tokens` of every item instead of what its job declares."""
    first_seq: int = 0
    items: list[Item] = field(default_factory=list)
    """Every item that was claimed."""
    _by_name: dict[str, Job] = field(init=False)
    _seqs: Iterator[int] = field(init=False)
    _at_hand: dict[tuple[str, str], int] = field(init=False, default_factory=dict)
    """(replica, job) -> items that were claimed and never ran."""

    def __post_init__(self) -> None:
        self._by_name = {job.name: job for job in self.jobs}
        self._seqs = count(self.first_seq)

    def refill(self, replica: Replica) -> None:
        """Claim what brings every job back to its share of a batch at this replica."""
        for job in self.jobs:
            at_hand = self._at_hand.get((replica.name, job.name), 0)
            wanted = min(self.share(replica) - at_hand, job.num_items - job.num_claimed)
            if wanted > 0:
                self._claim(job, int(wanted), replica)

    def share(self, replica: Replica) -> int:
        """Items of one job that a replica keeps waiting."""
        return max(2, -(-replica.config.slots // len(self.jobs)) + 1)

    def admitted(self, replica: Replica, item: Item) -> None:
        """An item left the backlog of a replica for its first slot."""
        self._at_hand[replica.name, item.job] -= 1

    def finished(self, item: Item) -> None:
        """An item has its result."""
        job = self._by_name[item.job]
        job.num_finished += 1
        if job.num_finished == job.num_items:
            job.finished_at = item.last_token

    def _claim(self, job: Job, number: int, replica: Replica) -> None:
        now = replica.clock.now
        rate = job.num_finished / now if now > 0 and job.num_finished else None
        left = 0 if job.num_items == inf else int(job.num_items) - job.num_finished
        slack = laxity(job.deadline, now, left, rate)
        claimed = []
        for _ in range(number):
            arrival = next(job.items)
            request = Request(
                seq=next(self._seqs),
                request_class=RequestClass.OFFLINE,
                arrival=now,
                num_prompt=arrival.num_prompt,
                max_output=max(self.declared_output or job.max_output, arrival.num_output),
                tenant=job.tenant,
                priority=job.priority,
                laxity=slack,
                prefix_group=arrival.prefix_group,
                num_tokens=arrival.num_prompt,
            )
            claimed.append(Item(request, arrival.num_output, arrival.prefix_tokens, job.name))
        job.num_claimed += number
        key = (replica.name, job.name)
        self._at_hand[key] = self._at_hand.get(key, 0) + number
        self.items += claimed
        replica.take(claimed)
