"""Whether speculative decoding pays: drafts make steps longer, and only accepted drafts are tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median

from ballast_policy.learning.cost import CostModel, StepWork

WINDOW = 64
"""Steps of each mode that are compared."""
PERIOD = 2048
"""Steps between two trials of the other mode. So 3 % of the steps are trials."""
DISTURBED = 2.0
"""A step that took this many times as long as the middle one of its window had to wait for other work."""


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """A step with decodes, as far as it shows what drafts cost and yield."""

    work: StepWork
    """Its work without drafts."""
    seconds: float
    with_drafts: bool
    """Whether the drafter ran in the step."""
    num_drafts: int = 0
    num_accepted: int = 0


class DraftGain:
    """Keeps drafts on while they make tokens faster.

    Every 2,048 steps, Ballast tries 64 steps with drafts if they are off, or without drafts if they are on. It compares
    them with the 64 steps before: how many tokens a decode yields, and how long a step takes. Drafts pay if they
    multiply the tokens of a decode by at least as much as the time of a step, which includes the time of the drafter.
    For example, drafts that yield 1.8 tokens in steps that take 1.5 times as long stay on. The two sides have different
    requests, so the time of a step is divided by the prediction of the cost model for its work without drafts. Drafts
    are on until the model is trusted.
    """

    def __init__(self) -> None:
        self.is_on = True
        """Whether the next step has drafts."""
        self.is_usual = True
        """Whether steps have drafts outside trials."""
        self.per_decode = 0.0
        """Mean drafts of a decode in the next step."""
        self._recent: dict[bool, deque[DecodeStep]] = {mode: deque(maxlen=WINDOW) for mode in (True, False)}
        self._num_left = WINDOW

    def note(self, step: DecodeStep, cost: CostModel) -> None:
        """Count a step. With asynchronous scheduling, a step may end after a switch."""
        if step.with_drafts is not self.is_on or not step.work.num_decode:
            return
        self._recent[self.is_on].append(step)
        self.per_decode = self._drafts_per_decode()
        self._num_left -= 1
        if self._num_left > 0:
            return
        if self.is_on is not self.is_usual:
            self.is_usual = self._pays(cost)
            self._switch(is_on=self.is_usual, num_steps=PERIOD)
        elif cost.is_trusted:
            # The window loses the first step of the trial. That step runs the drafter, but has no drafts to verify.
            self._switch(is_on=not self.is_usual, num_steps=WINDOW + 1)

    def _switch(self, *, is_on: bool, num_steps: int) -> None:
        self.is_on, self._num_left = is_on, num_steps
        self.per_decode = self._drafts_per_decode()

    def _drafts_per_decode(self) -> float:
        recent = self._recent[True]
        if not self.is_on or not recent:
            return 0.0
        return sum([step.num_drafts for step in recent]) / sum([step.work.num_decode for step in recent])

    def _pays(self, cost: CostModel) -> bool:
        with_drafts, without = self._recent[True], self._recent[False]
        return _tokens(with_drafts) * _length(without, cost) >= _tokens(without) * _length(with_drafts, cost)

    def expected(self, cost: CostModel) -> CostModel:
        """Return the cost model of a step in which each decode has its usual drafts."""
        return replace(cost, k3=cost.k3 * (1 + self.per_decode)) if self.per_decode else cost


def _tokens(steps: Collection[DecodeStep]) -> float:
    """Return the tokens that a decode yields."""
    return 1 + sum([step.num_accepted for step in steps]) / sum([step.work.num_decode for step in steps])


def _length(steps: Collection[DecodeStep], cost: CostModel) -> float:
    """Return the time of the steps as a multiple of the predicted time, without disturbed steps."""
    times = [(step.seconds, max(cost.predict(step.work), 1e-9)) for step in steps]
    most = DISTURBED * median([seconds / predicted for seconds, predicted in times])
    usual = [(seconds, predicted) for seconds, predicted in times if seconds <= most * predicted]
    return sum([seconds for seconds, _ in usual]) / sum([predicted for _, predicted in usual])
