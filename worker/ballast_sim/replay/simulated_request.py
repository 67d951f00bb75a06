"""A request in the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ballast_policy.request import Request


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
