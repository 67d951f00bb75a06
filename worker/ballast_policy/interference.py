"""What offline work costs online, measured: how much later tokens come than they would alone, and what follows.

A step that takes `seconds` of which online alone would have needed `alone` makes whoever waits or decodes in it
`seconds - alone` later. The sum over all steps is a clock of delay; a request's own delay is what this clock advanced
between its arrival and its tokens. What it would have measured alone is what it measured, less its delay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from ballast_policy.plan import Plan
from ballast_policy.request import Request, RequestClass

_WINDOW = 512
"""Finished requests that are looked at for those lost."""
_LOOK_EVERY = 8
"""Finished requests between two looks at those lost."""
_LATENCIES = 2048
"""Finished requests whose latencies are held to the cap: the level of a step follows the load of many minutes, so that
offline work goes to the quiet ones among them."""
_SORT_EVERY = 32
"""Finished requests between two looks at the latencies."""
_LEAST = 32
"""Finished requests before the first look."""
_GAIN = 0.05
"""Share of the distance to its target by which one look moves the allowance: the window answers late."""
_TARGET = 0.97
"""Share of the cap at which the measured inflation is kept."""
_DRIFT = 1e-4
"""Share by which one step moves the median of online's part of a step, once many have: where the load falls, steps are
filled too high until it has followed, some minutes."""
_BACK_OFF, _RECOVERY = 0.6, 0.012
"""Harvest is multiplied by the one where too many requests are lost, and grows by the other where not."""
_SHRINK, _EARN = 0.5, 0.01
"""The same for leeway: a burst should find little of it where bursts have cost before."""
_LEAST_HARVEST = 0.1
"""Some is lent whatever is lost, if only at moments at which hardly a decode is near its deadline, since risk shrinks
with it: what is lost to the reservation would end lending for ever."""
_WIDE = 0.5
"""A cap that gives all the leeway; a smaller one gives its share of it."""
_MISSED = 0.5
"""Of the requests that may lose their SLO, those that may miss the TPOT for leeway to grow."""
_LEAST_LOST = 2
_FEW = 256
"""Requests of which the objective's share may be lost, even where fewer are looked at: two of a hundred are chance."""


@dataclass(frozen=True, slots=True)
class Allowance:
    """What measured latencies leave to offline. Fractions."""

    share: float | None = None
    """A step may take so much longer than a typical one of online alone would; None is the cap itself."""
    crowding: float = 0.0
    """How much longer requests stay than alone, and so how many more of them decode at a time (Little's law)."""
    typical: float = 0.0
    """What online alone takes in the middle one of the steps it has a part in, seconds; 0 while nobody knows."""
    harvest: float = 1.0
    """Part of the budget beside online, and of the risk, that offline may use."""
    leeway: float = 0.0
    """How far prefill of online may put decodes behind beside offline work, under a cap: TPOT for TTFT, the other way
    round."""


UNCHECKED = Allowance()
"""While nothing has been measured."""


class _Latency(NamedTuple):
    measured: float
    alone: float

    def is_lost(self, slo: float) -> bool:
        """Whether offline work made it miss the SLO: what online alone would miss as well is not offline's doing."""
        return self.measured > slo >= self.alone


