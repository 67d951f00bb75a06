"""Expectations from recent requests: the lengths of answers, and the rate and the bursts of online."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import exp, inf, sqrt
from statistics import pvariance

from ballast_policy.request import ONLINE, Request, RequestClass

NUM_LENGTHS = 256
"""Answers of a class that are remembered. Bounds memory: half or twice changes no total."""
REFRESH = 16
"""Answers between two updates of their lengths. Bounds the cost: half or twice changes no total."""
BURST_SECONDS = 1.0
"""Online prompts that arrive within this time are a burst. Half costs 3.3 points of total (sparse-0.5s)."""
NUM_BURSTS = 100
"""Bursts that are remembered. Half or twice changes nothing."""
TYPICAL_DRIFT = 0.1
"""Weight of a new prompt in the mean. Half gains 0.7 points of TTFT (bursts-40-32), twice costs 0.4 (azure-40)."""
RATE_SECONDS = 5.0
"""Time in which the weight of an arrival falls to 37 %. Half or twice costs 0.5 points (bursts-40-32)."""
SILENT_GAPS = 10
"""Mean gaps without an online request after which none is expected: fewer than 1 in 20,000 random gaps are longer."""
UNKNOWN_SHARE = 0.25
"""Share of its longest answer that a request is expected to generate while lengths are unknown. Half of it gains 0.6 %
of tokens, twice of it costs 2.2 % (`benchmarks/kv_admission.py --kv-tokens 110000 --load 40`)."""

_ENDING = 0.02
"""Share of the answers that may end before they catch up. Half costs 0.9 points of TTFT (bursts-40-32), twice
0.7 of the total (azure-40)."""

QUANTILES = {RequestClass.ONLINE: 0.5, RequestClass.OFFLINE: 0.3}
"""Quantile of the recent answers that an answer is expected to reach. A preemption of offline costs less than an empty
slot (`benchmarks/kv_admission.py`)."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Recent lengths of answers, and recent demand of online."""

    outputs: Mapping[RequestClass, tuple[int, ...]] = field(default_factory=dict)
    """Lengths of answers by class, sorted; a class is absent while they are unknown."""
    unknown_share: float = 0.0
    """Share of `max_output` that a request is expected to generate while the lengths of its class are unknown."""
    online_until: float = -inf
    """Time until which the next online request is expected; -inf if no request has arrived."""
    online_rate: float = 0.0
    """Online requests per second."""
    online_spread: float = 0.0
    """Standard deviation of the online prompt tokens of one second; of `t` seconds it is `sqrt(t)` times that."""
    online_answer: float = 0.0
    """Mean tokens of an online answer; 0 while unknown."""
    online_short: int = 8
    """Tokens that all but 1 % of the online answers reach. Half of the default: 1.1 points of TTFT (bursts-40-32)."""

    def remaining(self, request: Request, unknown: int) -> int:
        """Return the tokens that a request will probably still generate; at least `unknown` if lengths are unknown.

        A request with more output than every finished answer counts as new.
        """
        most = request.max_output - request.num_output
        lengths = self.outputs.get(request.request_class)
        if not lengths:
            return min(max(unknown, int(self.unknown_share * most)), most)
        quantile, num_output = QUANTILES[request.request_class], request.num_output
        shorter = bisect_right(lengths, num_output)
        longer = len(lengths) - shorter
        if not longer:
            return min(most, lengths[int(quantile * shorter)])
        return min(most, lengths[shorter + int(quantile * longer)] - num_output)

    def surely_reached(self, request: Request) -> int:
        """Return a length that 98 % of the online answers reach that got this far, at most its `max_output`."""
        lengths = self.outputs.get(ONLINE, ())
        shorter = bisect_right(lengths, request.num_output)
        longer = len(lengths) - shorter
        return min(request.max_output, lengths[shorter + int(_ENDING * longer)]) if longer else request.num_output


UNKNOWN = Expectation()


class ExpectationLearner:
    """Learns the expectation of one engine."""

    def __init__(self) -> None:
        self.expectation = Expectation(unknown_share=UNKNOWN_SHARE)
        self._lengths: dict[RequestClass, deque[int]] = {c: deque(maxlen=NUM_LENGTHS) for c in RequestClass}
        self._bursts: deque[int] = deque(maxlen=NUM_BURSTS)
        self._num_finished, self._burst, self._since = 0, 0, 0.0
        self.typical_prompt = 0.0
        """Moving average of the tokens that an online prompt has to compute."""
        self._count = self._seconds = self._last = 0.0
        """Online requests and their time, which decay as long as bursts are remembered, and the last arrival."""
        self._recent = 0.0  # online requests, which decay in `RATE_SECONDS`

    def arrived(self, request: Request, now: float) -> None:
        if request.request_class is not ONLINE:
            return
        self._update_rate(now)
        if now - self._since > BURST_SECONDS:
            self._close(now)
        self._burst += request.num_tokens

    def admitted(self, request: Request, num_new: int) -> None:
        """Learn from a request that got its first slot, with `num_new` tokens to compute."""
        if request.request_class is ONLINE:
            self.typical_prompt += (num_new - self.typical_prompt) * (TYPICAL_DRIFT if self.typical_prompt else 1.0)

    def _update_rate(self, now: float) -> None:
        gap = now - self._last if self._count else 0.0
        keep, self._recent = exp(-gap / NUM_BURSTS / BURST_SECONDS), exp(-gap / RATE_SECONDS) * self._recent + 1
        self._count, self._seconds, self._last = keep * self._count + 1, keep * self._seconds + gap, now
        until = now + max(BURST_SECONDS, SILENT_GAPS * max(BURST_SECONDS, self._seconds) / self._count)
        self.expectation = replace(self.expectation, online_until=until, online_rate=self._recent / RATE_SECONDS)

    def finished(self, request: Request) -> None:
        self._lengths[request.request_class].append(request.num_output)
        self._num_finished += 1
        if self._num_finished % REFRESH == 0:
            self._publish()

    def _close(self, now: float) -> None:
        """End a burst. Seconds without arrivals are bursts without tokens."""
        quiet = min(NUM_BURSTS, int((now - self._since) / BURST_SECONDS) - 1) if self._bursts else 0
        self._bursts.append(self._burst)
        self._bursts.extend([0] * quiet)
        self._burst, self._since = 0, now
        variance = pvariance(self._bursts)
        changes = [(then - now) ** 2 for then, now in pairwise(self._bursts)]
        of_changes = sum(changes) / max(1, 2 * len(changes))  # von Neumann: a change of the mean does not raise it
        spread = sqrt((of_changes if of_changes < variance / 2 else variance) / BURST_SECONDS)
        self.expectation = replace(self.expectation, online_spread=spread)
        self._publish()

    def _publish(self) -> None:
        outputs = {c: tuple(sorted(lengths)) for c, lengths in self._lengths.items() if len(lengths) >= REFRESH}
        answers = outputs.get(ONLINE, ())
        self.expectation = replace(
            self.expectation,
            outputs=outputs,
            online_answer=sum(answers) / len(answers) if answers else 0.0,
            online_short=answers[len(answers) // 100] if answers else UNKNOWN.online_short,
        )
