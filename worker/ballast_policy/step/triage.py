"""The order of online prefill when not all requests can have their first token in time.

In order of arrival, every request behind a burst would be a little late. Moore and Hodgson (Management Science 15,
1968) make the fewest late: go through the requests in order; whenever one would be late, defer the longest so far.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from heapq import heappush, heapreplace
from math import inf
from typing import NamedTuple

from ballast_policy.learning.cost import CostModel
from ballast_policy.request import Request, computed


class Pace(NamedTuple):
    """How fast prefill goes on."""

    soon: float
    """The end of a step without prefill. Prefill takes its time after that, however long the decodes can wait."""
    start: float
    """When prefill begins to count: now, or earlier if decodes saved time."""
    speed: float
    """Share of the time for prefill, above 0 to 1; decodes take the rest."""
    beside: int = 0
    """Other tokens of the step. Prefill does not pay for the experts that they touch, nor twice for others."""


def all_in_time(requests: Iterable[Request], cost: CostModel, pace: Pace) -> bool:
    """Return whether all prefill is done before any first token is due, in any order. If so, `find_late` is empty."""
    soon, start, speed, beside = pace
    seconds, soonest = 0.0, inf
    for request in requests:
        done = computed(request)
        left = request.num_tokens - done
        seconds += cost.prefill(done, left, beside)
        beside += left
        due = request.arrival + request.ttft
        if due < soonest and not request.num_output:
            soonest = due
    return max(soon + seconds, start + seconds / speed) <= soonest


def find_late(order: Iterable[Request], cost: CostModel, pace: Pace) -> set[Request]:
    """Return the requests that cannot have their first token in time: the fewest of each tenant and priority.

    `order`: online requests that prefill or wait, in policy order.
    """
    soon, start, speed, beside = pace
    late: set[Request] = set()
    kept: dict[tuple[int, str], list[tuple[float, int, Request]]] = {}
    total = 0.0
    for request in order:
        done = computed(request)
        left = request.num_tokens - done
        if left <= 1:
            continue
        seconds = cost.prefill(done, left, beside)
        if request.num_output or request.ttft == inf:
            total, beside = total + seconds, beside + left
            continue
        same = kept.setdefault((request.priority, request.tenant), [])
        entry = (-seconds, request.seq, request)
        longest = -same[0][0] if same else 0.0
        due = request.arrival + request.ttft
        most = min(due - soon, (due - start) * speed)
        if total + seconds <= most:
            heappush(same, entry)
            total, beside = total + seconds, beside + left
        elif longest > seconds and total + seconds - longest <= most:
            total += seconds - longest
            late.add(heapreplace(same, entry)[2])
        else:
            late.add(request)
    return late


def in_time_first(order: Sequence[Request], late: Collection[Request]) -> list[Request]:
    """Return the order in which late requests swap places with the others of their tenant and priority."""
    groups: dict[tuple[int, str], deque[Request]] = {}
    for request in sorted(order, key=lambda request: request in late):
        groups.setdefault((request.priority, request.tenant), deque()).append(request)
    return [groups[request.priority, request.tenant].popleft() for request in order]