class Interference:
    """The clock of delay, and the allowance that keeps latencies within the cap and losses within the objective. Pure.

    Fed by whoever runs the steps: `began` when a step begins or goes on, `ended` with it, and with each online request
    `arrived`, `answered` at its first token and `finished`. Under a cap the allowance moves to where the inflation of
    TTFT and TPOT, median and 99th percentile, over the last `_LATENCIES` requests is a little less than the cap. Where
    more requests lose their SLO to offline work than the objective allows, harvest backs off at once, and recovers step
    by step; leeway, which a cap gives, does where half as many miss their TPOT, whoever made it.
    """

    def __init__(self) -> None:
        self.cap: float | None = None
        self.objective = 0.0
        self.allowance = Allowance()
        self.inflation = 0.0
        """Under a cap, the largest of TTFT and TPOT, median and 99th percentile, at the last look."""
        self._delay = self._since = self._rate = 0.0
        self._open: dict[int, tuple[float, _Latency | None]] = {}
        """By request: the clock of delay at its arrival, or at its first token, and then its TTFT."""
        self._ttft: deque[_Latency] = deque(maxlen=_LATENCIES)
        self._tpot: deque[_Latency] = deque(maxlen=_LATENCIES)
        self._lost: deque[bool] = deque(maxlen=_WINDOW)
        self._missed: deque[bool] = deque(maxlen=_WINDOW)
        """Whether the TPOT was missed, whoever made it."""
        self._leeway = 0.0
        """What a wide cap gives."""
        self._num_finished = 0
        self._typical, self._num_steps = 0.0, 0

    def configure(self, cap: float | None, objective: float) -> None:
        """Go by another cap or objective from now on."""
        if cap != self.cap:
            share = None if cap is None else _TARGET * cap
            self.allowance = replace(self.allowance, share=share, leeway=0.0)
            self.inflation = 0.0
            self._ttft.clear()
            self._tpot.clear()
        self.cap, self.objective = cap, objective

    def began(self, plan: Plan, now: float) -> None:
        """A step begins or goes on: from now on all but online's own part of it is delay."""
        self.ended(now)
        if plan.predicted_seconds > 0:
            self._rate = 1.0 - min(1.0, plan.online_seconds / plan.predicted_seconds)
            if plan.online_seconds:
                self._look_at_step(plan.online_seconds)

    def _look_at_step(self, seconds: float) -> None:
        """Move the median towards one more step."""
        self._num_steps += 1
        drift = max(_DRIFT, 1 / (1 + self._num_steps))
        typical = self._typical or seconds
        self._typical = typical * (1 + drift if seconds > typical else 1 - drift)

    def ended(self, now: float) -> None:
        """No step is computed any more."""
        self._delay = self._at(now)
        self._since, self._rate = now, 0.0

    def _at(self, now: float) -> float:
        return self._delay + (now - self._since) * self._rate

    def arrived(self, request: Request, now: float) -> None:
        """A request came in, maybe in the middle of a step."""
        if request.request_class is RequestClass.ONLINE:
            self._open[request.seq] = self._at(now), None

    def answered(self, request: Request, now: float) -> None:
        """A request has its first token."""
        begun = self._open.get(request.seq)
        if begun is not None:
            taken, delay = now - request.arrival, self._at(now)
            ttft = _Latency(taken, max(taken - (delay - begun[0]), 0.0))
            self._ttft.append(ttft)
            self._open[request.seq] = delay, ttft

    def finished(self, request: Request, now: float) -> None:
        """A request has left, with all its tokens or without."""
        begun, ttft = self._open.pop(request.seq, (0.0, None))
        if ttft is None:
            return
        is_lost = ttft.is_lost(request.ttft)
        if request.num_output > 1:
            taken, num = now - request.first_token, request.num_output - 1
            tpot = _Latency(taken / num, max(taken - (self._at(now) - begun), 0.0) / num)
            self._tpot.append(tpot)
            self._missed.append(tpot.measured > request.tpot)
            is_lost |= tpot.is_lost(request.tpot)
        self._lost.append(is_lost)
        self._num_finished += 1
        if self._num_finished % _SORT_EVERY == 0 and min(len(self._ttft), len(self._tpot)) >= _LEAST:
            self._look_at_latencies()
        if self._num_finished % _LOOK_EVERY == 0 and len(self._lost) >= _LEAST:
            self._look_at_lost()

    def _look_at_latencies(self) -> None:
        measured, alone = zip(*self._tpot, strict=True)
        total = sum(alone)
        crowding = max(0.0, sum(measured) / total - 1) if total else 0.0
        share = self.allowance.share
        if self.cap is not None and share is not None:
            first = sorted(ttft.alone for ttft in self._ttft)
            inflations = (
                _inflation([ttft.measured for ttft in self._ttft], first),
                _inflation(measured, sorted(alone)),
            )
            self.inflation = max(inflations)
            missing = _TARGET * self.cap - self.inflation
            share = min(max(0.0, share + _GAIN * (missing if missing > 0 else 2 * missing)), 4 * self.cap)
        self.allowance = replace(self.allowance, share=share, crowding=crowding, typical=self._typical)

    def _look_at_lost(self) -> None:
        may_lose = 1 - self.objective
        harvest = max(_LEAST_HARVEST, _adapted(self.allowance.harvest, self._lost, may_lose, _BACK_OFF, _RECOVERY))
        self._leeway = _adapted(self._leeway, self._missed, _MISSED * may_lose, _SHRINK, _EARN)
        leeway = self._leeway * min(1.0, self.cap / _WIDE) if self.cap else 0.0
        self.allowance = replace(self.allowance, harvest=harvest, leeway=leeway)


def _adapted(value: float, is_bad: deque[bool], most: float, back_off: float, recovery: float) -> float:
    """Give less where more than that share is bad, and forget them; a little more where not. 0 to 1."""
    num_bad = sum(is_bad)
    if num_bad >= _LEAST_LOST and num_bad > most * max(len(is_bad), _FEW):
        is_bad.clear()
        return value * back_off
    return min(1.0, value + recovery)


def _inflation(measured: Iterable[float], alone: Sequence[float]) -> float:
    """Give the larger inflation of the median and of the 99th percentile; `alone` is sorted."""
    ordered = sorted(measured)
    marks = (int(0.5 * len(alone)), int(0.99 * len(alone)))
    return max((ordered[mark] / alone[mark] if alone[mark] else inf) for mark in marks) - 1
