"""What an engine learns while it runs and tells the policy: step times, the ceiling, what online requests look like."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ballast_policy import cost as policy_cost
from ballast_policy.cost import CostModel, Fit
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.step_model import Work

REFIT_EVERY = 32
"""Steps between two fits, as the engine does it."""


@dataclass
class Knowledge:
    """One replica's. With `fit` the cost model is learnt from the steps; without, `cost` is given and stays."""

    cost: CostModel
    fit: Fit | None = None
    last_online: float = -inf
    typical_prompt: float = 0.0
    """Moving average of what online prompts had to compute."""
    ceiling: int | None = None
    num_steps: int = 0
    _mean_context: float = 0.0

    def admitted(self, num_new: int) -> None:
        """An online request got its first slot, with so many tokens to compute."""
        self.typical_prompt += (num_new - self.typical_prompt) * (0.1 if self.typical_prompt else 1.0)

    def stepped(self, work: Work, seconds: float, config: PolicyConfig) -> None:
        """A step ended after so many seconds."""
        self.num_steps += 1
        if work.num_decode:
            mean = work.decode_context / work.num_decode
            self._mean_context += (mean - self._mean_context) * (0.05 if self._mean_context else 1.0)
        if self.fit:
            done = policy_cost.Work(work.num_prefill, work.prefill_context, work.num_decode, work.decode_context)
            self.fit.add(done, seconds)
        if self.num_steps % REFIT_EVERY:
            return
        if self.fit:
            self.cost = self.fit.refit()
            self.ceiling = None
        if self.cost.is_trusted:
            self.ceiling = self.cost.batch_ceiling(
                slots=config.slots,
                mean_context=self._mean_context,
                tpot=config.tpot,
                ttft=config.ttft,
                prompt=int(self.typical_prompt),
            )
