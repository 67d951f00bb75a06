"""A step on its way: how far it has come, and where it may stand still."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from ballast_policy.plan import StepPlan
from ballast_sim.item import Item
from ballast_sim.step_model import BatchWork


@dataclass(slots=True)
class Flight:
    """A step whose layers all take the same time."""

    plan: StepPlan
    items: list[Item]
    work: BatchWork
    seconds: float
    """What it takes, the time that it stands still left out."""
    num_layers: int
    suspendable: float = 0.0
    """How long it may still stand for newcomers."""
    run_from: float | None = None
    """Since when it runs; None while it stands."""
    done: float = 0.0
    """Seconds of it that were over when it last stood."""
    num_turns: int = 0
    """How often it stood: the end that was expected before is none."""
    is_interrupted: bool = False
    """It will stand at the end of this layer."""

    @property
    def is_running(self) -> bool:
        """Whether it is being computed."""
        return self.run_from is not None

    @property
    def left(self) -> float:
        """Seconds from where it stood to its end."""
        return self.seconds - self.done

    def next_boundary(self, now: float) -> float | None:
        """When the layer in flight is over; None while the step stands, and in the last layer."""
        if self.run_from is None:
            return None
        layer = self.seconds / self.num_layers
        num_over = ceil((self.done + now - self.run_from) / layer - 1e-9)
        return None if num_over >= self.num_layers else max(now, self.run_from + num_over * layer - self.done)

    def stand(self, now: float) -> None:
        """Stop it at a boundary."""
        if self.run_from is not None:
            self.done += now - self.run_from
            self.run_from = None
            self.num_turns += 1
