"""The number of replicas and its reason, from the spec and the last poll. PURE.

    online need  = ceil(online requests in the system x (1 + headroom) / ceiling of one replica)
    offline need = the largest of: one more than now if a deadline is at risk and no replica starts, and otherwise the
                   fewest with which none is; up to `offlineMaxReplicas` for the work that waits or runs
    need         = max(online need, offline need), within [minReplicas, maxReplicas]

A poll between two short requests finds none in the system, so the online need is at least 1 while a rate is reported. A
worker reports the rate of its last request for about a minute.
Requests in the system equal arrival rate times time in the system (Little's law). They are measured, not modelled.
A new replica loads its model for minutes. A deadline at risk adds no other until every replica is ready. A replica that
never becomes ready blocks this for `startupSeconds` after the last rise of `replicas`, and then no longer. A pod that
finds no node blocks it for as long as it waits, because offline work would only add pods that wait as well.
Replicas leave only if every job that has a deadline would meet it without them, at 90 % of the present rate of the
replicas that are ready. Online requests stay, so fewer replicas leave fewer slots to offline work.
Waiting items add replicas, by the slots of a worker. Items that run keep those that are there, and add none.
Replicas rise to the smallest need of the last `scaleUpSeconds`, and fall to the largest need of the last
`scaleDownSeconds` (`idleSeconds` for the last replica). Nothing changes if a window is not covered yet or contains a
poll that failed. At zero replicas, waiting offline work adds one replica at once. Jobs that are paused or ending, or
whose model no worker serves, are no work, and nothing is while Redis has no memory for results.
Replicas of which none became ready within `startupSeconds` serve no online request, so only offline work keeps them.
The time begins after a pod has fetched its model for the first time, or found a node within `startupSeconds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ballast_api.replicas import Scaling
from ballast_openai.errors import counted
from ballast_operator.poll_result import FRESH_SECONDS, PollResult
from ballast_queue.status import WorkerStatus


@dataclass(frozen=True, slots=True)
class Fleet:
    """The replicas at one moment."""

    replicas: int
    """The present `spec.replicas`."""
    ready: int
    slots: int | None = None
    """The configured slots of a worker; None: unknown until a worker reports."""
    startup_seconds: float = math.inf
    """The time in which a new replica becomes ready, if it ever does."""
    lacks_node: bool = False
    """A pod waits because no node fits it."""
    is_fetching: bool = False
    """A pod fetches its model for the first time."""


@dataclass(frozen=True, slots=True)
class Need:
    """The replicas that one poll asked for."""

    at: float
    replicas: int
    because: str


@dataclass(frozen=True, slots=True)
class History:
    """The needs in the order of time, as far back as the longest window, and what is known of earlier replicas."""

    needs: tuple[Need, ...] = ()
    replicas: int = 0
    """The replicas at the last decision."""
    raised: float = -math.inf
    """When they were first seen to be more than before."""
    served: float = -math.inf
    """When a replica was last ready."""
    prepared: float = -math.inf
    """When a pod last fetched its model, or waited for a node while it might still become ready."""

    def seen(self, fleet: Fleet, now: float) -> History:
        """Return the history with the present replicas."""
        raised = now if fleet.replicas > self.replicas else self.raised
        waits = fleet.is_fetching or (fleet.lacks_node and now - raised < fleet.startup_seconds)
        return replace(
            self,
            replicas=fleet.replicas,
            raised=raised,
            served=now if fleet.ready else self.served,
            prepared=now if waits else self.prepared,
        )

    def is_starting(self, fleet: Fleet, now: float) -> bool:
        """Return whether a replica may still become ready."""
        return fleet.ready < fleet.replicas and now - self.raised < fleet.startup_seconds

    def never_served(self, fleet: Fleet, now: float) -> bool:
        """Return whether none of the replicas became ready in time."""
        begin = max(self.raised, self.prepared)
        return not fleet.ready and self.served < self.raised and now - begin >= fleet.startup_seconds

    def after(self, need: Need, now: float, seconds: float) -> History:
        """Return the history with one more need, without needs that no window of `seconds` contains."""
        kept = [known for known in self.needs if known.at < need.at]
        # The last need before the start of the window still holds at its start.
        first = max((i for i, known in enumerate(kept) if known.at <= now - seconds), default=0)
        return replace(self, needs=(*kept[first:], need))

    def window(self, now: float, seconds: float) -> tuple[Need, ...]:
        """Return the needs that held at some time in the last `seconds`; nothing if the history is shorter."""
        begin = now - seconds
        if not self.needs or self.needs[0].at > begin:
            return ()
        older = [need for need in self.needs if need.at <= begin]
        return (*older[-1:], *(need for need in self.needs if need.at > begin))


@dataclass(frozen=True, slots=True)
class Decision:
    """The replicas to set, and the history for the next decision."""

    replicas: int
    because: str
    history: History


def scale(scaling: Scaling, fleet: Fleet, *, poll: PollResult, now: float, history: History) -> Decision:
    """Decide on the number of replicas at `now`, on the clock of `poll.at`, with the history of the last decision."""
    replicas, history = fleet.replicas, history.seen(fleet, now)
    bounded = min(max(replicas, scaling.min_replicas), scaling.max_replicas)
    if not _is_fresh(poll, now):
        because = f"{_why_unknown(poll)}; an unknown load does not count as idle, so replicas stay at {bounded}"
        return Decision(bounded, because, replace(history, needs=()))
    found = need(scaling, fleet, poll, history, now)
    longest = max(scaling.scale_up_seconds, scaling.scale_down_seconds, scaling.idle_seconds)
    history = history.after(found, now, longest)
    if bounded != replicas:
        return Decision(bounded, f"within {scaling.min_replicas} to {scaling.max_replicas}", history)
    if replicas == 0 and found.replicas > 0:
        return Decision(found.replicas, found.because, history)
    rise = min(history.window(now, scaling.scale_up_seconds), key=lambda n: n.replicas, default=None)
    if rise is not None and rise.replicas > replicas:
        return Decision(rise.replicas, rise.because, history)
    fall = max(history.window(now, scaling.scale_down_seconds), key=lambda n: n.replicas, default=None)
    if fall is not None and fall.replicas == 0:
        idle = max(history.window(now, scaling.idle_seconds), key=lambda n: n.replicas, default=None)
        fall = idle if idle is not None and idle.replicas == 0 else Need(now, 1, "idle for less than idleSeconds")
    if fall is not None and fall.replicas < replicas:
        return Decision(fall.replicas, fall.because, history)
    return Decision(replicas, found.because, history)


def need(scaling: Scaling, fleet: Fleet, poll: PollResult, history: History, now: float) -> Need:
    """Return the replicas that a poll asks for, within the bounds. Workers that did not report count as full."""
    needs = (_online(scaling, fleet, poll, history, now), *_offline(scaling, fleet, poll, history, now))
    wanted, why = max(needs, key=lambda pair: pair[0])
    bounded = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    if bounded != wanted:
        why += f"; within {scaling.min_replicas} to {scaling.max_replicas}"
    return Need(poll.at, bounded, why)


def _is_fresh(poll: PollResult, now: float) -> bool:
    return poll.queue is not None and now - poll.at <= FRESH_SECONDS


def _why_unknown(poll: PollResult) -> str:
    return poll.problem.message if poll.problem else f"the last poll of the queue is older than {FRESH_SECONDS:g} s"


def _online(scaling: Scaling, fleet: Fleet, poll: PollResult, history: History, now: float) -> tuple[int, str]:
    replicas, workers = fleet.replicas, _working(poll)
    silent = max(0, fleet.ready - len(workers))
    if not workers:
        if replicas == 0:
            has_depth = poll.queue is not None and poll.queue.depth > 0
            return 0, "only work that no worker can claim waits" if has_depth else "no work waits"
        if history.never_served(fleet, now) and not _has_offline(poll):
            return 0, "no replica became ready within startupSeconds, and no work is left"
        # Starting pods have not reported yet, and silent ones may be busy.
        return replicas, f"no worker has reported, so replicas stay at {replicas}"
    ceiling = sum(max(1, min(w.slots, w.batch_ceiling)) for w in workers) / len(workers)
    requests = sum(w.online.running + w.online.parked + w.online.waiting for w in workers)
    rate = sum(w.online.requests_per_second for w in workers)
    wanted = math.ceil(requests * (1 + scaling.headroom_percent / 100) / ceiling)
    because = (
        f"{counted(requests, 'online request')} at {rate:.3g}/s with {scaling.headroom_percent:g} % headroom; "
        f"one replica takes {ceiling:.3g}"
    )
    if silent:
        wanted = max(wanted + silent, min(replicas, wanted + replicas))
        found = counted(silent, "worker did not report and counts", "workers did not report and count")
        because += f"; {found} as full"
    if wanted == 0 and rate > 0:
        return 1, f"{because}; online requests arrived in the last minute"
    if wanted == 0 and _has_offline(poll):
        return 1, "offline work is left"
    return wanted, because


def _offline(
    scaling: Scaling, fleet: Fleet, poll: PollResult, history: History, now: float
) -> Iterator[tuple[int, str]]:
    """Yield the replicas that offline work needs, for each reason."""
    queue, replicas = poll.queue, fleet.replicas
    assert queue is not None, "only fresh polls have a need"
    depth, at_risk = queue.claimable_depth, queue.claimable_at_risk
    if replicas == 0 and depth > 0:
        yield 1, f"{counted(depth, 'item waits', 'items wait')} and there is no replica"
        return
    yield (1, "offline work is left") if _has_offline(poll) else (0, "no work")
    workers = _working(poll)
    if workers and not any(map(_offline_slots, workers)):
        return  # `offline.maxPercent` is 0, so more workers would run no more of it
    if at_risk > 0:
        because = f"{counted(at_risk, 'job')} would be late at the present rate"
        is_starting = history.is_starting(fleet, now)
        if fleet.lacks_node:
            because += "; no replica is added while a pod finds no node"
        elif is_starting:
            because += f"; no replica is added before all are ready, and {fleet.ready} of {replicas} are"
        yield (replicas if fleet.lacks_node or is_starting else replicas + 1), because
    elif poll.unneeded is not None and fleet.ready > poll.unneeded:
        yield fleet.ready - poll.unneeded, "with fewer replicas, a job would be late at the present rate"
    if scaling.offline_max_replicas:
        yield from _for_items(scaling.offline_max_replicas, fleet, poll, depth)


def _for_items(most: int, fleet: Fleet, poll: PollResult, depth: int) -> Iterator[tuple[int, str]]:
    """Yield the replicas for items: those for the waiting ones, and those that are there for the running ones, too."""
    workers = _working(poll)
    slots = max((_offline_slots(worker) for worker in workers), default=fleet.slots)
    if slots is None:
        return  # from zero, nothing shows yet how many items one replica takes
    loads = (worker.offline.running + worker.offline.parked + worker.offline.waiting for worker in workers)
    running = sum(min(load, slots) for load in loads)
    # A worker may hold more than it has slots for, and no other replica would get that.
    wanted = max(math.ceil(depth / slots), min(fleet.replicas, math.ceil((depth + running) / slots)))
    found = f"{counted(depth, 'item waits', 'items wait')}, {counted(running, 'request runs', 'requests run')}"
    because = f"{found}; a replica has {counted(slots, 'slot')}, offlineMaxReplicas is {most}"
    if fleet.lacks_node and wanted > fleet.replicas:
        wanted, because = fleet.replicas, f"{because}; no replica is added while a pod finds no node"
    yield min(most, wanted), because


def _offline_slots(worker: WorkerStatus) -> int:
    return min(worker.slots, worker.offline_most)


def _working(poll: PollResult) -> list[WorkerStatus]:
    return [worker for worker in poll.workers if not worker.is_draining]


def _has_offline(poll: PollResult) -> bool:
    queue = poll.queue
    return queue is not None and queue.claimable_depth + queue.items.leased > 0
