"""A step on its way through the executor."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_engine.batch import Batch
from ballast_engine.scheduler import DispatchedStep
from ballast_engine.suspension import Suspended
from ballast_policy.learning.cost import StepWork, attended


@dataclass(slots=True)
class RunningStep:
    """A step that is laid out, until it is recorded."""

    step: DispatchedStep
    batch: Batch
    started: float
    seconds_left: float = 0.0
    """How long it may still stand for newcomers; 0 is not at all."""
    run_seconds: float = 0.0
    """Inside the executor so far."""
    seconds_stood: float = 0.0
    suspended: Suspended | None = None
    """Where it stands, while it does."""
    work: StepWork = field(init=False)
    """What it computes, as far as its time depends on it."""

    def __post_init__(self) -> None:
        num_decode = len(self.step.decodes)
        ends = self.batch.context_lens
        counts = [num for _, num in self.step.chunks]
        self.work = StepWork(
            num_prefill=sum(counts),
            prefill_context=sum(
                attended(end - num, num) for end, num in zip(ends[num_decode:].tolist(), counts, strict=True)
            ),
            num_decode=num_decode,
            decode_context=int(ends[:num_decode].sum()),
        )

    def stand(self, seconds: float) -> None:
        """Take note that it stood still for newcomers."""
        self.seconds_stood += seconds
        self.seconds_left -= seconds
