"""The offline jobs of a simulation. Replicas claim their items as workers do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, cycle, islice
from math import inf

from ballast_policy.fairness.ledger import token_cost
from ballast_policy.fairness.tenant_slots import TenantSlots
from ballast_policy.jobs.choice import LEAST_AHEAD, Candidate, in_submission_order, job_slack, share_out
from ballast_policy.jobs.deadline import JobWork, Rates
from ballast_policy.request import OFFLINE, Request
from ballast_policy.snapshot import TenantShare
from ballast_queue.job import output_left
from ballast_sim.replay.fairness import ServiceSamples
from ballast_sim.replay.replica import Replica
from ballast_sim.replay.simulated import SimulatedRequest
from ballast_sim.replay.traffic import Arrival

FIRST_SEQ = 1 << 40
"""Number of the first offline request. Online requests are numbered from 0."""
SAMPLE_EVERY = 16
"""Calls of `refill` between two samples of the tenants' service. A replica calls it before each step."""


@dataclass
class SimulatedJob:
    """A batch of offline requests."""

    name: str
    items: Iterator[Arrival]
    max_output: int
    """`max_tokens` of the items. Only the simulation knows their real length."""
    num_items: float = inf
    """Number of items; inf for a job that never ends, to measure harvest."""
    tenant: str = "default"
    priority: int = 0
    deadline: float | None = None
    num_claimed: int = 0
    num_finished: int = 0
    num_generated: int = 0
    """Output tokens of the finished items."""
    finished_at: float = inf

    @classmethod
    def of(
        cls, name: str, lengths: Iterable[Arrival], *, tenant: str = "default", deadline: float | None = None
    ) -> SimulatedJob:
        """Make a job with exactly these items."""
        items = list(lengths)
        longest = max((item.num_output for item in items), default=1)
        return cls(name, iter(items), longest, len(items), tenant, deadline=deadline)

    @classmethod
    def endless(cls, name: str, lengths: Iterable[Arrival], *, tenant: str = "default") -> SimulatedJob:
        """Make a job that repeats these items indefinitely."""
        items = list(lengths)
        return cls(name, cycle(items), max(item.num_output for item in items), tenant=tenant)

    @property
    def work(self) -> JobWork:
        """The remaining work, as the queue states it. A job without a deadline has no remaining work."""
        if self.deadline is None or self.num_items == inf:
            return JobWork(self.tenant, self.priority, self.deadline, 0)
        num = int(self.num_items)
        tokens = output_left(
            num - self.num_finished,
            stored=num,
            asked=num * self.max_output,
            succeeded=self.num_finished,
            generated=self.num_generated,
        )
        return JobWork(self.tenant, self.priority, self.deadline, num - self.num_finished, tokens)


