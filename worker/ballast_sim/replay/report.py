"""The figures of a run, for comparison and planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, isnan, nan

from ballast_policy.request import OFFLINE, ONLINE, RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.replay.attainment import (
    Percentiles,
    RequestLatency,
    Third,
    share,
    thirds,
    tpot_attainment,
    ttft_attainment,
)
from ballast_sim.replay.fairness import jain, service_gap
from ballast_sim.replay.replica import ReplayedStep
from ballast_sim.replay.simulated import SimulatedRequest
from ballast_sim.replay.simulation import Run


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens per second that were computed in the measured part. Recomputed and cached tokens do not count."""

    prefill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        """Prefill and decode tokens per second."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Report:
    """The figures of a run. Shares are fractions of 1."""

    seconds: float
    """Length of the measured part."""
    num_online: int
    ttft: Percentiles
    tpot: Percentiles
    """TPOT of a request is its mean time per output token."""
    ttft_attainment: float
    tpot_attainment: float
    envelope_attainment: float
    """Share of the requests whose every token came by `arrival + ttft + j * tpot`."""
    goodput: float
    """Online requests per second that met TTFT and TPOT."""
    online: Tokens
    offline: Tokens
    wasted_tokens: int
    """Tokens computed again after a preemption."""
    online_slots: float
    """Share of the slots that online held, over time."""
    offline_slots: float
    jain: float
    service_gap: float
    reservation_shortfall: float
    """Share of the reserved slot-seconds that offline work did not get while it waited.

    A step that computes all prefill tokens of the reservation fills the reserved slots, and is not short of them. Steps
    that are nested in it are not short, either.
    """
    deadline_hits: float
    """Share of the jobs with a deadline that met it; nan without such jobs."""
    thirds: tuple[Third, ...] = ()
    """Attainment by prompt length, from the shortest prompts to the longest."""
    answers: tuple[RequestLatency, ...] = field(default=(), repr=False)
    """The online requests of the measured part, to pool several runs."""
    num_unfinished: int = 0
    """Online requests of the measured part whose answers of several tokens did not end in it."""

    @property
    def total_tokens(self) -> float:
        """Tokens per second of both classes."""
        return self.online.total + self.offline.total

    def keeps(self, ttft: float, tpot: float) -> bool:
        """Return whether both attainments are at least these shares. Answers of one token have no TPOT to keep."""
        is_unknown = isnan(self.tpot_attainment) and self.num_unfinished > 0
        return self.ttft_attainment >= ttft and not (self.tpot_attainment < tpot or is_unknown)


def report(run: Run, judged_by: PolicyConfig | None = None) -> Report:
    """Compute the figures of `[warmup, end]`, by the SLO and the reservation of the run or of another configuration.

    `envelope_attainment` always uses the SLO of the run, and is nan if the run has none.
    """
    start, end = run.scenario.warmup_seconds, run.seconds
    seconds = max(end - start, 1e-9)
    config = judged_by or run.scenario.config
    online = _measured(run.online, start, end, config.ttft)
    answered = [item for item in online if item.last_token <= end and item.num_output > 1]
    answers = tuple(_answer(item, end) for item in online)
    steps = [step for replica in run.replicas for step in replica.steps if step.start >= start]
    slot_seconds = seconds * len(run.replicas) * config.slots
    samples = [each.after(start) for each in (*(replica.samples for replica in run.replicas), run.service)]
    return Report(
        seconds=seconds,
        num_online=len(online),
        ttft=Percentiles.of(answer.ttft for answer in answers),
        tpot=Percentiles.of(answer.tpot for answer in answers if not isnan(answer.tpot)),
        ttft_attainment=ttft_attainment(answers, config.ttft),
        tpot_attainment=tpot_attainment(answers, config.tpot),
        envelope_attainment=share([item.num_late == 0 for item in answered if item.request.ttft < inf]),
        goodput=sum(
            answer.ttft <= config.ttft and (answer.tpot <= config.tpot or item.num_output == 1)
            for answer, item in zip(answers, online, strict=True)
        )
        / seconds,
        online=_tokens(run, ONLINE, seconds),
        offline=_tokens(run, OFFLINE, seconds),
        wasted_tokens=sum(item.num_recomputed for item in (*run.online, *run.offline)),
        online_slots=sum(s.online_slots * s.seconds for s in steps) / slot_seconds,
        offline_slots=sum(s.offline_slots * s.seconds for s in steps) / slot_seconds,
        jain=min((jain(sample) for sample in samples), default=1.0),
        service_gap=max((service_gap(sample) for sample in samples), default=0.0),
        reservation_shortfall=_shortfall(steps, config) if run.jobs else 0.0,
        deadline_hits=share([job.finished_at <= job.deadline for job in run.jobs if job.deadline is not None]),
        thirds=thirds(answers, ttft=config.ttft, tpot=config.tpot),
        answers=answers,
        num_unfinished=sum(item.last_token > end and item.num_output > 1 for item in online),
    )


def _measured(items: Sequence[SimulatedRequest], start: float, end: float, ttft: float) -> list[SimulatedRequest]:
    """Return the online requests of the measured part whose first token came, or was due, within it."""
    items = [item for item in items if item.request.arrival >= start]
    return [item for item in items if item.first_token <= end or item.request.arrival + ttft < end]


def _answer(item: SimulatedRequest, end: float) -> RequestLatency:
    """Return the latencies of a request, as far as its tokens came in the run."""
    is_whole = item.last_token <= end and item.num_output > 1
    tpot = (item.last_token - item.first_token) / (item.num_output - 1) if is_whole else nan
    return RequestLatency(item.request.num_prompt, min(item.first_token, end) - item.request.arrival, tpot)


def _tokens(run: Run, request_class: RequestClass, seconds: float) -> Tokens:
    prompt = sum(replica.num_prompt[request_class] for replica in run.replicas)
    return Tokens(prompt / seconds, sum(replica.num_output[request_class] for replica in run.replicas) / seconds)


def _shortfall(steps: Sequence[ReplayedStep], config: PolicyConfig) -> float:
    reserved = cache(config.reservation)
    owed = missing = 0.0
    prefill = 0
    for step in steps:
        reservation = reserved(step.ceiling)
        due = min(reservation.slots, step.offline_entitled)
        owed += due * step.seconds
        prefill = prefill if step.is_nested else step.offline_prefill
        if prefill < reservation.chunk:
            missing += max(0, due - step.offline_slots) * step.seconds
    return missing / owed if owed else 0.0
