"""Prefill of online in one step: who goes first, and how much of the step it may take."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from math import inf

from ballast_policy.budget import OnlineStep, prefill_room
from ballast_policy.request import Request, computed
from ballast_policy.step import Step
from ballast_policy.triage import all_in_time, in_time_first, put_off
from ballast_policy.turns import Door, turns

LATE_SHARE = 0.1
"""Of the prefill of a step, what the first of those that are put off gets before all others."""


class Prefill:
    """What online may prefill, and in which order.

    Requests that can have their first token in time go first, at the pace that the decodes leave.
    """

    def __init__(self, step: Step, part: OnlineStep | None) -> None:
        """`part` is None where step times are unknown, or nobody prefills."""
        self._step = step
        self._late: set[Request] = set()
        self._everyone: list[Request] = []
        """Who prefills, is parked or waits, as in `turns`; empty where nobody can be put off, for it takes its time."""
        self._until = inf
        """The value of `step.seconds` up to which online prefills."""
        if part is not None:
            self._until = self._triage(part) - (part.seconds - step.seconds)
        step.put_off = self._late

    def order(self, door: Door) -> Iterable[Request]:
        """Go through who prefills, is parked or waits, as in `turns`; who is put off behind the others like it."""
        return in_time_first(self._everyone, self._late) if self._late else self._turns(door)

    def first_put_off(self) -> Request | None:
        """Give the first of those that are put off, where none of a higher priority is before it."""
        first = next((request for request in self._everyone if request in self._late), None)
        return None if first is None or first.priority < self._everyone[0].priority else first

    def tokens(self, request: Request, share: float = 1.0) -> int:
        """Give the tokens that a request may prefill on top of those granted: what time and the chunk leave of it."""
        step = self._step
        done = computed(request) + step.prefill_grants.get(request, 0)
        limit = min(request.num_tokens - done, int(share * max(0, step.chunk - step.reserved_chunk)))
        if self._until == inf:
            return limit
        return step.cost.largest_chunk(share * (self._until - step.seconds), done, limit)

    def _turns(self, door: Door) -> Iterable[Request]:
        step, online = self._step, self._step.online
        return turns(step, online.prefills, online.parked, step.online_waiting, door)

    def _triage(self, part: OnlineStep) -> float:
        """Say who is put off, and give the seconds to which the step may come."""
        snapshot, cost = self._step.snapshot, self._step.cost
        room, pace = prefill_room(snapshot, part)
        if not snapshot.config.is_triaged:
            return room
        speed = 1 - part.fixed / pace
        start = snapshot.now - (room - pace if pace < inf else 0.0)
        online = self._step.online
        if all_in_time(chain(online.prefills, online.parked, self._step.online_waiting), cost, speed, start):
            return room
        everyone = self._everyone = list(self._turns(Door(self._step)))
        self._late = put_off(everyone, cost, snapshot.now, speed, start)
        return room
