"""Slots that a class may still give out in one step."""

from __future__ import annotations

from ballast_policy.plan import Reason
from ballast_policy.request import ONLINE, Request, RequestClass
from ballast_policy.step import Step


class Slots:
    """Slots for the newcomers of a class: vacant ones, and behind them those that its own lower priorities hold."""

    def __init__(self, step: Step, request_class: RequestClass) -> None:
        self._step = step
        self._class = request_class
        self._group = step.online if request_class is ONLINE else step.offline
        self._holders: list[Request] | None = None
        self._num_vacant = 0
        """Vacant ones when they were counted last, less those given out since; there may be more by now."""

    def has_one_for(self, request: Request) -> bool:
        """Tell whether one is vacant, or held by a request of lower priority."""
        if self._num_vacant < 1:
            self._num_vacant = self._step.num_vacant(self._class)
        return self._num_vacant > 0 or any(holder.priority < request.priority for holder in self._group.running)

    def make_vacant(self) -> None:
        """Give one out: the last holder is parked for it where none was vacant when asked, nor came free since."""
        if self._num_vacant > 0:
            self._num_vacant -= 1
        elif self._step.num_vacant(self._class) < 1 and (lowest := self._lowest()) is not None:
            self._step.leave_slots([lowest], Reason.PRIORITY)

    def _lowest(self) -> Request | None:
        if self._holders is None:
            self._holders = self._step.ranked(self._group.running)
        while self._holders and self._holders[-1] in self._step.gone:
            self._holders.pop()
        return self._holders[-1] if self._holders else None
