"""Slots that a class may still give out in one step."""

from __future__ import annotations

from ballast_policy.plan import Reason
from ballast_policy.request import Request
from ballast_policy.residents import Residents
from ballast_policy.step import Step


class Slots:
    """Vacant slots of a class, and behind them those that its own lower priorities hold."""

    def __init__(self, step: Step, group: Residents, num_vacant: int) -> None:
        self._step = step
        self._group = group
        self._holders: list[Request] | None = None
        self.num_vacant = num_vacant

    def has_one_for(self, request: Request) -> bool:
        """Tell whether one is vacant, or held by a request of lower priority."""
        if self.num_vacant > 0:
            return True
        if self._holders is None:
            self._holders = self._step.ranked(self._group.running)
        while self._holders and self._holders[-1] in self._step.gone:
            self._holders.pop()
        return bool(self._holders) and self._holders[-1].priority < request.priority

    def take(self) -> None:
        """Take the one that `has_one_for` saw."""
        if self.num_vacant > 0:
            self.num_vacant -= 1
        else:
            assert self._holders
            self._step.leave_slots([self._holders.pop()], Reason.PRIORITY)
