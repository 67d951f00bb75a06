"""The cost model: the time of a step from a few coefficients, fitted to the step times of an engine."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from itertools import product
from math import inf, sqrt

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_CHOICES = (1.0, 0.7, 0.5, 0.35, 0.25)
"""Independent choices of experts that a token counts as: the tokens of a batch choose alike. The fit takes the one that
predicts best (`benchmarks/moe_steps.py`)."""


def attended(num_computed: int, num_tokens: int) -> float:
    """Return `n * context` of a prefill chunk: its tokens times the mean context that they attend to."""
    return num_tokens * (num_computed + (num_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step, as far as its time depends on it."""

    num_prefill: int = 0
    prefill_context: float = 0.0
    """Sum of `attended` over the chunks."""
    num_decode: int = 0
    decode_context: int = 0
    """Sum of the contexts of decodes, including their new tokens."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """`t = k0 + k1 * num_prefill + k2 * prefill_context + k3 * num_decode + k4 * decode_context + experts`, in seconds.

    The terms are those of `StepWork`. A step of a mixture of experts reads the experts that its `n` tokens touch:
    `experts = k5 * (1 - missed^n)`. A cost `beside` other tokens of the step leaves out the experts that those touch.
    """

    k0: float = 0.0
    k1: float = 0.0
    k2: float = 0.0
    k3: float = 0.0
    k4: float = 0.0
    k5: float = 0.0
    """Seconds for reading all experts; 0 for a dense model."""
    missed: float = 1.0
    """Share of the experts that one token does not touch."""
    is_trusted: bool = False
    """False if it is too rough to keep an SLO."""
    error: float = 0.0
    """Median relative error over the steps of its fit."""

    def predict(self, work: StepWork) -> float:
        """Return the seconds of a step; 0 if it is empty."""
        if not work.num_prefill and not work.num_decode:
            return 0.0
        seconds = self.k0 + self.k1 * work.num_prefill + self.k2 * work.prefill_context
        seconds = seconds + self.k3 * work.num_decode + self.k4 * work.decode_context
        return seconds + self.experts(work.num_prefill + work.num_decode)

    def experts(self, num_tokens: float, beside: int = 0) -> float:
        """Return the seconds that the experts of some tokens add to a step; a negative number removes tokens."""
        return self.k5 * self.missed**beside * (1.0 - self.missed**num_tokens) if self.k5 else 0.0

    def prefill(self, num_computed: int, num_tokens: int, beside: int = 0) -> float:
        """Return the seconds that a prefill chunk adds to a step."""
        linear = self.k1 * num_tokens + self.k2 * attended(num_computed, num_tokens)
        return linear + self.experts(num_tokens, beside) if self.k5 else linear

    def decode(self, context: float, beside: int = 0, num: int = 1) -> float:
        """Return the seconds that `num` decodes add to a step, each with this context."""
        return num * (self.k3 + self.k4 * context) + self.experts(num, beside)

    def largest_chunk(self, seconds: float, num_computed: int, limit: int, beside: int = 0) -> int:
        """Return the largest prefill chunk, `limit` at most, that adds at most `seconds`."""
        if limit <= 0 or self.prefill(num_computed, limit, beside) <= seconds:
            return max(0, limit)
        return bisect_right(range(1, limit), seconds, key=lambda size: self.prefill(num_computed, size, beside))

    def batch_ceiling(
        self, *, slots: int, mean_context: float, tpot: float = inf, ttft: float = inf, prompt: int = 0
    ) -> int:
        """Return the largest batch, 1 to `slots`, that the SLO allows.

        A step of n decodes takes at most `tpot`. A request that arrives as a step starts and prefills in the next one,
        beside n - 1 decodes, has its first token within `ttft`. Without decodes and `tpot`, the batch is n prompts.
        """
        each = self.prefill(0, prompt) if tpot == inf and not mean_context else 0.0

        def of_slo(size: int) -> float:
            step, before = (self.k0 + (n * each or self.decode(mean_context, num=n)) for n in (size, size - 1))
            return max(step / tpot, (step + before + self.prefill(0, prompt, size - 1)) / ttft)

        return max(1, bisect_right(range(1, slots + 1), 1 + 1e-12, key=of_slo))


class Fit:
    """Recent step times, and the model that explains them best.

    Steps with prefill and steps of decodes alone are kept apart, so that no kind displaces the other. The model is
    trusted while its median relative error is at most `_trusted_error`, if the steps differ enough (`_is_varied`).
    Half or twice of `_least` or `_trusted_error` changes the total by 0.1 points at most (sparse-2s).
    """

    def __init__(self, *, capacity: int = 256, expert_share: float = 0.0, is_encoder: bool = False) -> None:
        self._least, self._trusted_error, self._is_encoder = 16, 0.25, is_encoder
        choices = _CHOICES if expert_share else (1.0,)
        self._missed = [(1.0 - expert_share) ** choice for choice in choices]
        self._recent: tuple[deque[tuple[float, ...]], ...] = (deque(maxlen=capacity), deque(maxlen=capacity))
        self.model = CostModel()

    def add(self, work: StepWork, seconds: float) -> None:
        if seconds > 0 and (work.num_prefill or work.num_decode):
            row = (1.0, work.num_prefill, work.prefill_context, work.num_decode, work.decode_context, seconds)
            self._recent[work.num_prefill == 0].append(row)

    def refit(self) -> CostModel:
        """Fit the model and return it. This takes some hundred microseconds for each choice of experts.

        The second fit leaves out steps that took twice or half of their prediction (another process had the core), if
        these are at most a fifth. With 15 % of such steps, the error is 0.3 %, and 2.9 % without (`step_model.py`).
        """
        if sum(map(len, self._recent)) < self._least:
            return self.model
        kinds = [np.array(kind, np.float64) for kind in self._recent if kind]
        least = 0.0 if self._is_encoder else 0.25  # a step that was measured much too short would outweigh all others
        rows = np.concatenate([kind[kind[:, 5] > least * np.quantile(kind[:, 5], 0.05)] for kind in kinds])
        features, seconds = rows[:, :5], rows[:, 5]
        tokens, least_error = features[:, 1] + features[:, 3], inf
        seen = self._is_encoder or self._is_varied(features / seconds[:, None])
        if self._is_encoder:  # in steps of one size, all time counts as that of tokens
            features[:, 0] = tokens.min() < 0.9 * tokens.max()
        for missed in self._missed:
            weighted = np.column_stack((features, 1.0 - missed**tokens)) / seconds[:, None]
            coefficients = non_negative_least_squares(weighted)
            usual = ((predicted := weighted @ coefficients) > 0.5) & (predicted < 2.0)
            if 0.8 * len(usual) <= np.count_nonzero(usual) < len(usual):
                coefficients = non_negative_least_squares(weighted[usual])
            errors = np.abs(weighted @ coefficients - 1.0)
            if errors.mean() < least_error:
                least_error, error = errors.mean(), float(np.median(errors))
                k0, k1, k2, k3, k4, k5 = (float(k) for k in coefficients)
                is_trusted = seen and error <= self._trusted_error
                self.model = CostModel(k0, k1, k2, k3, k4, k5, missed, is_trusted=is_trusted, error=error)
        return self.model

    def _is_varied(self, weighted: Floats) -> bool:
        """Return whether enough steps prefill, and `k0` is known.

        It is known from enough steps of decodes alone, or if relative errors of `_trusted_error` leave it uncertain by
        at most half a step. A tenth is too strict (sparse-2s-arxiv).
        """
        unit = weighted / np.maximum(np.linalg.norm(weighted, axis=0), 1e-30)
        variance = np.linalg.inv(unit.T @ unit + 1e-9 * np.eye(unit.shape[1]))[0, 0] / len(unit)
        is_known = len(self._recent[1]) >= self._least or self._trusted_error * sqrt(variance) <= 0.5
        return bool(is_known and np.count_nonzero(unit[:, 1]) >= self._least)


def non_negative_least_squares(rows: Floats) -> Floats:
    """Return the x >= 0 that brings `rows @ x` closest to 1.

    It solves each of the 64 subsets of six columns without bounds, and takes the best solution without a negative
    number; of equal ones that with the fewest columns. Features differ by six orders of magnitude, so it scales them.
    """
    scale = np.linalg.norm(rows, axis=0)
    scale[scale == 0] = 1.0
    scaled = rows / scale
    gram, target, size = scaled.T @ scaled, scaled.sum(axis=0), rows.shape[1]
    used = np.array(sorted(product((True, False), repeat=size), key=sum))
    # Columns that always change together make a part singular: the ridge shares the time among them.
    ridge = 1e-10 * (used @ gram.diagonal())
    diagonal = np.where(used & (gram.diagonal() > 0), ridge[:, None], 1.0)
    parts = np.where(used[:, :, None] & used[:, None, :], gram, 0.0) + diagonal[:, :, None] * np.eye(size)
    solutions = np.linalg.solve(parts, (used * target)[:, :, None])[:, :, 0]
    gains = np.where((solutions >= 0).all(axis=1), solutions @ target, -inf)
    best = solutions[np.argmax(gains >= gains.max() - 1e-9 * len(rows))]
    return np.asarray(best / scale, dtype=np.float64)
