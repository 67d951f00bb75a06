"""A request in the simulation, and a step that is being computed or is suspended."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf

from ballast_policy.plan import StepPlan
from ballast_policy.request import Request
from ballast_sim.replay.step_model import BatchWork


@dataclass(slots=True, eq=False)
class SimulatedRequest:
    """One online request or item of a job: the policy's record of it, and the facts that only the simulation knows."""

    request: Request
    num_output: int
    """Tokens that it generates. The policy does not know this number."""
    prefix_tokens: int = 0
    """Prompt tokens that it shares with all requests of its prefix key."""
    job: str = ""
    last_token: float = inf
    """Time of the last token; inf before."""
    num_late: int = 0
    """Tokens that came after their deadline."""
    num_granted: int = 0
    """Tokens granted in the step that is being computed."""
    num_recomputed: int = 0
    """Tokens computed again after a preemption."""

    @property
    def first_token(self) -> float:
        """Time of the first token; inf before."""
        return self.request.first_token


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
