"""State why a job waits, in sentences with figures from the queue and its workers. PURE."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ballast_openai.errors import counted
from ballast_policy.jobs.choice import job_slack
from ballast_queue.job import MOST_ACTIVE, PARTLY_UNSERVED, UNSERVED, Job, JobState
from ballast_queue.settings import QueueSettings
from ballast_queue.status import QueueStats, WorkerStatus, held_requests
from ballast_worker.forecast import NEAREST, Forecast, duration, order_rates_of, ready_of, work_of

_REDRIVEN_FROM = {JobState.VALIDATING, JobState.IN_PROGRESS, JobState.PAUSED, JobState.COMPLETED}
Command = Callable[[str], str]
"""Returns the command with this verb for one job, as a user can run it."""


@dataclass(frozen=True, slots=True)
class Scene:
    """A queue and its workers at one moment."""

    stats: QueueStats
    workers: Sequence[WorkerStatus] = ()
    active: Sequence[Job] = ()
    """Jobs that are not over."""
    held: Mapping[str, int] = field(default_factory=dict)
    """Items under lease by tenant."""
    settings: QueueSettings = field(default_factory=QueueSettings)
    is_read_only: bool = False
    """Redis is a replica. The status of every worker expires, because none can be published."""

    @property
    def requests(self) -> Mapping[str, int]:
        """Requests of the items under lease by tenant."""
        return held_requests(self.held, self.workers)

    @property
    def ready(self) -> list[WorkerStatus]:
        """Workers that accept work."""
        return ready_of(self.workers)


def why(job: Job, scene: Scene, options: str = "") -> list[str]:
    """Return why `job` makes no progress, the main reason first. Its failures and its deadline come last.

    `options` are those that a command needs to find the queue, each after a space.
    """

    def command(verb: str) -> str:
        return f"`ballast {verb} {job.id}{options}`"

    return [*_scheduling(job, scene, command), *_failures(job, scene.stats.at, command), *_deadline(job, scene)]


def _scheduling(job: Job, scene: Scene, command: Command) -> Iterator[str]:
    counts, state = job.counts, job.state
    if state.is_over:
        ended = f" {duration(max(0.0, scene.stats.at - job.finished))} ago" if job.finished is not None else ""
        yield f"It is over: {state.value}{ended}" + (f", {job.reason}" if job.reason else "")
    elif state is JobState.PAUSED:
        yield f"It is paused with {counted(counts.waiting, 'item')} waiting: {command('resume')} resumes it"
    elif not state.is_claimable:
        yield f"It is {state.value}: workers claim no more of its items, {counts.leased:,} are still with workers"
    elif not counts.waiting:
        yield f"No item of it waits: {counted(counts.leased, 'item')} with workers"
        if state is JobState.VALIDATING:
            yield (
                "Its last line has not arrived: submit the same lines with the same --key again, or, in the inbox, add "
                f"an entry with `end 1`. {command('cancel')} gives up the rest"
            )
    else:
        yield from _waiting(job, scene, command)


def _waiting(job: Job, scene: Scene, command: Command) -> Iterator[str]:
    claimable = job.counts.waiting - job.delayed
    if job.delayed:
        delayed = counted(job.delayed, "item")
        yield f"{delayed} failed and will be retried after a backoff, {claimable:,} can be claimed now"
    if not claimable:
        return
    is_partly_unserved = job.reason == PARTLY_UNSERVED
    if is_partly_unserved:
        yield (
            f"{job.reason.capitalize()}, so these add no replica: serve that model, or end the job with "
            f"{command('cancel')}"
        )
    reasons = [*_no_writes(scene)] or [*_no_memory(scene), *_no_model(job, command), *_no_worker(scene)]
    reasons = reasons or [*_no_slot(scene), *_own_cap(job, scene), *_before(job, scene)]
    if is_partly_unserved:  # the number of its other items is not known, and may be 0
        yield from reasons
    else:
        yield from reasons or [f"Nothing blocks it: a worker can claim {counted(claimable, 'item')} at any time"]


def _no_writes(scene: Scene) -> Iterator[str]:
    if scene.is_read_only:
        yield (
            "Redis accepts no writes, because it is a replica, so no worker can claim an item or report: use the "
            "address of its primary, or make it a primary"
        )


def _no_memory(scene: Scene) -> Iterator[str]:
    if scene.stats.is_exhausted:
        yield (
            "Redis gives out no item, because it uses more than 1.2 times its maxmemory: raise maxmemory, delete jobs, "
            "or wait until the results of old jobs expire"
        )


def _no_model(job: Job, command: Command) -> Iterator[str]:
    if job.reason == UNSERVED:
        yield (
            f"It adds no replica, because {job.reason}: serve that model, or end the job with {command('cancel')}. "
            f"At zero replicas, {command('resume')} lets it add one again"
        )


def _no_worker(scene: Scene) -> Iterator[str]:
    if not scene.workers:
        yield "No worker serves this queue: no worker has reported its status recently"
    elif not scene.ready:
        draining = sum(worker.is_draining for worker in scene.workers)
        yield f"0 of {counted(len(scene.workers), 'worker')} accept work ({draining} draining, the others not ready)"


def _no_slot(scene: Scene) -> Iterator[str]:
    """Report that offline work has every slot, or every place for adapters, that it may have now."""
    free = [worker for worker in scene.ready if _free_slots(worker) > 0]
    if not free:
        yield from _all_slots_taken(scene.ready)
    held_up = sum(worker.offline.held_up for worker in scene.ready)
    if held_up and all(worker.offline.held_up for worker in free):
        yield (
            "Online requests of other adapters hold all places for adapters (`--max-loras`): "
            f"{counted(held_up, 'prefetched item waits', 'prefetched items wait')} for a place, and further items of "
            "the same adapters wait in the queue"
        )


def _all_slots_taken(ready: Sequence[WorkerStatus]) -> Iterator[str]:
    slots = sum(worker.slots for worker in ready)
    online, offline = [worker.online for worker in ready], [worker.offline for worker in ready]
    running, reserved = sum(load.running for load in offline), sum(load.reserved for load in offline)
    ahead = sum(map(_num_ahead, ready))
    held = sum(free for worker in ready if (free := _unused_slots(worker)) > 0)
    why = "No slot is free for it"
    if held:
        why = (
            f"Prefetched items go first, and the policy holds them back from {counted(held, 'free slot')} until the "
            "SLO of online requests leaves time and the KV cache has blocks"
        )
    yield (
        f"{why}: of {slots} slots of {counted(len(ready), 'worker')} online holds "
        f"{sum(o.running for o in online)} with {sum(o.waiting for o in online)} waiting, offline {running} "
        f"({reserved} reserved), and {counted(ahead, 'item is', 'items are')} prefetched for the next slots"
    )
    parked = sum(load.parked for load in offline)
    if parked:
        found = counted(parked, "item is parked and keeps its KV", "items are parked and keep their KV")
        yield f"{found} until the SLO of online requests leaves time"
    capped = [worker for worker in ready if _most(worker) < worker.slots]
    if capped and all(worker.offline.running >= _most(worker) for worker in capped):
        most = sum(_most(worker) for worker in ready)
        yield f"Offline may hold {most} of {slots} slots now: the SLO (batch ceiling) or offline.maxPercent limits it"


def _free_slots(worker: WorkerStatus) -> int:
    """Return the slots that offline could use now, less the prefetched items."""
    return _unused_slots(worker) - _num_ahead(worker)


def _num_ahead(worker: WorkerStatus) -> int:
    """Return the prefetched items that can take the next slots."""
    return max(0, worker.offline.waiting - worker.offline.held_up)


def _unused_slots(worker: WorkerStatus) -> int:
    """Return the slots that offline could use now."""
    most = min(worker.slots - worker.online.running, _most(worker))
    return most - worker.offline.running - worker.offline.parked


def _most(worker: WorkerStatus) -> int:
    """Return the slots that offline may hold. Beside online work: the rest of the ceiling, or the reservation."""
    most = worker.offline_most
    if worker.online.running + worker.online.waiting:
        most = min(most, max(worker.offline.reserved, worker.batch_ceiling - worker.online.running))
    return most


def _own_cap(job: Job, scene: Scene) -> Iterator[str]:
    """Report the slot cap of the tenant. Workers publish the caps of tenants that they served."""
    ready, held = scene.ready, scene.held.get(job.tenant, 0)
    cap = max((worker.tenant_slots.get(job.tenant, 0) for worker in ready), default=0)
    most = cap * len(ready)
    if cap and (held >= most or all(worker.tenant_requests.get(job.tenant, 0) >= cap for worker in ready)):
        requests = scene.requests.get(job.tenant, 0)
        items = counted(held, "item") + (f" of {requests} requests" if requests > held else "")
        yield (
            f"Tenant {job.tenant} is at its cap: {items} under lease, at most {most} slots (maxSlots) on "
            f"{counted(len(ready), 'worker')}"
        )


def _before(job: Job, scene: Scene) -> Iterator[str]:
    """Report the work that is claimed before it: by priority, then by tenant, then by slack."""
    others = [
        other
        for other in scene.active
        if other.id != job.id and other.state.is_claimable and other.counts.waiting > other.delayed
    ]
    higher = [other for other in others if other.priority > job.priority]
    if higher:
        most = max(higher, key=lambda other: other.priority)
        named = f"such as {most.id} with {most.priority}; this job has {job.priority}"
        yield f"Higher priority goes first: {_of_jobs(higher)}, {named}"
    peers = [other for other in others if other.priority == job.priority]
    rates = order_rates_of(scene.workers)

    def rank(one: Job) -> tuple[float, float, str]:
        return (job_slack(work_of(one), rates, scene.stats.at), one.created, one.id)

    earlier = [other for other in peers if other.tenant == job.tenant and rank(other) < rank(job)]
    if earlier:
        first = min(earlier, key=rank).id
        yield f"Before it in tenant {job.tenant}, by deadline or submission: {_of_jobs(earlier)}, such as {first}"
    tenants = sorted({other.tenant for other in peers if other.tenant != job.tenant})
    if tenants:
        held = scene.requests
        shares = ", ".join(f"{name} holds {held.get(name, 0):,}" for name in (job.tenant, *tenants[:3]))
        more = f" and {len(tenants) - 3} more" if len(tenants) > 3 else ""
        yield f"It shares the slots, by weight, with the tenants of its priority: {shares}{more}"
    if len(scene.active) >= MOST_ACTIVE:
        yield f"Of other jobs, only {NEAREST} were read"


def _failures(job: Job, now: float, command: Command) -> Iterator[str]:
    if not job.counts.failed:
        return
    can_redrive = job.state in _REDRIVEN_FROM and (job.deadline is None or now < job.deadline)
    advice = (
        f"{command('redrive')} retries those that may succeed, which excludes invalid lines"
        if can_redrive
        else "To retry them, submit their lines as another job"
    )
    yield f"{counted(job.counts.failed, 'item')} failed for good: {command('results')} shows why. {advice}"


def _deadline(job: Job, scene: Scene) -> Iterator[str]:
    if job.deadline is None or job.state.is_over:
        return
    weights = {tenant.name: tenant.weight for tenant in scene.settings.tenants}
    outlook, because = Forecast(scene.active, scene.workers, scene.stats.at, weights).of(job)
    yield f"Its deadline: {outlook.value.replace('_', ' ')}, {because}"


def _of_jobs(jobs: Sequence[Job]) -> str:
    number = sum(job.counts.waiting - job.delayed for job in jobs)
    return f"{counted(number, 'item')} of {counted(len(jobs), 'job')}"
