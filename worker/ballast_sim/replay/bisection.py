"""Searches for the highest load or rate that a system serves."""

from __future__ import annotations

from collections.abc import Callable


def highest(works: Callable[[float], bool], most: float, precision: float) -> tuple[float, float]:
    """Return the highest value found that works, and the lowest that does not, at most `precision` apart.

    The first is 0 if none works. The second is `most` if all do.
    """
    low, high = 0.0, most
    while high - low > precision:
        middle = (low + high) / 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low, high
