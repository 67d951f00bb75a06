"""Whether speculative decoding pays: drafts cost time in every step, and only accepted drafts are tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ballast_policy.learning.cost import CostModel, StepWork

WINDOW = 64
"""Steps with drafts after which the gain is judged."""
PAUSE = 1024
"""Steps without drafts before they are tried again."""


@dataclass(slots=True)
class _Tally:
    decodes: int = 0
    drafts: int = 0
    accepted: int = 0
    with_drafts: float = 0.0
    """Predicted seconds of the steps as they were."""
    without: float = 0.0
    """Predicted seconds of the same steps without drafts."""
    steps: int = 0


class DraftGain:
    """Switches drafts off while they make tokens slower, and tries them again from time to time.

    Drafts pay if `(decodes + accepted) / seconds` is at least `decodes / seconds without drafts`, over the last
    `WINDOW` steps. Both times are predictions of the cost model, which counts each draft as a decode. Until the model
    is trusted, drafts stay on.
    """

    def __init__(self) -> None:
        self.is_on = True
        self.per_decode = 0.0
        """Mean drafts of a decode, in the last window."""
        self._tally = _Tally()
        self._pause = 0

    def note(self, work: StepWork, *, num_drafts: int, num_accepted: int, cost: CostModel) -> None:
        """Count a step. `work` includes its drafts."""
        if not self.is_on:
            self._pause -= 1
            if self._pause <= 0:
                self.is_on, self._tally = True, _Tally()
            return
        tally = self._tally
        tally.steps += 1
        tally.decodes += work.num_decode - num_drafts
        tally.drafts += num_drafts
        tally.accepted += num_accepted
        tally.with_drafts += cost.predict(work)
        tally.without += cost.predict(replace(work, num_decode=work.num_decode - num_drafts))
        if tally.steps >= WINDOW:
            self._judge(tally, cost)

    def _judge(self, tally: _Tally, cost: CostModel) -> None:
        self._tally = _Tally()
        self.per_decode = tally.drafts / tally.decodes if tally.decodes else 0.0
        gain = (tally.decodes + tally.accepted) * tally.without
        if cost.is_trusted and tally.drafts and gain < tally.decodes * tally.with_drafts:
            self.is_on, self._pause, self.per_decode = False, PAUSE, 0.0

    def expected(self, cost: CostModel) -> CostModel:
        """Return the cost model of a step in which each decode has its usual drafts."""
        return replace(cost, k3=cost.k3 * (1 + self.per_decode)) if self.per_decode else cost
