"""Which items to claim now, and how they enter the engine."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import inf

from ballast_engine.errors import InvalidRequest
from ballast_log import Log
from ballast_policy.fairness.ledger import token_cost
from ballast_policy.jobs.choice import Candidate, in_submission_order, job_slack, share_out
from ballast_policy.jobs.deadline import Rates
from ballast_policy.request import RequestClass
from ballast_policy.reservation import most_slots
from ballast_queue.job import Claimed, JobHead, Prefix
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus
from ballast_worker.appetite import LEAST_AHEAD, Appetite, Room, wanted, worth_reading
from ballast_worker.errors import Refused
from ballast_worker.forecast import rates_of, work_of
from ballast_worker.holdings import Failure, Held, Holdings
from ballast_worker.loop import EngineLoop
from ballast_worker.openai import Caller, Served, of_job
from ballast_worker.requests import Passage
from ballast_worker.shapes import Shape
from ballast_worker.standing import Standing

log = Log(__name__)

EMPTY_SECONDS = 0.1
"""How soon an empty queue is looked at again while slots are free."""
SHORT_SECONDS = 0.02
"""How soon after a claim that gave less than was wanted, because others were quicker or little is left."""
FIRST_COST = 256.0
"""What an item is expected to cost before any has ended, in tokens as `token_cost` counts them."""


class Claims:
    """Measures the engine's appetite and stills it. Belongs to the feeder's thread."""

    def __init__(self, worker: str, loop: EngineLoop, served: Served, holdings: Holdings) -> None:
        self.look_at = 0.0
        """When to look at the queue again without being woken; inf while nothing could be used."""
        self.weights: Mapping[str, float] = {}
        self._worker = worker
        self._loop = loop
        self._served = served
        self._holdings = holdings
        self._appetite = Appetite()
        self._cost = FIRST_COST
        self._rates = Rates()
        """Of all workers."""
        self._tenants = Standing()
        self._seen_started = 0
        self._seen_at = time.monotonic()
        self._jobs: dict[str, Candidate] = {}
        """The jobs of the last look."""

    def consider(self, queue: Queue, workers: Sequence[WorkerStatus], gained: Mapping[str, float]) -> None:
        """Take note of what all workers do and whom they serve; `gained` is what tenants got here since the last time.

        Raises:
            QueueError: what was gained may have been counted.
        """
        self._rates = rates_of(workers)
        shares = self._loop.engine.policy.tenants
        self._tenants.reserve({name: share.reserved for name, share in shares.items()})
        self._tenants.post(queue, gained)
        self._tenants.notice(queue, queue.claimable.demand())
        self._tenants.forget(queue)

    def saw_end(self, item: Held) -> None:
        """Learn what an item costs."""
        answer = item.answer
        cost = token_cost(max(0, answer.num_prompt - answer.num_cached), answer.num_output)
        self._cost += 0.05 * (cost - self._cost)

    def refill(self, queue: Queue) -> None:
        """Claim what the engine can use, and hand it in.

        Raises:
            QueueError: what had been claimed before is handed in; the next call goes on.
        """
        now = time.monotonic()
        count = self._wanted(now)
        if not count:
            self.look_at = inf  # a wake-up comes with the next free slot
            return
        if now < self.look_at < inf:
            return
        taken = self._choose(queue, count)
        if not taken:
            self.look_at = now + EMPTY_SECONDS
            return
        num_claimed = 0
        for job_id, num in taken.items():
            claimed = queue.leases.claim(job_id, num, self._worker)
            num_claimed += len(claimed)
            for item in claimed:
                self._enter(item)
        done = time.monotonic()
        self._appetite.saw_round_trip(done - now)
        self.look_at = inf if num_claimed >= count else done + SHORT_SECONDS

    def _choose(self, queue: Queue, count: int) -> dict[str, int]:
        """Say how many items to claim of which jobs."""
        demand = queue.claimable.demand()
        tenants = self._tenants
        tenants.notice(queue, demand)
        services = self._expected_services(demand.tenants)
        rooms = self._rooms()
        groups = worth_reading(demand.groups, services, count=count, rooms=rooms, reserved=tenants.reserved)
        return share_out(
            self._candidates(queue.claimable.heads(groups)),
            services,
            self.weights,
            count=count,
            cost=self._cost,
            rooms=rooms,
            slots=tenants.slots(demand),
        )

    def _wanted(self, now: float) -> int:
        started = self._loop.num_started
        self._appetite.saw_starts(started - self._seen_started, now - self._seen_at)
        self._seen_started, self._seen_at = started, now
        engine = self._loop.engine
        stats = engine.stats()
        online, offline = stats.online, stats.offline
        is_online_here = online.running + online.waiting > 0
        room = Room(
            slots=min(stats.slots, stats.batch_ceiling) if is_online_here else stats.slots,
            most=most_slots(engine.policy.offline_max_share, stats.slots),
            reserved=offline.reserved,
            online=online.running + online.waiting,
            offline=offline.running + offline.parked,
        )
        # What waits for its tenant's own cap fills no slot that is free.
        num_stuck = sum(max(0, LEAST_AHEAD - room) for room in self._rooms().values())
        at_hand = max(0, len(self._holdings.held) - num_stuck - offline.running - offline.parked)
        return wanted(room, self._appetite.ahead(), at_hand)

    def _rooms(self) -> dict[str, int]:
        """Items that may still be claimed of each tenant with a cap: its slots and `LEAST_AHEAD`, less what is held."""
        caps = {name: share.max_slots for name, share in self._loop.engine.policy.tenants.items() if share.max_slots}
        if not caps:
            return {}
        held = Counter(item.claimed.tenant for item in self._holdings.held.values())
        return {name: most + LEAST_AHEAD - held[name] for name, most in caps.items()}

    def _candidates(self, heads: Sequence[JobHead]) -> list[Candidate]:
        now = time.time()
        candidates = in_submission_order(
            [
                Candidate(
                    job_id=head.job_id,
                    tenant=head.tenant,
                    priority=head.priority,
                    slack=job_slack(work_of(head), self._rates, now),
                    prefix_key=head.prefix_key,
                    seq=head.created,
                    waiting=head.waiting,
                )
                for head in heads
            ]
        )
        self._jobs = {candidate.job_id: candidate for candidate in candidates}
        return candidates

    def _expected_services(self, tenants: Iterable[str]) -> dict[str, float]:
        """What these were served, and what the items at hand will add to it."""
        services = {tenant: self._tenants.service.of(tenant) for tenant in tenants}
        for item in self._holdings.held.values():
            if item.claimed.tenant in services:
                services[item.claimed.tenant] += self._cost / self.weights.get(item.claimed.tenant, 1.0)
        return services

    def _enter(self, claimed: Claimed) -> None:
        request_id = f"{claimed.job_id}:{claimed.index}:{claimed.token}"
        try:
            body = self._served.read(claimed.url, claimed.body)
            prompt = self._served.tokens(body)
            caller = Caller(claimed.tenant, RequestClass.OFFLINE, claimed.priority)
            request = self._served.request(request_id, body, prompt, caller, seed=claimed.seed)
            prefix = claimed.prefix if self._is_ours(claimed, request.sampling.seed) else None
            job = self._jobs[claimed.job_id]
            request = of_job(
                request,
                generated=prefix.token_ids if prefix is not None else (),
                slack=job.slack,
                prefix_key=job.prefix_key,
            )
        except Refused as refused:
            self._refuse(claimed, refused.code or "invalid_request", refused.message, refused.status)
            return
        now = time.monotonic()
        is_chat = claimed.url.endswith("/chat/completions")
        shape = Shape(
            is_chat=is_chat,
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{claimed.job_id}-{claimed.index}",
            created=int(time.time()),
            model=self._served.name,
        )
        item = Held(claimed, Passage(RequestClass.OFFLINE, now), shape, request.sampling.seed)
        self._holdings.held[request_id] = item
        try:
            self._loop.submit(request)
        except InvalidRequest as error:
            del self._holdings.held[request_id]
            self._refuse(claimed, "invalid_request", str(error), 400)

    def _is_ours(self, claimed: Claimed, seed: int) -> bool:
        """Whether a prefix was generated by the same weights from the same seed."""
        prefix: Prefix | None = claimed.prefix
        return prefix is not None and prefix.model_revision == self._served.revision and prefix.seed == seed

    def _refuse(self, claimed: Claimed, code: str, message: str, status: int) -> None:
        log.debug("item cannot be served", job=claimed.job_id, item=claimed.custom_id, because=message)
        self._holdings.failures.append(Failure(claimed, code, message, is_retryable=False, status_code=status))
