"""How many replicas, and why, from (spec, load). PURE.

    online need  = ceil(online requests in the system x (1 + headroom) / ceiling of one replica)
    offline need = one more than now where a deadline is at risk; up to `offlineMaxReplicas` while work waits
    need         = max(online need, offline need), within [minReplicas, maxReplicas]

Requests in the system are arrival rate times time in the system (Little's law), measured and not modelled. Replicas
rise to the smallest need of the last `scaleUpSeconds`, and fall to the largest need of the last `scaleDownSeconds`
(`idleSeconds` for the last replica). A window that is not covered yet, or holds a look that told nothing, moves
nothing. From zero, offline work that waits brings one replica at once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ballast_api.inference_deployment import Scaling
from ballast_operator.load import FRESH_SECONDS, Load


@dataclass(frozen=True, slots=True)
class Need:
    """What one look asked for."""

    at: float
    replicas: int
    because: str


@dataclass(frozen=True, slots=True)
class History:
    """Needs in the order of time, as far back as any window asks."""

    needs: tuple[Need, ...] = ()

    def after(self, need: Need, now: float, seconds: float) -> History:
        """With one more look."""
        kept = [known for known in self.needs if known.at < need.at]
        # The last need before the window's begin still covers it.
        first = max((i for i, known in enumerate(kept) if known.at <= now - seconds), default=0)
        return History((*kept[first:], need))

    def window(self, now: float, seconds: float) -> tuple[Need, ...]:
        """Needs that held at some time in the last so many seconds; empty where that is not known."""
        begin = now - seconds
        if not self.needs or self.needs[0].at > begin:
            return ()
        older = [need for need in self.needs if need.at <= begin]
        return (*older[-1:], *(need for need in self.needs if need.at > begin))


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do now."""

    replicas: int
    because: str
    history: History


def scale(scaling: Scaling, *, replicas: int, ready: int, load: Load | None, now: float, history: History) -> Decision:
    """Decide.

    Args:
        scaling: the bounds and windows.
        replicas: how many are asked for now.
        ready: how many of them serve.
        load: the last look at workers and queue.
        now: seconds, on the clock of `load.at`.
        history: as the last decision left it.
    """
    bounded = min(max(replicas, scaling.min_replicas), scaling.max_replicas)
    look = _fresh(load, now)
    if look is None:
        said = look_trouble(load)
        because = f"{said}: replicas stay at {bounded}, for what is not known is not idle"
        return Decision(bounded, because, History())
    found = need(scaling, replicas, ready, look)
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
        fall = idle if idle is not None and idle.replicas == 0 else Need(now, 1, "idle, but not for long enough")
    if fall is not None and fall.replicas < replicas:
        return Decision(fall.replicas, fall.because, history)
    return Decision(replicas, found.because, history)


def need(scaling: Scaling, replicas: int, ready: int, load: Load) -> Need:
    """What this look asks for, within the bounds; the parts of the deployment that are unknown count as full."""
    online, because = _online(scaling, replicas, ready, load)
    offline, offline_because = _offline(scaling, replicas, load)
    wanted, why = max((online, because), (offline, offline_because), key=lambda pair: pair[0])
    bounded = min(max(wanted, scaling.min_replicas), scaling.max_replicas)
    if bounded != wanted:
        why += f"; within {scaling.min_replicas} to {scaling.max_replicas}"
    return Need(load.at, bounded, why)


def look_trouble(load: Load | None) -> str:
    """Why a look tells nothing."""
    if load is None:
        return "the queue has not been looked at yet"
    return load.trouble.message if load.trouble else "the last look at the queue is too old"


def _fresh(load: Load | None, now: float) -> Load | None:
    if load is None or load.trouble is not None or load.queue is None or now - load.at > FRESH_SECONDS:
        return None
    return load


def _online(scaling: Scaling, replicas: int, ready: int, load: Load) -> tuple[int, str]:
    workers = [worker for worker in load.workers if not worker.is_draining]
    silent = max(0, ready - len(workers))
    if not workers:
        if replicas == 0:
            return 0, "no replica, and nothing waits"
        # Pods that start have said nothing yet; those that fell silent are not idle either.
        return replicas, f"no worker has reported, so {replicas} stay"
    ceiling = sum(max(1, min(w.slots, w.batch_ceiling)) for w in workers) / len(workers)
    requests = sum(w.online.running + w.online.parked + w.online.waiting for w in workers)
    rate = sum(w.online.requests_per_second for w in workers)
    wanted = math.ceil(requests * (1 + scaling.headroom_percent / 100) / ceiling)
    because = (
        f"{requests} online requests at {rate:.3g}/s with {scaling.headroom_percent:g} % headroom, "
        f"{ceiling:.3g} fit one replica"
    )
    if silent:
        wanted = max(wanted + silent, min(replicas, wanted + replicas))
        because += f"; {silent} that did not report count as full"
    if wanted == 0 and _has_offline(load):
        return 1, "offline work is left"
    return wanted, because


def _offline(scaling: Scaling, replicas: int, load: Load) -> tuple[int, str]:
    queue = load.queue
    assert queue is not None, "only a fresh look is asked"
    if replicas == 0 and queue.depth > 0:
        return 1, f"{queue.depth} items wait and no replica is there"
    if queue.jobs_at_risk > 0:
        return replicas + 1, f"{queue.jobs_at_risk} jobs would miss their deadline at the present rate"
    if scaling.offline_max_replicas and queue.depth > 0:
        slots = max((worker.slots for worker in load.workers), default=1)
        wanted = min(scaling.offline_max_replicas, math.ceil(queue.depth / slots))
        return wanted, f"{queue.depth} items wait, {slots} slots to a replica, at most {scaling.offline_max_replicas}"
    return (1, "offline work is left") if _has_offline(load) else (0, "no work")


def _has_offline(load: Load) -> bool:
    queue = load.queue
    return queue is not None and queue.depth + queue.items.leased > 0
