"""The time between two tries of something that fails."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Backoff:
    """Doubles from `first` to `last` seconds with each failure."""

    first: float
    last: float
    _next: float | None = None

    def fail(self) -> float:
        """Return the seconds until the next try."""
        now = self.first if self._next is None else self._next
        self._next = min(2 * now, self.last)
        return now

    def reset(self) -> None:
        """Begin again with `first`."""
        self._next = None
