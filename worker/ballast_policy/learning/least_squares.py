"""Least squares without negative coefficients: a step never gets faster by doing more."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def non_negative_least_squares(rows: Floats) -> Floats:
    """Return the x >= 0 that brings `rows @ x` closest to 1, by the active-set method of Lawson and Hanson.

    Columns are scaled to unit length first: features differ by six orders of magnitude.
    """
    scale = np.sqrt(np.einsum("ij,ij->j", rows, rows))
    scale[scale == 0] = 1.0
    scaled = rows / scale
    gram, target = scaled.T @ scaled, scaled.sum(axis=0)
    size = rows.shape[1]
    x = np.zeros(size)
    active: list[int] = []
    for _ in range(3 * size):
        gradient = target - gram @ x
        entering = [i for i in range(size) if i not in active and gradient[i] > 1e-9 * len(rows)]
        if not entering:
            break
        active.append(max(entering, key=lambda i: float(gradient[i])))
        x = _settle(gram, target, x, active)
    return np.asarray(x / scale, dtype=np.float64)


def _settle(gram: Floats, target: Floats, x: Floats, active: list[int]) -> Floats:
    """Solve for the active variables, and deactivate those that would become negative."""
    while active:
        solution = np.zeros_like(x)
        solution[active] = _solve(gram, target, active)
        negative = [i for i in active if solution[i] <= 0]
        if not negative:
            return solution
        step = min(x[i] / (x[i] - solution[i]) for i in negative if x[i] > solution[i])
        x = x + step * (solution - x)
        active[:] = [i for i in active if x[i] > 1e-15]
    return np.zeros_like(x)


def _solve(gram: Floats, target: Floats, active: list[int]) -> Floats:
    part = gram[np.ix_(active, active)]
    # Features that always change together make it singular: the ridge shares the time among them.
    ridge = np.eye(len(active)) * 1e-10 * np.trace(part)
    return np.asarray(np.linalg.solve(part + ridge, target[active]), dtype=np.float64)
