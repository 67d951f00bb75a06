"""Percentiles, attainment, and the intervals around their differences. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

QUANTILES = (50, 95, 99)


def percentiles(values: Sequence[float] | NDArray[np.float64]) -> dict[str, float | None]:
    """Return p50, p95 and p99 (linear interpolation). Each is None if there is no value."""
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
        """Return the ratio for JSON."""
        return {"ratio": round(self.value, 4), "low": round(self.low, 4), "high": round(self.high, 4)}


def ratio_of_percentiles(
    base: Sequence[Sequence[float]], other: Sequence[Sequence[float]], *, q: float, seed: int = 0, rounds: int = 2000
) -> Ratio:
    """Divide percentile `q` of `other` by that of `base`, with an interval that respects bursts.

    Both sides are cut into the same short segments of the trace (`base[i]` and `other[i]` replay the same arrivals).
    The bootstrap draws whole segments with replacement, the same ones on both sides. Requests of one burst wait for
    each other, so they are not independent draws.

    Raises:
        ValueError: the sides have different numbers of segments, or a side has no value.
    """
    _require_same_segments(base, other)
    lower, upper = PooledValues.of(base), PooledValues.of(other)
    if not lower.values.size or not upper.values.size:
        raise ValueError("a side has no value: nothing to compare")
    point = float(np.percentile(upper.values, q) / np.percentile(lower.values, q))
    ratios = []
    for drawn in _draws(len(base), seed=seed, rounds=rounds):
        below, above = lower.percentile(drawn, q), upper.percentile(drawn, q)
        if below and above is not None:
            ratios.append(above / below)
    low, high = np.percentile(ratios, (2.5, 97.5)) if ratios else (float("nan"), float("nan"))
    return Ratio(point, float(low), float(high))


@dataclass(frozen=True, slots=True)
class Attainment:
    """The share of requests that meet an SLO on both sides, and the points that online loses with offline work.

    Shares are in percent. `lost` is `alone - mixed`, so it is negative if more requests meet the SLO with offline
    work. `low` and `high` are the 95 % interval of `lost`.
    """

    alone: float
    mixed: float
    lost: float
    low: float
    high: float

    def as_dict(self) -> dict[str, float]:
        """Return the points for JSON. Each side has its own share there."""
        return {"points": round(self.lost, 3), "low": round(self.low, 3), "high": round(self.high, 3)}


def attainment(
    alone: Sequence[Sequence[bool]], mixed: Sequence[Sequence[bool]], *, seed: int = 0, rounds: int = 2000
) -> Attainment:
    """Compare how many requests meet an SLO, with the same draws of segments as `ratio_of_percentiles`.

    A run of n requests cannot exclude a loss of 3/n: this many of its requests may miss the SLO at the next run even if
    none did (the rule of three). So the interval reaches at least 3/n to both sides. The bootstrap alone has no width
    if every request meets the SLO.

    Raises:
        ValueError: the sides have different numbers of segments, or a side has no request.
    """
    _require_same_segments(alone, mixed)
    numbers = [np.array([len(segment) for segment in side], dtype=np.float64) for side in (alone, mixed)]
    met = [np.array([sum(segment) for segment in side], dtype=np.float64) for side in (alone, mixed)]
    if not all(number.sum() for number in numbers):
        raise ValueError("a side has no request: nothing to compare")
    shares = [100 * float(m.sum() / n.sum()) for m, n in zip(met, numbers, strict=True)]
    lost = shares[0] - shares[1]
    drawn = np.array(list(_draws(len(alone), seed=seed, rounds=rounds)), dtype=np.float64)
    totals = [drawn @ number for number in numbers]
    usable = (totals[0] > 0) & (totals[1] > 0)
    found = [100 * (drawn @ m)[usable] / total[usable] for m, total in zip(met, totals, strict=True)]
    low, high = np.percentile(found[0] - found[1], (2.5, 97.5))
    least = 300 / min(float(number.sum()) for number in numbers)
    interval = (min(float(low), lost - least), max(float(high), lost + least))
    return Attainment(shares[0], shares[1], lost, *interval)


def is_met(value: float | None, slo: float) -> bool:
    """Return whether a request meets an SLO. A request without the value does not."""
    return value is not None and value <= slo


def promise(ttft: Attainment, tpot: Attainment, *, most_lost: float) -> str:
    """Return whether the promise held: online loses at most `most_lost` points of attainment with offline work."""
    both = (ttft, tpot)
    if any(one.low > most_lost for one in both):
        said = "The promise did not hold"
    elif all(one.high <= most_lost for one in both):
        said = "The promise held"
    else:
        said = "This run is too short or too noisy to decide whether the promise held"
    return f"{said}: offline work costs online at most {most_lost:g} point of SLO attainment."


def verdict(ttft: Attainment, tpot: Attainment, *, most_lost: float) -> str:
    """Return whether the promise held, and by how much."""
    return f"{promise(ttft, tpot, most_lost=most_lost)} {_change('TTFT', ttft)} {_change('TPOT', tpot)}"


def _change(name: str, one: Attainment) -> str:
    said = f"{one.lost:.1f} points lost" if one.lost >= 0 else f"{-one.lost:.1f} points gained"
    return (
        f"{name}: {one.alone:.1f} % of the online requests met the SLO alone, {one.mixed:.1f} % with the offline job "
        f"({said}, 95 % interval of the loss {one.low:z.1f} to {one.high:z.1f})."
    )


def _require_same_segments(base: Sequence[object], other: Sequence[object]) -> None:
    if len(base) != len(other):
        raise ValueError(f"found {len(base)} and {len(other)} segments, expected the same on both sides")


def _draws(segments: int, *, seed: int, rounds: int) -> Iterator[NDArray[np.intp]]:
    """Yield how often each segment was drawn, for each round of the bootstrap."""
    random = np.random.default_rng(seed)
    for _ in range(rounds):
        yield np.bincount(random.integers(0, segments, segments), minlength=segments)


@dataclass(frozen=True, slots=True)
class PooledValues:
    """All values of a side in order, each with its segment: a drawn multiset is then a vector of weights."""

    values: NDArray[np.float64]
    segment: NDArray[np.intp]

    @classmethod
    def of(cls, segments: Sequence[Sequence[float]]) -> PooledValues:
        values = np.asarray([value for segment in segments for value in segment], dtype=np.float64)
        index = np.repeat(np.arange(len(segments)), [len(segment) for segment in segments])
        order = np.argsort(values, kind="stable")
        return cls(values[order], index[order])

    def percentile(self, drawn: NDArray[np.intp], q: float) -> float | None:
        """Return percentile `q` of the values, each repeated as often as its segment was drawn."""
        upto = np.cumsum(drawn[self.segment])
        total = int(upto[-1])
        if not total:
            return None
        position = (total - 1) * q / 100
        below = int(position)
        first = self.values[np.searchsorted(upto, below, side="right")]
        second = self.values[np.searchsorted(upto, min(below + 1, total - 1), side="right")]
        return float(first + (second - first) * (position - below))
