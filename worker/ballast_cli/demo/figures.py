"""Percentiles, ratios and how sure they are. PURE."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = (50, 95, 99)


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float | None]:
    """Give p50, p95 and p99 (linear interpolation); None each where there is no value."""
    if len(values) == 0:
        return {f"p{q}": None for q in QUANTILES}
    found = np.percentile(np.asarray(values, dtype=np.float64), QUANTILES)
    return {f"p{q}": round(float(value), 3) for q, value in zip(QUANTILES, found, strict=True)}


@dataclass(frozen=True, slots=True)
class Ratio:
    """A quotient of percentiles, mixed over online-only, and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """For JSON."""
        return {"ratio": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def ratio_of_percentiles(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, q: float, seed: int = 0, rounds: int = 2000
) -> Ratio:
    """Divide percentile `q` of `other` by that of `base`, with an interval that respects bursts.

    Both sides are cut into the same short segments of the trace (`base[i]` and `other[i]` replay the same arrivals).
    Whole segments are drawn with replacement, the same ones on both sides: requests of one burst wait on each other,
    so they are not independent draws.

    Raises:
        ValueError: the sides have different numbers of segments, or one has no value at all.
    """
    if len(base) != len(other):
        raise ValueError(f"found {len(base)} and {len(other)} segments, wanted the same on both sides")
    lower, upper = _Pool.of(base), _Pool.of(other)
    if not lower.values.size or not upper.values.size:
        raise ValueError("a side has no value: nothing to compare")
    point = float(np.percentile(upper.values, q) / np.percentile(lower.values, q))
    random = np.random.default_rng(seed)
    ratios = []
    for _ in range(rounds):
        drawn = np.bincount(random.integers(0, len(base), len(base)), minlength=len(base))
        below, above = lower.percentile(drawn, q), upper.percentile(drawn, q)
        if below and above is not None:
            ratios.append(above / below)
    low, high = np.percentile(ratios, (2.5, 97.5)) if ratios else (float("nan"), float("nan"))
    return Ratio(point, float(low), float(high))


@dataclass(frozen=True, slots=True)
class _Pool:
    """All values of a side in order, each with its segment: a drawn multiset is then a vector of weights."""

    values: NDArray[np.float64]
    segment: NDArray[np.intp]

    @classmethod
    def of(cls, segments: Sequence[Sequence[float]]) -> _Pool:
        values = np.asarray([value for segment in segments for value in segment], dtype=np.float64)
        index = np.repeat(np.arange(len(segments)), [len(segment) for segment in segments])
        order = np.argsort(values, kind="stable")
        return cls(values[order], index[order])

    def percentile(self, drawn: NDArray[np.intp], q: float) -> float | None:
        """Give percentile `q` of the values repeated as often as their segment was drawn, as numpy would."""
        upto = np.cumsum(drawn[self.segment])
        total = int(upto[-1])
        if not total:
            return None
        position = (total - 1) * q / 100
        below = int(position)
        first = self.values[np.searchsorted(upto, below, side="right")]
        second = self.values[np.searchsorted(upto, min(below + 1, total - 1), side="right")]
        return float(first + (second - first) * (position - below))


def verdict(ratio: Ratio, limit: float) -> str:
    """Say in one sentence what the TTFT p99 ratio shows, the interval included."""
    shown = f"{ratio.value:.2f}x (95 % interval {ratio.low:.2f} to {ratio.high:.2f})"
    opening = f"With offline work in the free slots, online TTFT p99 was {shown} of online alone"
    if ratio.high <= limit:
        return f"{opening}: within {limit:g}x."
    if ratio.value <= limit:
        return f"{opening}: within {limit:g}x, but the interval reaches beyond it; more requests would tell."
    if ratio.low > limit:
        return f"{opening}: beyond {limit:g}x."
    return f"{opening}: beyond {limit:g}x, but the interval reaches below it; more requests would tell."
