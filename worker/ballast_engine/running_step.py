"""A step while the executor computes it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_engine.batch import Batch
from ballast_engine.scheduler import DispatchedStep
from ballast_engine.suspension import Suspended
from ballast_policy.learning.cost import StepWork, attended


@dataclass(slots=True)
class RunningStep:
    """A step and its batch, from its plan to its record."""

    step: DispatchedStep
    batch: Batch
    started: float
    seconds_left: float = 0.0
    """How long the step may still be suspended for new requests; 0 forbids it."""
    suspended_seconds: float = 0.0
    """Time of suspension so far."""
    suspended: Suspended | None = None
    """The suspended computation, if the step is suspended."""
    work: StepWork = field(init=False)
    """The size of the step, on which its time depends."""

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
