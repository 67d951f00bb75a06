"""Which of online goes first where not all can have their first token in time.

Prefill is one machine: each prompt takes its time and is due at its TTFT. Served as they came, everybody behind a burst
is late by a little. Moore and Hodgson (Management Science 15, 1968) leave the fewest late: go through them in order,
and whenever one would be late, put off the longest so far.

Who is put off goes behind the others of its tenant and priority: tenants and priorities keep their turns, and only who
of a tenant takes it changes. Answers that have begun are never put off. The first of those put off still gets a part
of each step (`prefill`), so that a long prompt comes to its end under an overload that does not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappush, heapreplace
from math import inf

from ballast_policy.cost import CostModel
from ballast_policy.request import Request, computed, is_overdue


def all_in_time(requests: Iterable[Request], cost: CostModel, speed: float, start: float) -> bool:
    """Tell without an order whether nobody is put off: all of it is done before the first of them is due."""
    seconds, soonest = 0.0, inf
    for request in requests:
        done = computed(request)
        seconds += cost.prefill(done, request.num_tokens - done)
        due = request.arrival + request.ttft
        if due < soonest and not request.num_output:
            soonest = due
    return start + seconds / speed <= soonest


def put_off(order: Iterable[Request], cost: CostModel, now: float, speed: float, start: float) -> set[Request]:
    """Give those that cannot have their first token in time, the fewest there can be of each tenant and priority.

    `order`: online requests that prefill or wait, as they would be served. `speed`: share of the time that is theirs,
    above 0 to 1; decodes take the rest. `start`: when the first may begin to count, `now` or earlier where time was
    saved up for them.
    """
    late: set[Request] = set()
    kept: dict[tuple[int, str], list[tuple[float, int, Request]]] = {}
    clock = start
    for request in order:
        done = computed(request)
        left = request.num_tokens - done
        if left <= 1:
            continue
        seconds = cost.prefill(done, left) / speed
        if request.num_output or request.ttft == inf:
            clock += seconds
            continue
        if is_overdue(request, now):
            late.add(request)
            continue
        same = kept.setdefault((request.priority, request.tenant), [])
        entry = (-seconds, request.seq, request)
        longest = -same[0][0] if same else 0.0
        missed = clock + seconds - request.arrival - request.ttft
        if missed <= 0:
            heappush(same, entry)
            clock += seconds
        elif longest > max(seconds, missed):
            clock += seconds - longest
            late.add(heapreplace(same, entry)[2])
        else:
            late.add(request)
    return late


def in_time_first(order: Sequence[Request], late: set[Request]) -> list[Request]:
    """Let those that are put off change places with the others of their tenant and priority."""
    groups: dict[tuple[int, str], deque[Request]] = {}
    for is_late in (False, True):
        for request in order:
            if (request in late) is is_late:
                groups.setdefault((request.priority, request.tenant), deque()).append(request)
    return [groups[request.priority, request.tenant].popleft() for request in order]
