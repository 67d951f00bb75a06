"""A step that is being computed or is suspended."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ballast_policy.plan import StepPlan
from ballast_sim.replay.simulated_request import SimulatedRequest
from ballast_sim.replay.step_model import BatchWork


@dataclass(slots=True)
class SimulatedStep:
    """A step in virtual time. All its layers take the same time."""

    plan: StepPlan
    items: list[SimulatedRequest]
    work: BatchWork
    seconds: float
    """Time that the step takes, without the time for which it is suspended."""
    num_layers: int
    suspendable: float = 0.0
    """Seconds for which the step may still be suspended."""
    run_from: float | None = None
    """Time from which the step runs; None while it is suspended."""
    done: float = 0.0
    """Seconds of the step that were over at its last suspension."""
    num_suspensions: int = 0
    is_interrupted: bool = False
    """Whether the step is to be suspended at the end of its layer."""

    def next_boundary(self, now: float) -> float | None:
        """Return the time at which the current layer ends; None while the step is suspended, and in the last layer."""
        if self.run_from is None:
            return None
        layer = self.seconds / self.num_layers
        num_over = ceil((self.done + now - self.run_from) / layer - 1e-9)
        return None if num_over >= self.num_layers else max(now, self.run_from + num_over * layer - self.done)

    def suspend(self, now: float) -> None:
        """Suspend the step at a layer boundary."""
        if self.run_from is not None:
            self.done += now - self.run_from
            self.run_from = None
            self.num_suspensions += 1
