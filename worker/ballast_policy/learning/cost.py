"""How long a step takes, from few coefficients, fitted to an engine's own step times; and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, isfinite, sqrt

import numpy as np
from numpy.typing import NDArray

from ballast_policy.learning.least_squares import non_negative_least_squares


def attended(num_computed: int, num_tokens: int) -> float:
    """Give `n * context` of one prefill chunk: its tokens times the mean context that each of them attends to."""
    return num_tokens * (num_computed + (num_tokens + 1) / 2)


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes, as far as its time depends on it."""

    num_prefill: int = 0
    """Tokens of all prefill chunks."""
    prefill_context: float = 0.0
    """Sum of `attended` over the chunks."""
    num_decode: int = 0
    """Requests with one token each."""
    decode_context: int = 0
    """Sum of their contexts, the new token counted."""


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

    def predict(self, work: StepWork) -> float:
        """Give the seconds a step takes; 0 for an empty one."""
        if not work.num_prefill and not work.num_decode:
            return 0.0
        return (
            self.k0
            + self.k1 * work.num_prefill
            + self.k2 * work.prefill_context
            + self.k3 * work.num_decode
            + self.k4 * work.decode_context
        )

    def prefill(self, num_computed: int, num_tokens: int) -> float:
        """Give the seconds a prefill chunk adds to a step."""
        return self.k1 * num_tokens + self.k2 * attended(num_computed, num_tokens)

    def decode(self, context: int) -> float:
        """Give the seconds a decode adds to a step."""
        return self.k3 + self.k4 * context

    def largest_chunk(self, seconds: float, num_computed: int, limit: int) -> int:
        """Give the largest prefill chunk, `limit` at most, that adds at most `seconds`; `prefill` inverted.

        The positive root of `k2/2 x^2 + (k1 + k2 (c + 1/2)) x - seconds = 0`, in the form that needs no k2.
        """
        if limit <= 0 or seconds < 0:
            return 0
        if self.prefill(num_computed, limit) <= seconds:
            return limit
        linear = self.k1 + self.k2 * (num_computed + 0.5)
        root = sqrt(linear * linear + 2 * self.k2 * seconds)
        chunk = min(limit, int(2 * seconds / (linear + root)))
        if chunk > 0 and self.prefill(num_computed, chunk) > seconds:  # the root may round up
            chunk -= 1
        return chunk

    def batch_ceiling(
        self, *, slots: int, mean_context: float, tpot: float = inf, ttft: float = inf, prompt: int = 0
    ) -> int:
        """Give the largest decode batch, 1 to `slots`, that the SLO allows by this model.

        A step of n decodes takes at most `tpot`, and a newcomer that just missed one and then prefills its prompt
        beside n - 1 decodes has its first token within `ttft`. While the model is untrusted: `slots`.
        """
        if not self.is_trusted:
            return slots
        per_decode = self.k3 + self.k4 * mean_context
        by_tpot = _most(tpot - self.k0, per_decode, slots)
        by_ttft = _most(ttft - 2 * self.k0 - self.prefill(0, prompt) + per_decode, 2 * per_decode, slots)
        return max(1, min(by_tpot, by_ttft))


class Fit:
    """Recent step times, and the model that explains them best.

    Steps with prefill and steps of decodes alone have a ring each, so that an hour of one kind does not displace the
    other. Errors are relative to the time of the step. The model is trusted while it predicts half of the steps within
    `trusted_error`, once steps of different sizes tell its coefficients apart: steps of decodes alone beside others, or
    steps with decodes whose prefill differs by half. An untrusted model is replaced by static shares in the policy.
    """

    def __init__(self, *, capacity: int = 256, least: int = 16, trusted_error: float = 0.25) -> None:
        self._least = least
        self._trusted_error = trusted_error
        self._rings = (_Ring(capacity), _Ring(capacity))
        self.model = CostModel()
        self.error = inf
        """Median relative error of `model` over the steps at hand."""

    def add(self, work: StepWork, seconds: float) -> None:
        """Take in one step's measured time; an empty step says nothing."""
        if seconds > 0 and (work.num_prefill or work.num_decode):
            self._rings[work.num_prefill == 0].add(work, seconds)

    @property
    def num_steps(self) -> int:
        """Steps taken in so far, those already overwritten counted."""
        return sum(ring.num_added for ring in self._rings)

    def refit(self) -> CostModel:
        """Fit the model anew and return it; some hundred microseconds, for every 32nd step or so.

        Fits twice: the second time without steps that took twice what the first fit expects (another process had
        the core), as long as they are few.
        """
        features = np.concatenate([ring.features[: len(ring)] for ring in self._rings])
        seconds = np.concatenate([ring.seconds[: len(ring)] for ring in self._rings])
        if len(seconds) < self._least:
            return self.model
        weighted = features / seconds[:, None]
        coefficients = non_negative_least_squares(weighted)
        usual = weighted @ coefficients > 0.5
        if 0.8 * len(usual) <= np.count_nonzero(usual) < len(usual):
            coefficients = non_negative_least_squares(weighted[usual])
        self.error = float(np.median(np.abs(weighted @ coefficients - 1.0)))
        seen = all(len(ring) >= self._least for ring in self._rings) or self._is_varied(features)
        k0, k1, k2, k3, k4 = (float(k) for k in coefficients)
        self.model = CostModel(k0, k1, k2, k3, k4, is_trusted=seen and self.error <= self._trusted_error)
        return self.model

    def _is_varied(self, features: NDArray[np.float64]) -> bool:
        """Return whether enough steps with decodes have less than half of the largest prefill."""
        prefill, decodes = features[:, 1], features[:, 3]
        small = (decodes > 0) & (prefill < 0.5 * prefill.max())
        return bool(np.count_nonzero(small) >= self._least <= np.count_nonzero(prefill))


class _Ring:
    """The last steps of one kind: features and seconds."""

    def __init__(self, capacity: int) -> None:
        self.features: NDArray[np.float64] = np.zeros((capacity, 5))
        self.seconds: NDArray[np.float64] = np.zeros(capacity)
        self.num_added = 0

    def __len__(self) -> int:
        return min(self.num_added, len(self.seconds))

    def add(self, work: StepWork, seconds: float) -> None:
        index = self.num_added % len(self.seconds)
        self.features[index] = (1.0, work.num_prefill, work.prefill_context, work.num_decode, work.decode_context)
        self.seconds[index] = seconds
        self.num_added += 1


def _most(seconds: float, each: float, limit: int) -> int:
    """Give how many of `each` fit into `seconds`, `limit` at most."""
    if seconds < 0:
        return 0
    if not isfinite(seconds) or each * limit <= seconds:
        return limit
    return int(seconds / each * (1 + 1e-12))
