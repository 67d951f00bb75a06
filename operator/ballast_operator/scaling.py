"""The number of replicas and its reason, from the spec and the last poll. PURE.

    online need  = ceil(online requests in the system x (1 + headroom) / ceiling of one replica)
    offline need = the larger of: one more than now if a deadline is at risk and no replica starts; up to
                   `offlineMaxReplicas` while work waits
    need         = max(online need, offline need), within [minReplicas, maxReplicas]

A poll between two short requests finds none in the system, so the online need is at least 1 while a rate is reported. A
worker reports the rate of its last request for about a minute.
Requests in the system equal arrival rate times time in the system (Little's law). They are measured, not modelled.
A new replica loads its model for minutes. A deadline at risk adds no other until every replica is ready. A replica that
never becomes ready blocks this for `startupSeconds` after the last rise of `replicas`, and then no longer.
Replicas rise to the smallest need of the last `scaleUpSeconds`, and fall to the largest need of the last
`scaleDownSeconds` (`idleSeconds` for the last replica). Nothing changes if a window is not covered yet or contains a
poll that failed. At zero replicas, waiting offline work adds one replica at once. Jobs that are paused or ending, or
whose model no worker serves, are no work, and nothing is while Redis has no memory for results.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ballast_api.inference_deployment import Scaling
from ballast_openai.errors import counted
from ballast_operator.poll_result import FRESH_SECONDS, PollResult


@dataclass(frozen=True, slots=True)
class Need:
    """The replicas that one poll asked for."""

    at: float
    replicas: int
    because: str


@dataclass(frozen=True, slots=True)
class History:
    """The needs in the order of time, as far back as the longest window, and the last rise of `spec.replicas`."""

    needs: tuple[Need, ...] = ()
    replicas: int = 0
    """The replicas at the last decision."""
    raised: float = -math.inf
    """When they were first seen to be more than before."""

    def seen(self, replicas: int, now: float) -> History:
        """Return the history with the present replicas."""
        return replace(self, replicas=replicas, raised=now if replicas > self.replicas else self.raised)

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


def scale(
    scaling: Scaling,
    *,
    replicas: int,
    ready: int,
    poll: PollResult | None,
    now: float,
    history: History,
    startup_seconds: float = math.inf,
) -> Decision:
    """Decide on the number of replicas.

    Args:
        scaling: the bounds and windows.
        replicas: the present `spec.replicas`.
        ready: the number of ready replicas.
        poll: the last poll of workers and queue.
        now: seconds, on the clock of `poll.at`.
        history: the history of the last decision.
        startup_seconds: the time in which a new replica becomes ready, if it ever does.
    """
    history = history.seen(replicas, now)
    bounded = min(max(replicas, scaling.min_replicas), scaling.max_replicas)
    if poll is None or not _is_fresh(poll, now):
        because = f"{_why_unknown(poll)}; an unknown load does not count as idle, so replicas stay at {bounded}"
        return Decision(bounded, because, replace(history, needs=()))
    is_starting = ready < replicas and now - history.raised < startup_seconds
    found = need(scaling, replicas, ready, poll, is_starting=is_starting)
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


def need(scaling: Scaling, replicas: int, ready: int, poll: PollResult, *, is_starting: bool) -> Need:
    """Return the replicas that a poll asks for, within the bounds. Workers that did not report count as full."""
    online, because = _online(scaling, replicas, ready, poll)
    offline, offline_because = _offline(scaling, replicas, ready, poll, is_starting=is_starting)
    wanted, why = max((online, because), (offline, offline_because), key=lambda pair: pair[0])
    bounded = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    if bounded != wanted:
        why += f"; within {scaling.min_replicas} to {scaling.max_replicas}"
    return Need(poll.at, bounded, why)


def _is_fresh(poll: PollResult, now: float) -> bool:
    return poll.queue is not None and now - poll.at <= FRESH_SECONDS


def _why_unknown(poll: PollResult | None) -> str:
    if poll is None:
        return "the queue has not been polled yet"
    return poll.problem.message if poll.problem else f"the last poll of the queue is older than {FRESH_SECONDS:g} s"


def _online(scaling: Scaling, replicas: int, ready: int, poll: PollResult) -> tuple[int, str]:
    workers = [worker for worker in poll.workers if not worker.is_draining]
    silent = max(0, ready - len(workers))
    if not workers:
        if replicas == 0:
            has_depth = poll.queue is not None and poll.queue.depth > 0
            return 0, "only work that no worker can claim waits" if has_depth else "no work waits"
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


def _offline(scaling: Scaling, replicas: int, ready: int, poll: PollResult, *, is_starting: bool) -> tuple[int, str]:
    queue = poll.queue
    assert queue is not None, "only fresh polls have a need"
    depth, at_risk = queue.claimable_depth, queue.claimable_at_risk
    if replicas == 0 and depth > 0:
        return 1, f"{counted(depth, 'item waits', 'items wait')} and there is no replica"
    needs = []
    if at_risk > 0:
        late = counted(at_risk, "job would miss its deadline", "jobs would miss their deadline")
        because = f"{late} at the present rate"
        if is_starting:
            because += f"; no replica is added before all are ready, and {ready} of {replicas} are"
        needs.append((replicas if is_starting else replicas + 1, because))
    if scaling.offline_max_replicas and depth > 0:
        slots = max([1, *(worker.slots for worker in poll.workers)])
        wanted = min(scaling.offline_max_replicas, math.ceil(depth / slots))
        because = f"{counted(depth, 'item waits', 'items wait')}; a replica has {counted(slots, 'slot')}"
        needs.append((wanted, f"{because}, offlineMaxReplicas is {scaling.offline_max_replicas}"))
    needs.append((1, "offline work is left") if _has_offline(poll) else (0, "no work"))
    return max(needs, key=lambda pair: pair[0])


def _has_offline(poll: PollResult) -> bool:
    queue = poll.queue
    return queue is not None and queue.claimable_depth + queue.items.leased > 0
