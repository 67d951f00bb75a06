"""The interference of offline work: how much later online tokens come than they would without it.

Offline work lengthens each step. A clock adds up this time, and the delay of a request is how far the clock moves while
the request is in the engine. Two more clocks add up the work of online requests, of which a shorter request sees less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, replace
from math import exp, inf
from operator import add
from typing import NamedTuple

from ballast_policy.plan import StepParts, StepPlan
from ballast_policy.request import Request, RequestClass

_LATENCIES = 2048
"""Most requests whose latencies are kept. Bounds memory: above 68 answers/s, they are of less than 30 s."""
_LATENCY_SECONDS = 30.0
"""Age of the oldest latencies, and the time of the share's way to the target. Half or twice changes nothing."""
_ADJUST_SECONDS = 4.0
"""Least time between two adjustments. Half costs 1.3 points of TTFT (bursts-40-32), twice 0.7 of total (azure-40)."""
_LEAST = 4
"""Requests with which the feedback begins. Half or twice changes nothing."""
_TARGET = 0.92
"""Share of the cap that the measured inflation may reach; the rest is for its error (`benchmarks/frontier.py`)."""
_DRIFT = 1e-4
"""Least share by which one step moves the median time of online. Half or twice changes nothing."""
_ALONE_STEPS = 32
"""Under a cap, one step with online work in this many lends nothing, for the fit (`vllm_mixed.py --caps`)."""
_LOSS_STEP = 0.05
"""Share of the lending ratio that one lost request takes. Half costs 0.7 points of TTFT (bursts-40-32), twice costs 2.1
of the total (azure-40)."""
_RECOVERY_SECONDS = 18.0
"""Time in which the ratio recovers from 0 to 1 at any rate of requests, if all of them may be lost: 3,600 s at an
objective of 99 %. Twice costs 0.7 points of the total (azure-40); half changes less than chance."""
_SHARE_OF_MISSES = 0.5
"""Share of the misses that the objective allows which offline may cause; online causes others. Half or twice
changes nothing."""
_LEAST_RATIO = 0.1
"""Least lending ratio: losses to the reservation must not end lending. Half or twice changes nothing."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """The limits of offline work that follow from measured latencies. Shares are fractions."""

    share: float | None = None
    """Share by which a step may exceed a typical step of online alone; None without a cap."""
    typical: float = 0.0
    """Under a cap, the median time of a step of online alone, in seconds; 0 while unknown."""
    is_alone: bool = False
    """Whether this step is one in which online computes alone, which the cost model and `typical` learn from."""
    lending_ratio: float = 1.0
    """Part of the remaining budget beside prefill, and of the risk, that offline may use."""


UNCHECKED = Allowance()
_Clocks = tuple[float, ...]  # the time, the delay by offline, the decodes of online, and its prefill
_BEGIN: _Clocks = (0.0, 0.0, 0.0, 0.0)


class _Latency(NamedTuple):
    measured: float
    alone: float


class Interference:
    """The clock of delay, and the allowance that keeps latencies within the cap and losses within the objective."""

    def __init__(self) -> None:
        self.cap: float | None = None
        self.may_lose, self.slo = 1.0, (inf, inf)
        self.allowance = Allowance()
        self._adjusted = 0.0
        self._step = self._before = 0.0, _BEGIN, StepParts()
        self.restart()

    def configure(self, cap: float | None, objective: float, slo: tuple[float, float] = (inf, inf)) -> None:
        """Use other targets. Requests that arrived under another cap or SLO do not count."""
        if cap != self.cap:
            self.allowance = replace(self.allowance, share=cap and _TARGET * cap, is_alone=False)
        if (cap, slo) != (self.cap, self.slo):
            self.restart()
        self.cap, self.slo, self.may_lose = cap, slo, _SHARE_OF_MISSES * (1 - objective)

    def restart(self) -> None:
        """Forget all latencies, including those of requests in progress. The median adapts within some steps."""
        self.inflation = 0.0
        """Under a cap, the largest inflation of TTFT and TPOT, median and 99th percentile, at the last adjustment."""
        self._open: dict[int, tuple[_Clocks, _Latency | None]] = {}
        """By request: the clocks at its arrival, or at its first token with its TTFT."""
        self._num_steps = 0
        self._num_answers, self._sums = 0, _BEGIN
        """The open requests with a first token, and the sums of their clocks."""
        self.ttft: deque[tuple[float, _Latency]] = deque(maxlen=_LATENCIES)
        """Latencies with the time of their measurement."""
        self.tpot: deque[tuple[float, _Latency]] = deque(maxlen=_LATENCIES)

    def began(self, plan: StepPlan, now: float) -> None:
        """Advance the clocks with this step. Under a cap, learn the median of the part of online."""
        self.ended(now)
        if plan.predicted_seconds > 0:
            self._step = now, self._step[1], StepParts(*[part / plan.predicted_seconds for part in plan.parts])
            if self.cap is not None and (seconds := plan.predicted_seconds - plan.parts.offline):
                self._num_steps += 1
                drift, typical = max(_DRIFT, 1 / (1 + self._num_steps)), self.allowance.typical or seconds
                typical *= 1 + drift if seconds > typical else 1 - drift
                self.allowance = replace(self.allowance, typical=typical, is_alone=self._num_steps % _ALONE_STEPS == 0)

    def ended(self, now: float) -> None:
        self._step, self._before = (now, self._at(now), StepParts()), self._step

    def _at(self, now: float) -> _Clocks:
        since, clocks, rates = self._step if now >= self._step[0] else self._before
        passed = max(0.0, now - since)
        return (now, *[clock + passed * rate for clock, rate in zip(clocks[1:], rates, strict=True)])

    def arrived(self, request: Request, now: float) -> None:
        if request.request_class is RequestClass.ONLINE:
            self._open[request.seq] = self._at(min(now, request.arrival)), None  # it may have come during a step

    def answered(self, request: Request, now: float, own: float = 0.0) -> None:
        """Note the first token. `own`: seconds of a step with only this prompt."""
        if begun := self._open.get(request.seq):
            clocks, taken = self._at(now), now - request.arrival
            _, delay, decodes, prefill = _passed(begun[0], clocks)
            share = _share_alone(_passed(self._sums, clocks, self._num_answers)) if self._num_answers else 1.0
            delay += (1.0 - share) * (decodes + max(0.0, prefill - own))
            ttft = _Latency(taken, max(0.0, taken - delay))
            self.ttft.append((now, ttft))
            self._open[request.seq] = clocks, ttft
            self._num_answers, self._sums = self._num_answers + 1, tuple(map(add, self._sums, clocks))

    def finished(self, request: Request, now: float, own: float = 0.0) -> None:
        """Note the end of an answer. `own`: seconds of its decodes."""
        begun, ttft = self._open.pop(request.seq, (_BEGIN, None))
        if ttft is None:
            return
        self._num_answers, self._sums = self._num_answers - 1, _passed(begun, self._sums)
        is_lost = ttft.measured > request.ttft >= ttft.alone  # it misses an SLO that it would meet without offline
        is_delayed = ttft.measured > ttft.alone
        if request.num_output > 1:
            measured = (now - request.first_token) / (request.num_output - 1)
            tpot = _Latency(measured, measured * _share_alone(_passed(begun, self._at(now)), own))
            self.tpot.append((now, tpot))
            is_lost |= tpot.measured > request.tpot >= tpot.alone
            is_delayed |= tpot.measured > tpot.alone
        ratio = self.allowance.lending_ratio * exp(_LOSS_STEP * (self.may_lose * is_delayed - is_lost))
        self.allowance = replace(self.allowance, lending_ratio=min(1.0, max(_LEAST_RATIO, ratio)))
        if now - self._adjusted >= _ADJUST_SECONDS:
            self._adjust(now, now - self._adjusted)
            self._adjusted = now

    def _adjust(self, now: float, seconds: float) -> None:
        """Adjust the allowance, `seconds` after the last adjustment."""
        for latencies in (self.ttft, self.tpot):
            while latencies and latencies[0][0] < now - _LATENCY_SECONDS:
                latencies.popleft()
        share = self.allowance.share
        if self.cap is not None and share is not None:
            target, moved = _TARGET * self.cap, min(1.0, seconds / _LATENCY_SECONDS)
            measured = [found for found in (self.ttft, self.tpot) if found]
            is_known = min(map(len, measured), default=0) >= _LEAST
            self.inflation = max(map(_inflation, measured)) if is_known else 0.0
            share += (target - (self.inflation if is_known else share)) * moved
            share = min(max(0.0, share), 4 * self.cap)  # bounds an unused share; 2 or 8 changes nothing (sparse-2s)
        ratio = min(1.0, self.allowance.lending_ratio + seconds * self.may_lose / _RECOVERY_SECONDS)
        self.allowance = replace(self.allowance, share=share, lending_ratio=ratio)


def _passed(begun: _Clocks, clocks: _Clocks, num: int = 1) -> _Clocks:
    return tuple([num * clock - before for clock, before in zip(clocks, begun, strict=True)])


def _share_alone(passed: _Clocks, own: float = 0.0) -> float:
    """Return the time of answers without offline as a share of their time, from the advance of the clocks.

    Answers that take a share of the time overlap with the same share of the work of others (Little's law). So
    `share * taken = taken - delay - work + share * work`.
    """
    taken, delay, decodes, prefill = passed
    work = max(0.0, decodes + prefill - own)
    return min(1.0, max(0.0, taken - delay - work) / (taken - work)) if taken > work else 1.0


def _inflation(latencies: Collection[tuple[float, _Latency]]) -> float:
    """Return the larger inflation of the median and of the 99th percentile."""
    measured = sorted(latency.measured for _, latency in latencies)
    alone = sorted(latency.alone for _, latency in latencies)
    ranks = len(alone) // 2, int(0.99 * len(alone))
    return max(measured[i] / alone[i] if alone[i] else inf if measured[i] else 1.0 for i in ranks) - 1
