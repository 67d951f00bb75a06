"""Latencies, outcomes and SLOs of requests that ended. Each thread that ends requests has its recorder."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil

from ballast_engine.request import FinishReason
from ballast_policy.request import RequestClass
from ballast_queue.status import SloStatus
from ballast_worker.histogram import Histogram

WINDOW_SECONDS = 60.0
"""The window of the percentiles in the worker's status."""


class RequestOutcome(StrEnum):
    """How a request ended; the label of `ballast_requests_total`."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    """The client went away, the job was cancelled, or the lease was lost."""
    GIVEN_BACK = "given_back"
    FAILED = "failed"
    INVALID = "invalid"
    """Refused with a 4xx status. Sending the request again does not help."""
    QUEUE_FULL = "queue_full"
    DRAINING = "draining"


@dataclass(slots=True)
class RequestTiming:
    """Timestamps and SLOs of one request, in seconds on the monotonic clock."""

    request_class: RequestClass
    arrival: float
    ttft_slo: float | None = None
    """The TTFT SLO; None without one."""
    tpot_slo: float | None = None
    first_at: float | None = None
    """When the first token was generated."""
    is_ttft_judged: bool = False
    """Whether its TTFT is in the counts of the SLO."""


class Recorder:
    """Counters of requests of both classes. One thread writes, any thread may read."""

    def __init__(self) -> None:
        self.ttft = {c: Histogram() for c in RequestClass}
        self.tpot = {c: Histogram() for c in RequestClass}
        self.latency = {c: Histogram() for c in RequestClass}
        self.prompt_tokens = dict.fromkeys(RequestClass, 0)
        self.outcomes = {(c, o): 0 for c in RequestClass for o in RequestOutcome}
        self.slo = {(c, slo, met): 0 for c in RequestClass for slo in ("ttft", "tpot") for met in (True, False)}
        self.recent: deque[tuple[float, float, float | None]] = deque(maxlen=8192)
        """End, TTFT and TPOT of online requests, for the percentiles."""
        self.judged: deque[tuple[float, str, bool]] = deque(maxlen=16384)
        """End, `ttft` or `tpot`, and whether the SLO was met, of online requests, for the shares."""

    def refused(self, request_class: RequestClass, outcome: RequestOutcome) -> None:
        """Count a request that never reached the engine."""
        self.outcomes[request_class, outcome] += 1

    def ended(self, timing: RequestTiming, reason: FinishReason, num_prompt: int, num_output: int, at: float) -> None:
        """Count a request that left the engine at `at`."""
        request_class = timing.request_class
        self.outcomes[request_class, RequestOutcome(reason)] += 1
        self.prompt_tokens[request_class] += num_prompt
        if timing.first_at is None:
            self.judge_ttft((timing,), at)  # the client may have given up too late
            return
        ttft = timing.first_at - timing.arrival
        self.ttft[request_class].observe(ttft)
        self.judge_ttft((timing,), at)
        if reason not in {FinishReason.STOP, FinishReason.LENGTH}:
            return
        self.latency[request_class].observe(at - timing.arrival)
        tpot = (at - timing.first_at) / (num_output - 1) if num_output > 1 else None
        if tpot is not None:
            self.tpot[request_class].observe(tpot)
            self._judge(request_class, "tpot", tpot, timing.tpot_slo, at=at)
        if request_class is RequestClass.ONLINE:
            self.recent.append((at, ttft, tpot))

    def judge_ttft(self, timings: Iterable[RequestTiming], now: float) -> None:
        """Count each TTFT that is known, once: the first token came, or the SLO passed without it.

        In an overload a late request may wait for as long as the overload lasts. Its miss counts while it waits.
        """
        for timing in timings:
            if timing.ttft_slo is None or timing.is_ttft_judged:
                continue
            waited = (now if timing.first_at is None else timing.first_at) - timing.arrival
            if timing.first_at is not None or waited > timing.ttft_slo:
                timing.is_ttft_judged = True
                self._judge(timing.request_class, "ttft", waited, timing.ttft_slo, at=now)

    def num_ended(self) -> dict[RequestClass, int]:
        """Return the requests of each class that left the engine so far."""
        inside = (RequestOutcome.STOP, RequestOutcome.LENGTH, RequestOutcome.ABORTED, RequestOutcome.FAILED)
        return {c: sum(self.outcomes[c, outcome] for outcome in inside) for c in RequestClass}

    def p99(self, now: float) -> tuple[float | None, float | None]:
        """Return the 99th percentile of TTFT and TPOT of online requests in the window; None without requests."""
        rows = [row for row in list(self.recent) if row[0] >= now - WINDOW_SECONDS]
        return _p99([row[1] for row in rows]), _p99([row[2] for row in rows if row[2] is not None])

    def slo_status(self, now: float) -> SloStatus:
        """Return how many online requests were judged by the SLO in the last minute, and how many met it."""
        counts = Counter((slo, met) for at, slo, met in list(self.judged) if at >= now - WINDOW_SECONDS)
        ttft, tpot = ((counts[slo, True] + counts[slo, False], counts[slo, True]) for slo in ("ttft", "tpot"))
        return SloStatus(ttft_judged=ttft[0], ttft_met=ttft[1], tpot_judged=tpot[0], tpot_met=tpot[1])

    def _judge(self, request_class: RequestClass, slo: str, value: float, limit: float | None, *, at: float) -> None:
        if limit is None:
            return
        self.slo[request_class, slo, value <= limit] += 1
        if request_class is RequestClass.ONLINE:
            self.judged.append((at, slo, value <= limit))


def _p99(values: list[float]) -> float | None:
    return sorted(values)[ceil(0.99 * len(values)) - 1] if values else None
