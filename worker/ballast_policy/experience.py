"""What an engine has seen, for what it expects: how long answers are, how often and for how much KV online asks."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from math import exp, sqrt

from ballast_policy.admission import Expectation
from ballast_policy.request import ONLINE, Request, RequestClass

NUM_LENGTHS = 256
"""Answers of a class that are remembered."""
REFRESH = 16
"""Answers between two looks at all of them."""
SURGE_SECONDS = 1.0
"""Online prompts that come within it come at once: what offline decodes began by then stays for a moment longer."""
NUM_SURGES = 100
RATE_SECONDS = 60.0
"""What came longer ago counts for less than a third in the rate of online requests."""
SILENT_GAPS = 10
"""Mean gaps between online requests after which silence means that the traffic has stopped: at random arrivals, fewer
than 1 in 20,000 gaps are longer."""
UNKNOWN_SHARE = 0.25
"""Answers are expected to come to this share of the most they may, until some have ended."""
LEAST_GUARD, MOST_GUARD = 0.05, 0.30
KEEP = 0.9
"""Weight of the past in the guard when it falls; it rises at once."""


class Experience:
    """Belongs to one engine. `expectation` is what a snapshot carries."""

    def __init__(self, num_tokens: int) -> None:
        self.expectation = Expectation(unknown_share=UNKNOWN_SHARE)
        self._num_tokens = num_tokens
        """Tokens that the KV holds."""
        self._lengths: dict[RequestClass, deque[int]] = {c: deque(maxlen=NUM_LENGTHS) for c in RequestClass}
        self._num_new = 0
        self._surges: deque[int] = deque(maxlen=NUM_SURGES)
        self._surge = 0
        self._since = 0.0
        self._guard: float | None = None
        self.typical_prompt = 0.0
        """Moving average of the tokens that an online prompt has to compute."""
        self._count = self._seconds = self._last = 0.0
        """Online requests and the time they came in, both fading, and when the last one came."""

    def arrived(self, request: Request, now: float) -> None:
        """A request came in: what online brings within a second is a surge."""
        if request.request_class is not ONLINE:
            return
        self._tick(now)
        if now - self._since > SURGE_SECONDS:
            self._close(now)
        self._surge += request.num_tokens

    def admitted(self, request: Request, num_new: int) -> None:
        """Note that a request got its first slot, with `num_new` tokens to compute."""
        if request.request_class is ONLINE:
            self.typical_prompt += (num_new - self.typical_prompt) * (0.1 if self.typical_prompt else 1.0)

    def _tick(self, now: float) -> None:
        """Count one online request into the rate."""
        keep = exp((self._last - now) / RATE_SECONDS) if self._count else 0.0
        self._count = keep * self._count + 1
        self._seconds = keep * self._seconds + (now - self._last if keep else 0.0)
        self._last = now
        rate = self._count / max(self._seconds, SURGE_SECONDS)
        until = now + max(SURGE_SECONDS, SILENT_GAPS / rate)
        self.expectation = replace(self.expectation, online_rate=rate, online_until=until)

    def finished(self, request: Request) -> None:
        """An answer came to its own end."""
        self._lengths[request.request_class].append(request.num_output)
        self._num_new += 1
        if self._num_new >= REFRESH:
            self._num_new = 0
            self._publish()

    def _close(self, now: float) -> None:
        """End a surge; seconds in which nothing came are surges of nothing."""
        quiet = min(NUM_SURGES, int((now - self._since) / SURGE_SECONDS) - 1) if self._surges else 0
        self._surges.append(self._surge)
        self._surges.extend([0] * quiet)
        self._surge, self._since = 0, now
        ordered = sorted(self._surges)
        mean = sum(ordered) / len(ordered)
        variance = sum((tokens - mean) ** 2 for tokens in ordered) / len(ordered) / SURGE_SECONDS
        self.expectation = replace(self.expectation, online_spread=sqrt(variance))
        share = ordered[int(0.99 * (len(ordered) - 1))] / self._num_tokens
        wanted = min(max(share, LEAST_GUARD), MOST_GUARD)
        self._guard = wanted if self._guard is None else max(wanted, KEEP * self._guard + (1 - KEEP) * wanted)
        self._publish()

    def _publish(self) -> None:
        outputs = {c: tuple(sorted(lengths)) for c, lengths in self._lengths.items() if len(lengths) >= REFRESH}
        answers = outputs.get(ONLINE, ())
        self.expectation = replace(
            self.expectation,
            outputs=outputs,
            guard_share=self._guard,
            online_answer=sum(answers) / len(answers) if answers else 0.0,
            online_short=answers[len(answers) // 100] if answers else 0,
        )
