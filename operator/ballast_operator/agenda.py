"""Whose turn is next: each name once, the earliest wish wins, and nobody has two turns at a time. PURE."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ballast_operator.kinds import Key

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 60.0


@dataclass(slots=True)
class Agenda:
    """Names and when they are due. A name added during its own turn is due again after it."""

    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, Key]] = field(default_factory=list)
    _running: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)

    def add(self, key: Key, at: float) -> None:
        """Let `key` have a turn at `at`, or earlier if it has an earlier one coming."""
        known = self._due.get(key)
        if known is not None and known <= at:
            return
        self._due[key] = at
        if key not in self._running:
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """Give a name that is due, whose turn then lasts until `finish`."""
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if key in self._running or self._due.get(key) != at:
                continue  # it was moved to an earlier time, and had that turn
            del self._due[key]
            self._running.add(key)
            return key
        return None

    def finish(self, key: Key, *, failed: bool = False) -> float:
        """End the turn; give how long to wait before the next one after so many failures in a row (0: none)."""
        self._running.discard(key)
        if key in self._due:
            heapq.heappush(self._heap, (self._due[key], key))
        if not failed:
            self._failures.pop(key, None)
            return 0.0
        failures = self._failures[key] = min(self._failures.get(key, 0) + 1, 20)
        return float(min(FIRST_DELAY_SECONDS * 2 ** (failures - 1), LONGEST_DELAY_SECONDS))

    def next_due(self) -> float | None:
        """When `take` next gives something; None: not before something is added or finished."""
        while self._heap:
            at, key = self._heap[0]
            if key not in self._running and self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    @property
    def num_waiting(self) -> int:
        """Names that have a turn coming."""
        return len(self._due)
