"""How long a step takes, from few coefficients."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """`t = k0 + k1 * n_prefill + k2 * n_prefill * context + k3 * n_decode + k4 * sum_context`, in seconds.

    `n_prefill * context` is summed over prefill chunks with the mean context each of its tokens attends to;
    `sum_context` is over decodes.
    """

    k0: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    k4: float = 0.0
    is_trusted: bool = False
    """False: a static fallback, too rough to hold an SLO by."""
