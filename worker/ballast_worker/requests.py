"""Latencies, outcomes and SLOs of requests that ended. Each thread that ends requests has its recorder."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, floor

from ballast_api.sections import Slo, SloName
from ballast_engine.request import FinishReason
from ballast_policy.request import RequestClass
from ballast_queue.status import SloStatus
from ballast_worker.errors import NO_OFFLINE, Refused
from ballast_worker.histogram import Histogram

SLOS = ("ttft", "tpot", "latency")
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
    """Also an offline request while `offline.maxPercent` is 0."""
    DRAINING = "draining"


def outcome_of_refusal(refused: Refused) -> RequestOutcome:
    """Return how a request ended that Ballast refused."""
    if refused.status == 429 or refused.code == NO_OFFLINE:
        return RequestOutcome.QUEUE_FULL
    if refused.status == 503:
        return RequestOutcome.DRAINING
    return RequestOutcome.FAILED if refused.status >= 500 else RequestOutcome.INVALID


@dataclass(slots=True)
class RequestTiming:
    """Timestamps and SLOs of one request, in seconds on the monotonic clock."""

    request_class: RequestClass
    arrival: float
    ttft_slo: float | None = None
    """The TTFT SLO; None without one."""
    tpot_slo: float | None = None
    latency_slo: float | None = None
    """The SLO of the whole request, for a model that returns vectors or scores. Then it has no other SLO."""
    is_whole: bool = False
    """Whether the model returns vectors or scores. Then a TTFT is that of the whole answer, too."""
    first_at: float | None = None
    """When the first token was generated."""
    answered_at: float | None = None
    """When the whole answer was there."""
    is_judged: bool = False
    """Whether its TTFT or its latency is in the counts of the SLO."""

    @property
    def judged(self) -> tuple[str, float | None, float | None]:
        """Return what `Recorder.judge` counts: its name, its SLO, and when it was reached."""
        if self.latency_slo is not None:
            return "latency", self.latency_slo, self.answered_at
        return "ttft", self.ttft_slo, self.answered_at if self.is_whole else self.first_at


def promised(slo: Slo | None, name: SloName, own: float | None) -> float | None:
    """Return the limit in seconds that a request is judged by: the looser of its own and the configured one.

    A client that asks for more than the deployment promises causes no miss. `slo` is None if nothing is promised.
    """
    configured = None if slo is None else slo.seconds(name)
    return max((limit for limit in (own, configured) if limit is not None), default=None)


class Recorder:
    """Counters of requests of both classes. One thread writes, any thread may read."""

    def __init__(self) -> None:
        self.ttft = {c: Histogram() for c in RequestClass}
        self.tpot = {c: Histogram() for c in RequestClass}
        self.latency = {c: Histogram() for c in RequestClass}
        self.prompt_tokens = dict.fromkeys(RequestClass, 0)
        self.outcomes = {(c, o): 0 for c in RequestClass for o in RequestOutcome}
        self.slo = {(c, slo, met): 0 for c in RequestClass for slo in SLOS for met in (True, False)}
        self.recent: deque[tuple[float, float, float | None, float]] = deque(maxlen=8192)
        """End, TTFT, TPOT and latency of online requests, for the percentiles."""
        self._judged: deque[tuple[float, dict[tuple[str, bool], int]]] = deque(maxlen=int(WINDOW_SECONDS) + 1)
        """Second, and the online requests judged in it by SLO and whether they met it, for the shares."""

    def refused(self, request_class: RequestClass, outcome: RequestOutcome) -> None:
        """Count a request that never reached the engine."""
        self.outcomes[request_class, outcome] += 1

    def ended(
        self,
        timing: RequestTiming,
        reason: FinishReason,
        num_prompt: int,
        num_output: int,
        at: float,
        *,
        slowest: tuple[float, int] | None = None,
    ) -> None:
        """Count a request that left the engine at `at`.

        `slowest`: if it may have several answers, the seconds from first to last token and the tokens of the answer
        with the largest TPOT.
        """
        request_class = timing.request_class
        self.outcomes[request_class, RequestOutcome(reason)] += 1
        self.prompt_tokens[request_class] += num_prompt
        is_answered = timing.first_at is not None and reason in {FinishReason.STOP, FinishReason.LENGTH}
        if is_answered:
            timing.answered_at = at
        self.judge((timing,), at)  # without an answer, too: the client may have given up too late
        if timing.first_at is None:
            return
        ttft = (at if timing.is_whole else timing.first_at) - timing.arrival
        if timing.latency_slo is None and (is_answered or not timing.is_whole):
            self.ttft[request_class].observe(ttft)
        if not is_answered:
            return
        self.latency[request_class].observe(at - timing.arrival)
        seconds, num_tokens = slowest or (at - timing.first_at, num_output)
        tpot = seconds / (num_tokens - 1) if num_tokens > 1 else None
        if tpot is not None:
            self.tpot[request_class].observe(tpot)
            self._judge(request_class, "tpot", tpot, timing.tpot_slo, at=at)
        if request_class is RequestClass.ONLINE:
            self.recent.append((at, ttft, tpot, at - timing.arrival))

    def judge(self, timings: Iterable[RequestTiming], now: float) -> None:
        """Count each TTFT or latency that is known, once: it was reached, or its SLO passed without it.

        In an overload a late request may wait for as long as the overload lasts. Its miss counts while it waits.
        """
        for timing in timings:
            name, slo, reached = timing.judged
            if slo is None or timing.is_judged:
                continue
            waited = (now if reached is None else reached) - timing.arrival
            if reached is not None or waited > slo:
                timing.is_judged = True
                self._judge(timing.request_class, name, waited, slo, at=now)

    def p99(self, now: float) -> tuple[float | None, float | None, float | None]:
        """Return the 99th percentile of TTFT, TPOT and latency of online requests in the window.

        Each is None without requests. At a high rate, the last 8,192 requests count.
        """
        rows = [row for row in list(self.recent) if row[0] >= now - WINDOW_SECONDS]
        tpot = [row[2] for row in rows if row[2] is not None]
        return _p99([row[1] for row in rows]), _p99(tpot), _p99([row[3] for row in rows])

    def slo_status(self, now: float) -> SloStatus:
        """Return how many online requests were judged by the SLO in the last minute, and how many met it."""
        found = [counts for second, counts in list(self._judged) if second >= floor(now - WINDOW_SECONDS)]
        met, missed = (
            {slo: sum(each.get((slo, is_met), 0) for each in found) for slo in SLOS} for is_met in (True, False)
        )
        counts = {f"{slo}_met": met[slo] for slo in SLOS} | {f"{slo}_judged": met[slo] + missed[slo] for slo in SLOS}
        return SloStatus(**counts)

    def _judge(self, request_class: RequestClass, slo: str, value: float, limit: float | None, *, at: float) -> None:
        if limit is None:
            return
        is_met = value <= limit
        self.slo[request_class, slo, is_met] += 1
        if request_class is RequestClass.ONLINE:
            # A client may read its answer long after the last token, which is the time of the answer.
            if not self._judged or self._judged[-1][0] < floor(at):
                self._judged.append((floor(at), {}))
            counts = self._judged[-1][1]
            counts[slo, is_met] = counts.get((slo, is_met), 0) + 1


def _p99(values: list[float]) -> float | None:
    """Return the 99th percentile by nearest rank: the least value that 99 % of the values do not exceed."""
    return sorted(values)[ceil(0.99 * len(values)) - 1] if values else None
