"""Claim items from the queue, and submit them to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import ceil, inf

from ballast_engine.errors import InvalidRequest
from ballast_log import Log
from ballast_policy.fairness.ledger import token_cost
from ballast_policy.jobs.choice import LEAST_AHEAD, Candidate, in_submission_order, job_slack, share_out
from ballast_policy.jobs.deadline import Rates
from ballast_policy.request import RequestClass
from ballast_policy.reservation import most_slots
from ballast_queue.claimable import Group
from ballast_queue.errors import RefusedCall
from ballast_queue.job import Claimed, JobHead
from ballast_queue.redis_store import Queue
from ballast_queue.status import WorkerStatus
from ballast_worker.errors import Refused
from ballast_worker.forecast import order_rates_of, work_of
from ballast_worker.in_flight import InFlightItem, InFlightItems
from ballast_worker.items import NO_PLACE, ItemFailure, ItemLoop, ItemReader
from ballast_worker.ledger_view import LedgerView
from ballast_worker.openai import MODEL_NOT_FOUND
from ballast_worker.prefetch import OfflineSlots, Prefetch, groups_to_read, num_to_claim
from ballast_worker.requests import RequestTiming

log = Log(__name__)

EMPTY_SECONDS = 0.1
"""How soon an empty queue is read again while slots are free."""
SHORT_SECONDS = 0.02
"""How soon the queue is read again after a claim of fewer items than wanted, or with refused ones."""
AVOID_SECONDS = 30.0
"""How long a worker claims no items of a model that it does not serve, or of a job that it cannot run or read."""
AVOID_SHORT_SECONDS = 1.0
"""How long a worker claims no items of a job that has none for it now, and had some lately or may have some behind."""
MOST_SEARCHED = 1000
"""Items in a claim of a job of whose last claim none could run here. It soon finds what is behind them."""
MOST_REFUSED = 100
"""Other models of one job that a worker remembers. With more, it claims none of the items that came back."""
AVOID_GROUP_SECONDS = 1.0
"""How long a worker does not read the jobs of a tenant if it avoids all of them."""
WARNING_SECONDS = 1.0
"""Least time between two warnings about jobs that name another model."""
FIRST_COST = 256.0
"""The expected cost of an item before any item has ended, in tokens as `token_cost` counts them."""
NOT_PREPARED = "The worker failed while it prepared the item. Its log has the reason."


class Claimer:
    """Claim as many items as the engine can use soon. Only the feeder's thread uses it."""

    def __init__(
        self,
        worker: str,
        loop: ItemLoop,
        reader: ItemReader,
        in_flight: InFlightItems,
        *,
        fail: Callable[[str, Exception], None],
    ) -> None:
        """Claim for one worker. `fail` counts and logs the defects of a task."""
        self.read_at = 0.0
        """When to read the queue again without being woken; inf while no item is wanted."""
        self.weights: Mapping[str, float] = {}
        self._worker = worker
        self._loop = loop
        self._reader = reader
        self._in_flight = in_flight
        self._fail = fail
        self._prefetch = Prefetch()
        self._cost = FIRST_COST
        self._rates = Rates()
        """Offline rates of all workers while offline work runs."""
        self._tenants = LedgerView()
        self._workers: Sequence[WorkerStatus] = ()
        """All workers at the last update."""
        self._seen_started = 0
        self._seen_at = time.monotonic()
        self._avoided_jobs: dict[str, tuple[Group, float]] = {}
        """Jobs whose items this worker cannot run, and when it tries them again."""
        self._refused: dict[str, dict[int, float]] = {}
        """Numbers of the models in jobs that this worker does not serve, and when it tries them again."""
        self._searched: dict[str, float] = {}
        """Jobs whose last claim had no item that could run here now, and when that was. Others may wait behind."""
        self._held_back: dict[str, Group] = {}
        """Jobs that it avoids because their items had no place in the engine."""
        self._crowded = reader.crowded()
        """The models that had none then."""
        self._ran: dict[str, float] = {}
        """Jobs of which this worker lately submitted an item, and when."""
        self._avoided_groups: dict[Group, float] = {}
        """Groups whose jobs it avoids, and when it reads them again."""
        self._starts: dict[Group, str] = {}
        """In groups whose first jobs it avoids: the rank behind which it reads."""
        self._started_at: dict[Group, float] = {}
        """When it began to read behind this rank."""
        self._warn_at = 0.0
        self._slow: frozenset[str] = frozenset()
        """Tenants whose items used up the time of the last calls of `refill`."""
        self._num_entered = 0
        self._jobs: dict[str, Candidate] = {}
        """The jobs at the last read of the queue."""
        self._sizes: dict[str, float] = {}
        """Requests for each item of the last claim of a job, if the engine makes several of an item."""
        self._seconds: dict[str, float] = {}
        """Seconds to prepare an item, at the last claim of a tenant."""

    def update(self, queue: Queue, workers: Sequence[WorkerStatus]) -> None:
        """Update rates, reservations and the ledger.

        Raises:
            QueueError: the ledger may include the service of tenants since the last call.
        """
        self._workers, self._rates = workers, order_rates_of(workers)
        shares = self._loop.engine.policy.tenants
        self._tenants.reserve({name: share.reserved for name, share in shares.items()})
        self._tenants.post(queue, self._tenants.gained(self._loop.engine.stats().service, self.weights))
        self._tenants.lift_returning(queue, queue.claimable.demand())
        self._tenants.forget(queue)

    def add_end(self, item: InFlightItem) -> None:
        """Learn the cost of an item."""
        answer = item.answer
        cost = token_cost(max(0, answer.num_prompt - answer.num_cached), answer.num_output)
        self._cost += 0.05 * (cost - self._cost)

    def refill(self, queue: Queue, seconds: float) -> int:
        """Claim items that the engine can use, submit them, and return how many requests they are.

        Long prompts take long to prepare. After `seconds`, the call stops behind the present item, returns the other
        claimed items to the queue, and is due again soon. The tenant that used most of the time then waits for the
        other tenants of its priority.

        Raises:
            QueueFull: Redis has no memory for the results of more items.
            QueueError: items that were claimed before are submitted. The next call claims the rest.
        """
        now = time.monotonic()
        count = self._wanted(now)
        if not count:
            self.read_at = inf  # the next free slot wakes the feeder
            return 0
        if now < self.read_at < inf:
            return 0
        slow, self._slow = self._slow, frozenset()
        self._release()
        chosen = self._choose(queue, count, slow)
        if not chosen:
            self.read_at = now + EMPTY_SECONDS
            return 0
        until = time.monotonic() + seconds
        num_entered, spent = self._claim(queue, chosen, until)
        done = time.monotonic()
        self._prefetch.add_round_trip(done - now)
        self.read_at = inf if num_entered >= count else done + SHORT_SECONDS  # refused items leave slots free
        if num_entered < count and spent and done >= until:
            self._slow = slow | {max(spent, key=spent.__getitem__)}
        return num_entered

    def _release(self) -> None:
        """Claim items of the jobs that had no place in the engine again if other models have none now."""
        before, self._crowded = self._crowded, self._reader.crowded()
        if before != self._crowded:
            for job_id, group in self._held_back.items():
                self._avoided_jobs.pop(job_id, None)
                self._avoided_groups.pop(group, None)
            self._held_back.clear()

    def _claim(self, queue: Queue, chosen: Mapping[str, int], until: float) -> tuple[int, dict[str, float]]:
        """Claim items and submit them until a time, at least one. Return their requests, and the seconds by tenant."""
        num_entered, spent = 0, dict[str, float]()
        for job_id, num in chosen.items():
            begin = time.monotonic()
            if spent and begin >= until:
                break
            tenant = self._jobs[job_id].tenant
            num_items = MOST_SEARCHED if job_id in self._searched else ceil(num / self._sizes.get(job_id, 1))
            if seconds := self._seconds.get(tenant):  # further items would only go to this worker and back
                num_items = min(num_items, 1 + int(max(0.0, until - begin) / seconds))
            group = Group(self._jobs[job_id].priority, tenant)
            refused = self._refused.get(job_id, {})
            skipped = refused if len(refused) < MOST_REFUSED else (0,)
            try:
                claimed = queue.leases.claim_served(job_id, num_items, self._worker, skipped)
            except RefusedCall:  # the record of this job cannot be read
                queue.store.unreadable.skip(f"job {job_id}")
                self._avoid(job_id, group, AVOID_SECONDS)
                continue
            entered = self._enter_all(job_id, claimed or (), num, until)
            num_entered += entered
            self._searched.pop(job_id, None)
            if entered:
                self._ran[job_id] = begin
            elif claimed is None or self._is_unserved(queue, job_id, len(claimed)):
                # Other items of a job that ran lately may come soon.
                self._avoid(job_id, group, AVOID_SHORT_SECONDS if job_id in self._ran else AVOID_SECONDS)
            elif job_id in self._held_back or (claimed and self._refused.get(job_id)):  # others may wait behind these
                self._searched[job_id] = begin
                self._avoid(job_id, group, AVOID_SHORT_SECONDS)
            spent[tenant] = spent.get(tenant, 0.0) + time.monotonic() - begin
        return num_entered, spent

    def _is_unserved(self, queue: Queue, job_id: str, num_claimed: int) -> bool:
        """Return whether the next claim of a job would return the same items of other models, or none."""
        if job_id in self._held_back or not self._refused.get(job_id):
            return False
        # Older functions, which a full Redis still has, return first the items that came back.
        return num_claimed >= self._jobs[job_id].waiting or queue.store.connection.is_outdated

    def _choose(self, queue: Queue, count: int, slow: frozenset[str]) -> dict[str, int]:
        """Return how many items to claim of each job. The tenants in `slow` wait for the others of their priority."""
        demand = queue.claimable.demand()
        tenants = self._tenants
        tenants.lift_returning(queue, demand)
        services = self._expected_services(demand.tenants)
        self._seconds = {tenant: seconds for tenant, seconds in self._seconds.items() if tenant in services}
        limits = self._limits()
        now = time.monotonic()
        wanted = [group for group in demand.groups if self._avoided_groups.get(group, 0.0) <= now]
        others = {g.priority for g in wanted if g.tenant not in slow and limits.get(g.tenant, 1) > 0}
        wanted = [group for group in wanted if group.tenant not in slow or group.priority not in others]
        groups = groups_to_read(wanted, services, count=count, limits=limits, reserved=tenants.reserved)
        return share_out(
            self._candidates(self._usable_heads(queue, groups)),
            services,
            self.weights,
            count=count,
            cost=self._cost,
            free_slots=limits,
            slots=tenants.slots(demand, self._workers),
        )

    def _wanted(self, now: float) -> int:
        started = self._loop.num_started
        self._prefetch.add_starts(started - self._seen_started, now - self._seen_at)
        self._seen_started, self._seen_at = started, now
        engine = self._loop.engine
        stats = engine.stats()
        online, offline = stats.online, stats.offline
        is_online_here = online.running + online.waiting > 0
        slots = OfflineSlots(
            slots=min(stats.slots, stats.batch_ceiling) if is_online_here else stats.slots,
            maximum=most_slots(engine.policy.offline_max_share, stats.slots),
            reserved=offline.reserved,
            online=online.running + online.waiting,
            offline=offline.running + offline.parked,
        )
        limits = self._limits()
        # Requests that wait for the cap of their tenant, or are held up, fill no free slot.
        num_stuck = sum(max(0, LEAST_AHEAD - limit) for limit in limits.values())
        num_stuck += self._in_flight.held_up_by_tenant().total()
        held = self._in_flight.held.values()
        num_held = sum([item.prepared.num_requests for item in held])
        # All requests of an item that has begun count as running, so that they do not keep other items in the queue.
        begun = [item for item in held if item.prepared.has_begun and item.claimed.tenant not in limits]
        num_begun = sum([item.prepared.num_requests for item in begun])
        prefetched = max(0, num_held - num_stuck - max(num_begun, offline.running + offline.parked))
        return num_to_claim(slots, self._prefetch.ahead(), prefetched)

    def _limits(self) -> dict[str, int]:
        """Return how many requests of each capped tenant may be claimed: slots and `LEAST_AHEAD`, less its own."""
        caps = {name: share.max_slots for name, share in self._loop.engine.policy.tenants.items() if share.max_slots}
        if not caps:
            return {}
        held = self._in_flight.requests_by_tenant()
        held.subtract(self._in_flight.held_up_by_tenant())
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
                    prefix_key=head.prefix_key or None,
                    seq=head.created,
                    waiting=head.waiting,
                )
                for head in heads
            ]
        )
        self._jobs = {candidate.job_id: candidate for candidate in candidates}
        self._sizes = {job_id: size for job_id, size in self._sizes.items() if job_id in self._jobs}
        return candidates

    def _expected_services(self, tenants: Iterable[str]) -> dict[str, float]:
        """Return the service of tenants, with the expected cost of their items on this worker."""
        services = {tenant: self._tenants.service.of(tenant) for tenant in tenants}
        for item in self._in_flight.held.values():
            if item.claimed.tenant in services:
                services[item.claimed.tenant] += self._cost / self.weights.get(item.claimed.tenant, 1.0)
        return services

    def _enter_all(self, job_id: str, claimed: Sequence[Claimed], wanted: int, until: float) -> int:
        """Submit items of one job until they make the wanted requests, give back the others, and return the number.

        It submits at least one item, and no further one after `until`.
        """
        begin = now = time.monotonic()
        num_tried = num_items = num_requests = 0
        for item in claimed:
            if num_requests >= wanted or (num_tried and now >= until):
                self._in_flight.returns.append((item, item.prefix))
                continue
            num_tried += 1
            if size := self._enter_or_fail(item):
                num_items += 1
                num_requests += size
            now = time.monotonic()
        if num_items:
            self._sizes[job_id] = num_requests / num_items
        if num_tried:
            self._seconds[self._jobs[job_id].tenant] = (now - begin) / num_tried
        return num_requests

    def _enter_or_fail(self, claimed: Claimed) -> int:
        """Submit an item to the engine, and return its requests; 0 if it is refused.

        A defect fails its attempt, and must not keep the other items of the claim.
        """
        # With a number: the engine may still hold an item that is claimed again after Redis lost its last writes.
        self._num_entered += 1
        request_id = f"{claimed.job_id}:{claimed.index}:{claimed.token}:{self._num_entered}"
        try:
            self._enter(request_id, claimed)
        except Exception as error:  # noqa: BLE001 -- any item may have any body
            self._in_flight.held.pop(request_id, None)
            self._fail("prepare", error)
            failure = ItemFailure(claimed, "engine_failed", NOT_PREPARED, is_retryable=True, status_code=500)
            self._in_flight.failures.append(failure)
        item = self._in_flight.held.get(request_id)
        return 0 if item is None else item.prepared.num_requests

    def _enter(self, request_id: str, claimed: Claimed) -> None:
        try:
            prepared = self._reader.prepare(request_id, claimed, self._jobs[claimed.job_id].slack)
        except Refused as refused:
            if refused.code == MODEL_NOT_FOUND:
                self._give_back(claimed, refused.message)
                return
            if refused.code == NO_PLACE:
                self._held_back[claimed.job_id] = Group(claimed.priority, claimed.tenant)
                self._in_flight.returns.append((claimed, claimed.prefix))
                return
            self._refuse(claimed, refused.code or "invalid_request", refused.message, refused.status)
            return
        timing = RequestTiming(RequestClass.OFFLINE, time.monotonic())
        self._in_flight.held[request_id] = InFlightItem(claimed, timing, prepared)
        try:
            prepared.submit()
        except InvalidRequest as error:
            del self._in_flight.held[request_id]
            self._refuse(claimed, "invalid_request", str(error), 400)

    def _give_back(self, claimed: Claimed, because: str) -> None:
        """Return an item that names another model: the name of the model changes during a rollout.

        It spends no attempt, and waits for a worker that serves the name.
        """
        now = time.monotonic()
        refused = self._refused.setdefault(claimed.job_id, {})
        if claimed.model_number not in refused and now >= self._warn_at:
            self._warn_at = now + WARNING_SECONDS
            log.warning("item names another model, and waits for a worker of it", job=claimed.job_id, because=because)
        if len(refused) < MOST_REFUSED:
            refused.setdefault(claimed.model_number, now + AVOID_SECONDS)
        self._in_flight.returns.append((claimed, claimed.prefix))
        self._in_flight.unserved.add(claimed.lease)

    def avoids(self, group: Group) -> bool:
        """Return whether this worker could run no item of a group when it read its jobs in the last minute."""
        return self._avoided_groups.get(group, -inf) > time.monotonic() - AVOID_SECONDS

    def _usable_heads(self, queue: Queue, groups: Sequence[Group]) -> list[JobHead]:
        """Return the heads of jobs that are not avoided. A group with avoided jobs only is not read for some time."""
        now = time.monotonic()
        self._avoided_jobs = {job_id: known for job_id, known in self._avoided_jobs.items() if known[1] > now}
        self._held_back = {job_id: group for job_id, group in self._held_back.items() if job_id in self._avoided_jobs}
        self._refused = {
            job_id: kept
            for job_id, numbers in self._refused.items()
            if (kept := {number: end for number, end in numbers.items() if end > now})
        }
        self._ran = {job_id: at for job_id, at in self._ran.items() if at > now - AVOID_SECONDS}
        self._searched = {job_id: at for job_id, at in self._searched.items() if at > now - AVOID_SECONDS}
        avoided: dict[Group, set[str]] = {}
        for job_id, (group, _) in self._avoided_jobs.items():
            avoided.setdefault(group, set()).add(job_id)
        # After some time, begin at the first jobs again: more urgent ones may have come.
        starts = {group: rank for group, rank in self._starts.items() if self._started_at[group] > now - AVOID_SECONDS}
        before = starts.copy()
        heads = queue.claimable.heads(groups, avoided, starts)
        self._started_at = {g: self._started_at[g] if before.get(g) == rank else now for g, rank in starts.items()}
        self._starts = starts
        empty = avoided.keys() & set(groups) - {Group(head.priority, head.tenant) for head in heads} - starts.keys()
        self._avoided_groups = dict.fromkeys(empty, now + AVOID_GROUP_SECONDS) | {
            group: end for group, end in self._avoided_groups.items() if end > now
        }
        return heads

    def _avoid(self, job_id: str, group: Group, seconds: float) -> None:
        """Claim no item of a job for some time."""
        self._avoided_jobs[job_id] = group, time.monotonic() + seconds

    def _refuse(self, claimed: Claimed, code: str, message: str, status: int) -> None:
        log.debug("item refused", job=claimed.job_id, item=claimed.custom_id, because=message)
        self._in_flight.failures.append(ItemFailure(claimed, code, message, is_retryable=False, status_code=status))
