"""Virtual time: run scheduled actions in an order that depends on the schedule alone."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from math import inf


class Clock:
    """Runs actions at their times. Equal times run by `rank`, then in the order they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, seconds: float, action: Callable[[], None], *, rank: int = 0) -> None:
        """Run `action` at a time that is not in the past."""
        assert seconds >= self.now, f"{seconds} lies before {self.now}"
        heappush(self._events, (seconds, rank, self._count, action))
        self._count += 1

    def run(self, until: float = inf) -> None:
        """Run all actions that are due up to `until`, or until none is left."""
        events = self._events
        while events and events[0][0] <= until:
            self.now, _, _, action = heappop(events)
            action()
        if until < inf:
            self.now = max(self.now, until)
