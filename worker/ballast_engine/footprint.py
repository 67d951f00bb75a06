"""The cost of a model's work on a device: floating-point operations and bytes moved, from the shape of the model.

Together with the peak of the device, the cost yields MFU and MBU. It depends on the model, not on the implementation:
two operations for each weight and token, and four for each head dimension and token attended to. The weights count
once per step, split between the phases by their tokens. K and V count once per request and step for every token
attended to, and once for every new token. Sliding windows are not taken into account.
"""

from __future__ import annotations

from dataclasses import dataclass

PHASES = ("prefill", "decode")


@dataclass(slots=True)
class PhaseWork:
    """Work of one phase, prefill or decode, summed over steps."""

    passes: float = 0.0
    """Steps. A step with both phases counts for each phase by its share of the tokens."""
    tokens: int = 0
    attended: float = 0.0
    """Tokens attended to, summed over tokens."""
    context: int = 0
    """Tokens attended to, summed over the requests of each step."""
    draws: int = 0
    """Tokens sampled: rows of the product with the output matrix."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The cost of a model, and the peak of its device."""

    token_flops: float
    """For each token, in the layers."""
    attended_flops: float
    """For each token and each token that it attends to."""
    draw_flops: float
    weight_bytes: float
    kv_bytes: float
    """K and V of one token in all layers."""
    peak_flops: float
    """Operations of the device per second."""
    peak_bandwidth: float
    """Bytes of the device per second."""

    def flops(self, work: PhaseWork) -> float:
        """Return the operations of the work."""
        return self.token_flops * work.tokens + self.attended_flops * work.attended + self.draw_flops * work.draws

    def bytes(self, work: PhaseWork) -> float:
        """Return the bytes that the work moves."""
        return self.weight_bytes * work.passes + self.kv_bytes * (work.context + work.tokens)
