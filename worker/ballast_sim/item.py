"""One request in the simulation."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ballast_policy.request import Request


@dataclass(slots=True, eq=False)
class Item:
    """One request of the simulation: the policy's record of it, and what only the simulation knows."""

    request: Request
    num_output: int
    """Tokens it will generate, which the policy is not told."""
    prefix_tokens: int = 0
    """Prompt tokens it shares with others of its prefix group."""
    job: str = ""
    last_token: float = inf
    num_late: int = 0
    """Tokens that came after their deadline."""
    num_granted: int = 0
    """Tokens of the step in flight."""
    num_recomputed: int = 0
    """Tokens computed again after a preemption."""
    shared_blocks: int = 0
    """Leading blocks that belong to its group's cache entry."""

    @property
    def first_token(self) -> float:
        """When its first token was there; inf before."""
        return self.request.first_token
