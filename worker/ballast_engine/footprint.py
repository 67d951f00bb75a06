"""What a model's work costs a device: floating-point operations and bytes moved, from the shape of the model.

With what the device can do at most this gives MFU and MBU, the shares of it that are used. Counted is what the model
asks for, whatever the implementation does: two operations for each weight and token, four for each head dimension and
token attended to; the weights once a step, shared between the phases by their tokens; K and V of every token attended
to once for each request and step, and of every new token. Sliding windows are not taken into account.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("prefill", "decode")


@dataclass(slots=True)
class PhaseWork:
    """Work of one phase, prefill or decode, summed over steps."""

    passes: float = 0.0
    """Steps; one with both phases counts for each by its share of the tokens."""
    tokens: int = 0
    attended: float = 0.0
    """Tokens attended to, summed over tokens."""
    context: int = 0
    """Tokens attended to, summed over the requests of each step."""
    draws: int = 0
    """Tokens drawn: rows of the output matrix's product."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What a model costs, and the most that its device gives for it."""

    token_flops: float
    """Each token, in the layers."""
    attended_flops: float
    """Each token, for each token it attends to."""
    draw_flops: float
    weight_bytes: float
    kv_bytes: float
    """K and V of one token in all layers."""
    peak_flops: float
    """Of the device, per second."""
    peak_bandwidth: float
    """Bytes per second."""

    def flops(self, work: PhaseWork) -> float:
        """Give the operations of some work."""
        return self.token_flops * work.tokens + self.attended_flops * work.attended + self.draw_flops * work.draws

    def bytes(self, work: PhaseWork) -> float:
        """Give the bytes that it moves."""
        return self.weight_bytes * work.passes + self.kv_bytes * (work.context + work.tokens)
