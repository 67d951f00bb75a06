"""The work queue: which resource is reconciled next. PURE.

Each key is in the queue at most once, its earliest due time wins, and no key is reconciled twice at the same time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from ballast_operator.kinds import Key

FIRST_DELAY_SECONDS = 0.25
LONGEST_DELAY_SECONDS = 60.0


@dataclass(slots=True)
class WorkQueue:
    """Keys and their due times. A key that is added while it is reconciled becomes due again afterwards."""

    _due: dict[Key, float] = field(default_factory=dict)
    _heap: list[tuple[float, Key]] = field(default_factory=list)
    _running: set[Key] = field(default_factory=set)
    _failures: dict[Key, int] = field(default_factory=dict)
    _not_before: dict[Key, float] = field(default_factory=dict)

    def add(self, key: Key, at: float) -> None:
        """Make `key` due at `at`, unless it is due earlier already, or may not be tried then."""
        at = max(at, self._not_before.get(key, at))
        known = self._due.get(key)
        if known is not None and known <= at:
            return
        self._due[key] = at
        if key not in self._running:
            heapq.heappush(self._heap, (at, key))

    def take(self, now: float) -> Key | None:
        """Remove and return a key that is due. Its reconciliation lasts until `finish`."""
        while self._heap and self._heap[0][0] <= now:
            at, key = heapq.heappop(self._heap)
            if key in self._running or self._due.get(key) != at:
                continue  # the key became due earlier, and was taken then
            del self._due[key]
            self._running.add(key)
            return key
        return None

    def finish(self, key: Key, *, failed: bool = False, not_before: float | None = None) -> float:
        """End a reconciliation. Return the delay before the next try: 0 unless it failed, longer after each failure.

        The next one does not begin before the time `not_before`.
        """
        self._running.discard(key)
        self._not_before.pop(key, None)
        if not_before is not None:
            self._not_before[key] = not_before
        if key in self._due:
            self._due[key] = max(self._due[key], self._not_before.get(key, self._due[key]))
            heapq.heappush(self._heap, (self._due[key], key))
        if not failed:
            self._failures.pop(key, None)
            return 0.0
        failures = self._failures[key] = min(self._failures.get(key, 0) + 1, 20)
        return float(min(FIRST_DELAY_SECONDS * 2 ** (failures - 1), LONGEST_DELAY_SECONDS))

    def next_due(self) -> float | None:
        """Return when `take` next returns a key, or None if a key must be added or finished first."""
        while self._heap:
            at, key = self._heap[0]
            if key not in self._running and self._due.get(key) == at:
                return at
            heapq.heappop(self._heap)
        return None

    @property
    def num_waiting(self) -> int:
        """Return the number of keys in the queue."""
        return len(self._due)
