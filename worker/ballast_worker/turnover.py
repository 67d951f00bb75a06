"""Measure how fast requests leave their slots. PURE."""

from __future__ import annotations

from dataclasses import dataclass

PER_SLOT = 4
"""Requests of each slot after which half of the past is forgotten."""


@dataclass(slots=True)
class Turnover:
    """Requests that leave one slot per second: what all slots had, divided by the time that requests held them.

    The window follows the length of the requests: half of the past is forgotten with four more requests of each slot,
    but not sooner than after `least_seconds`.
    """

    least_seconds: float
    ended: float = 0.0
    """Requests that ended in the window."""
    held: float = 0.0
    """Seconds in the window until the last end, times the slots that were held."""
    _since: float = 0.0
    """The same since the last end."""

    def add(self, ended: int, elapsed: float, running: int) -> None:
        """Add `elapsed` seconds in which `ended` requests left their slots, and `running` held one."""
        self._since += elapsed * running
        if not ended:
            return
        keep = 0.5 ** (min(self._since / self.least_seconds, ended / PER_SLOT) / max(1, running))
        self.ended = self.ended * keep + ended
        self.held = self.held * keep + self._since
        self._since = 0.0

    def rate(self, running: int) -> float:
        """Return the rate up to the last end or, if it is lower, the rate if all `running` requests ended now.

        So the rate is steady while long requests run, and falls once they take longer than those before. 0: unknown.
        """
        if not self.held:
            return 0.0
        return min(self.ended / self.held, (self.ended + running) / (self.held + self._since))
