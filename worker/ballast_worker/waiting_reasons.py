"""Why a job waits: from what the queue and its workers say of themselves to sentences with figures. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ballast_policy.jobs.choice import job_slack
from ballast_queue.job import Job, JobState
from ballast_queue.settings import QueueSettings
from ballast_queue.status import QueueStats, WorkerStatus
from ballast_worker.forecast import Forecast, duration, rates_of, work_of

_CLAIMED_FROM = {JobState.VALIDATING, JobState.IN_PROGRESS}


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

    @property
    def ready(self) -> list[WorkerStatus]:
        """Workers that take work."""
        return [worker for worker in self.workers if worker.is_ready and not worker.is_draining]


def why(job: Job, scene: Scene) -> list[str]:
    """Say why `job` is not further, what decides most first; the last sentences are its failures and its deadline."""
    return [*_standing(job, scene), *_failures(job), *_deadline(job, scene)]


def _standing(job: Job, scene: Scene) -> Iterator[str]:
    counts, state = job.counts, job.state
    if state.is_over:
        ended = f" {duration(max(0.0, scene.stats.at - job.finished))} ago" if job.finished is not None else ""
        yield f"It is over: {state.value}{ended}" + (f", {job.reason}" if job.reason else "")
    elif state is JobState.PAUSED:
        yield f"It is paused with {_items(counts.waiting)} waiting: `ballast resume {job.id}` lets it go on"
    elif state not in _CLAIMED_FROM:
        yield f"It is {state.value}: nothing more of it is taken up, {counts.leased:,} are still with workers"
    elif not counts.waiting:
        yield f"Nothing of it waits: {_items(counts.leased)} with workers"
        if state is JobState.VALIDATING:
            yield "Its end was not announced: the submitter adds an inbox entry with `end 1`"
    else:
        yield from _waiting(job, scene)


def _waiting(job: Job, scene: Scene) -> Iterator[str]:
    claimable = job.counts.waiting - job.delayed
    if job.delayed:
        yield f"{_items(job.delayed)} failed and will be tried again after a pause, {claimable:,} could be taken now"
    if not claimable:
        return
    reasons = [*_no_worker(scene)] or [*_no_room(scene), *_own_cap(job, scene), *_before(job, scene)]
    yield from reasons or [f"Nothing holds it up: {_items(claimable)} can be taken as soon as a worker asks"]


def _no_worker(scene: Scene) -> Iterator[str]:
    if not scene.workers:
        yield "No worker serves this queue: none has published its status in the last seconds"
    elif not scene.ready:
        draining = sum(worker.is_draining for worker in scene.workers)
        yield f"None of {_workers(scene.workers)} takes work: {draining} on the way out, the others are not ready"


def _no_room(scene: Scene) -> Iterator[str]:
    """Whether offline work has every slot that it may have just now."""
    ready = scene.ready
    if any(_room(worker) > 0 for worker in ready):
        return
    slots = sum(worker.slots for worker in ready)
    online, offline = [worker.online for worker in ready], [worker.offline for worker in ready]
    running, reserved = sum(load.running for load in offline), sum(load.reserved for load in offline)
    ahead = sum(load.waiting for load in offline)
    yield (
        f"No slot is free for it: of {slots} slots of {_workers(ready)} online holds {sum(o.running for o in online)} "
        f"with {sum(o.waiting for o in online)} waiting, offline {running} ({reserved} reserved), and {ahead} items "
        "are at hand for the next ones"
    )
    parked = sum(load.parked for load in offline)
    if parked:
        yield f"{parked} items keep their KV without a slot until online requests leave time for them within their SLO"
    capped = [worker for worker in ready if _most(worker) < worker.slots]
    if capped and all(worker.offline.running >= _most(worker) for worker in capped):
        most = sum(_most(worker) for worker in ready)
        yield f"Offline may hold {most} of {slots} slots now: what the SLO (batch ceiling) or offline.maxPercent allows"


def _room(worker: WorkerStatus) -> int:
    """Slots that offline could take up now, less the items that stand ready for them."""
    offline = worker.offline
    free = min(worker.slots - worker.online.running, _most(worker)) - offline.running - offline.parked
    return free - offline.waiting


def _most(worker: WorkerStatus) -> int:
    """Slots that offline may hold: with online work beside it only what the ceiling leaves, and its reservation."""
    most = worker.slots if worker.offline_most is None else worker.offline_most
    if worker.online.running + worker.online.waiting:
        most = min(most, max(worker.offline.reserved, worker.batch_ceiling - worker.online.running))
    return most


def _own_cap(job: Job, scene: Scene) -> Iterator[str]:
    """A worker tells the caps of tenants that it has served; all workers of a resource have the same."""
    ready, held = scene.ready, scene.held.get(job.tenant, 0)
    cap = max((worker.tenant_slots.get(job.tenant, 0) for worker in ready), default=0)
    if cap and held >= cap * len(ready):
        yield (
            f"Tenant {job.tenant} has all that it may: {_items(held)} under lease, {cap * len(ready)} slots at most "
            f"(maxSlots) on {_workers(ready)}"
        )


def _before(job: Job, scene: Scene) -> Iterator[str]:
    """What the claim's order puts before it: priority, then tenants in turn, then slack."""
    others = [
        other
        for other in scene.active
        if other.id != job.id and other.state in _CLAIMED_FROM and other.counts.waiting > other.delayed
    ]
    higher = [other for other in others if other.priority > job.priority]
    if higher:
        most = max(higher, key=lambda other: other.priority)
        named = f"such as {most.id} with {most.priority}, where this one has {job.priority}"
        yield f"Higher priority goes first: {_of_jobs(higher)}, {named}"
    peers = [other for other in others if other.priority == job.priority]
    rates = rates_of(scene.workers)

    def rank(one: Job) -> tuple[float, float, str]:
        return (job_slack(work_of(one), rates, scene.stats.at), one.created, one.id)

    earlier = [other for other in peers if other.tenant == job.tenant and rank(other) < rank(job)]
    if earlier:
        first = min(earlier, key=rank).id
        yield f"Before it in tenant {job.tenant}, by deadline or submission: {_of_jobs(earlier)}, such as {first}"
    tenants = sorted({other.tenant for other in peers if other.tenant != job.tenant})
    if tenants:
        held = scene.held
        shares = ", ".join(f"{name} holds {held.get(name, 0):,}" for name in (job.tenant, *tenants[:3]))
        more = f" and {len(tenants) - 3} more" if len(tenants) > 3 else ""
        yield f"It takes turns, by weight, with the tenants of its priority: {shares}{more}"


def _failures(job: Job) -> Iterator[str]:
    if job.counts.failed:
        yield (
            f"{_items(job.counts.failed)} failed for good: `ballast results {job.id}` shows why, "
            f"`ballast redrive {job.id}` tries again what can be mended"
        )


def _deadline(job: Job, scene: Scene) -> Iterator[str]:
    if job.deadline is None or job.state.is_over:
        return
    weights = {tenant.name: tenant.weight for tenant in scene.settings.tenants}
    outlook, because = Forecast(scene.active, scene.workers, scene.stats.at, weights).of(job)
    yield f"Its deadline: {outlook.value.replace('_', ' ')}, {because}"


def _of_jobs(jobs: Sequence[Job]) -> str:
    number = sum(job.counts.waiting - job.delayed for job in jobs)
    return f"{_items(number)} of {len(jobs)} job{'s' if len(jobs) != 1 else ''}"


def _items(number: int) -> str:
    return f"{number:,} item{'s' if number != 1 else ''}"


def _workers(workers: Sequence[WorkerStatus]) -> str:
    return f"{len(workers)} worker{'s' if len(workers) != 1 else ''}"
