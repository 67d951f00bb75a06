"""The reservation of offline: slots, KV blocks and prefill tokens that no online load takes away.

Policy, engine, simulator, metrics, conditions and alerts all read `Reservation`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import floor

ROUNDING = 1e-9
"""`0.1 * 30` is 3.0000000000000004 in floating point, and its ceiling must be 3."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The reserved capacity, and whether offline has it."""

    slots: int = 0
    """`min(ceil(share * min(slots, ceiling)), slots - 1, maximum of the class)`."""
    blocks: int = 0
    """KV blocks: `min(ceil(share * blocks), blocks - 1)`."""
    chunk: int = 0
    """Prefill tokens of a step: `min(ceil(share * chunk), max(1, chunk * 7 // 8))`."""
    in_use: int = 0
    """Reserved slots in which an offline request runs. A parked request holds no slot."""
    is_met: bool = True
    """At least `min(slots, entitled)` offline requests run, or fewer take the reserved tokens; true if no offline work
    waits or runs."""
    is_met_by_tokens: bool = False
    """Fewer requests run, and take the reserved tokens."""

    def used_by(self, running: int, entitled: int, num_prefill: int = 0) -> Reservation:
        """Return the reservation with `running` offline requests in slots, of which it covers `entitled` at most.

        `entitled`: offline requests that wait, run or are parked, counted up to the slot cap of their tenant.
        """
        in_use, due = min(self.slots, running), min(self.slots, entitled)
        by_tokens = in_use < due and 0 < self.chunk <= num_prefill
        return replace(self, in_use=in_use, is_met=in_use >= due or by_tokens, is_met_by_tokens=by_tokens)


def most_slots(max_share: float, slots: int) -> int:
    """Return the most slots that a class may hold: `floor(max_share * slots)`, at least one unless the share is 0."""
    return max(1, floor(max_share * slots + ROUNDING)) if max_share > 0 else 0