@dataclass
class JobPool:
    """All jobs, and the items that replicas claimed."""

    jobs: list[SimulatedJob]
    """In order of submission. All of them are submitted before the run starts."""
    items: list[SimulatedRequest] = field(default_factory=list)
    """Every claimed item."""
    _by_name: dict[str, SimulatedJob] = field(init=False)
    _seqs: Iterator[int] = field(init=False, default_factory=lambda: count(FIRST_SEQ))
    _prefetched: Counter[str] = field(init=False, default_factory=Counter)
    """By replica, the claimed items that had no slot yet."""
    samples: ServiceSamples = field(init=False, default_factory=ServiceSamples)
    """Service over time of the tenants that have items to claim."""
    _live: dict[int, SimulatedRequest] = field(init=False, default_factory=dict)
    """Claimed items that are not finished."""
    _held: Counter[str] = field(init=False, default_factory=Counter)
    """By tenant, the number of claimed items that are not finished."""
    _costs: dict[str, float] = field(init=False, default_factory=dict)
    """By tenant, the cost of the finished items."""
    _num_refills: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._by_name = {job.name: job for job in self.jobs}

    def refill(self, replica: Replica) -> None:
        """Claim as many items as a replica can admit in its next step, in the order of the policy."""
        left = [job for job in self.jobs if job.num_claimed < job.num_items]
        self._num_refills += 1
        if self._num_refills % SAMPLE_EVERY == 0:
            self._sample({job.tenant for job in left}, replica.config.tenants, replica.clock.now)
        wanted = replica.config.slots + len(self.jobs) - self._prefetched[replica.name]
        if wanted <= 0 or not left:
            return
        candidates = self._candidates(left, wanted, replica.clock.now)
        slacks = {candidate.job_id: candidate.slack for candidate in candidates}
        for name, num in self._choose(candidates, wanted, replica).items():
            self._claim(self._by_name[name], num, slacks[name], replica)

    def admitted(self, replica: Replica) -> None:
        """Record that an item of a replica got its first slot."""
        self._prefetched[replica.name] -= 1

    def finished(self, item: SimulatedRequest) -> None:
        """Record that an item has its result."""
        job = self._by_name[item.job]
        self._costs[job.tenant] = self._costs.get(job.tenant, 0.0) + _cost(item)
        self._held[job.tenant] -= 1
        del self._live[item.request.seq]
        job.num_finished += 1
        job.num_generated += item.request.num_output
        if job.num_finished == job.num_items:
            job.finished_at = item.last_token

    def _candidates(self, jobs: Sequence[SimulatedJob], wanted: int, now: float) -> list[Candidate]:
        done, generated = (sum(getattr(job, name) for job in self.jobs) for name in ("num_finished", "num_generated"))
        rates = Rates(done / now, generated / now) if now else Rates()
        candidates = [
            Candidate(
                job_id=job.name,
                tenant=job.tenant,
                priority=job.priority,
                slack=job_slack(job.work, rates, now),
                prefix_key=None,
                seq=seq,
                waiting=int(min(wanted, job.num_items - job.num_claimed)),
            )
            for seq, job in enumerate(jobs)
        ]
        return in_submission_order(candidates)

    def _choose(self, candidates: Sequence[Candidate], wanted: int, replica: Replica) -> dict[str, int]:
        """Choose jobs as a worker does.

        The service of a tenant is the cost of its finished items, and the mean cost of an item for each claimed item.
        """
        shares = replica.config.tenants
        weights = {name: share.weight for name, share in shares.items()}
        reserved = {name: share.reserved for name, share in shares.items() if share.reserved > 0}
        num_finished = sum(job.num_finished for job in self.jobs)
        cost = sum(self._costs.values()) / num_finished if num_finished else 1.0
        services = {
            tenant: (self._costs.get(tenant, 0.0) + self._held[tenant] * cost) / weights.get(tenant, 1.0)
            for tenant in {candidate.tenant for candidate in candidates}
        }
        caps = {name: share.max_slots for name, share in shares.items() if share.max_slots}
        held = Counter(item.request.tenant for item in replica.items.values() if item.job) if caps else {}
        return share_out(
            candidates,
            services,
            weights,
            count=wanted,
            cost=cost,
            free_slots={name: most + LEAST_AHEAD - held.get(name, 0) for name, most in caps.items()},
            slots=TenantSlots(reserved, self._held) if reserved else None,
        )

    def _claim(self, job: SimulatedJob, num: int, slack: float, replica: Replica) -> None:
        claimed = []
        for arrival in islice(job.items, num):
            request = Request(
                seq=next(self._seqs),
                request_class=OFFLINE,
                arrival=replica.clock.now,
                num_prompt=arrival.num_prompt,
                max_output=max(job.max_output, arrival.num_output),
                tenant=job.tenant,
                priority=job.priority,
                slack=slack,
                prefix_key=arrival.prefix_key or None,
                num_tokens=arrival.num_prompt,
            )
            claimed.append(SimulatedRequest(request, arrival.num_output, arrival.prefix_tokens, job.name))
        job.num_claimed += num
        self._held[job.tenant] += num
        self._prefetched[replica.name] += num
        self.items += claimed
        self._live |= {item.request.seq: item for item in claimed}
        replica.take(claimed)

    def _sample(self, tenants: set[str], shares: Mapping[str, TenantShare], now: float) -> None:
        """Record the service of the tenants that have items to claim, if there are several."""
        if len(tenants) < 2:
            return
        service = {tenant: self._costs.get(tenant, 0.0) for tenant in tenants}
        for item in self._live.values():
            if item.request.tenant in tenants:
                service[item.request.tenant] += _cost(item)
        for tenant in tenants & shares.keys():
            service[tenant] /= shares[tenant].weight
        self.samples.times.append(now)
        self.samples.service.append(service)


def _cost(item: SimulatedRequest) -> float:
    """Return the cost of an item to its tenant so far."""
    request = item.request
    num_input = max(0, min(request.most_computed, request.num_prompt) - request.num_prompt_cached)
    return token_cost(num_input, request.num_output)
