"""What a run comes to, in the figures that the evidence and the planner print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import inf, isnan, nan

from ballast_policy.request import RequestClass
from ballast_policy.snapshot import PolicyConfig
from ballast_sim.answers import Answer, Percentiles, Third, share, thirds, tpot_attainment, ttft_attainment
from ballast_sim.fairness import jain, service_gap
from ballast_sim.item import Item
from ballast_sim.replica import Step
from ballast_sim.simulation import Run


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens per second of requests that were completed in the run; recomputed and cached ones are left out."""

    prefill: float = 0.0
    decode: float = 0.0

    @property
    def total(self) -> float:
        """Both."""
        return self.prefill + self.decode


@dataclass(frozen=True, slots=True)
class Report:
    """A run's figures. Shares are fractions of 1."""

    seconds: float
    """Measured part of the run."""
    num_online: int
    ttft: Percentiles
    tpot: Percentiles
    """Of a request's mean time per output token."""
    ttft_attainment: float
    tpot_attainment: float
    envelope_attainment: float
    """Requests whose every token came by `arrival + ttft + j * tpot`."""
    goodput: float
    """Online requests per second that met both."""
    online: Tokens
    offline: Tokens
    wasted_tokens: int
    """Computed again after a preemption."""
    wasted_share: float
    """Of all tokens computed."""
    busy_share: float
    """Time in steps."""
    online_slots: float
    """Share of slots held by online, over time."""
    offline_slots: float
    parked: float
    """Parked requests, on average."""
    num_steps: int
    mean_step: float
    prediction_error: float
    """Mean of |predicted - actual| over actual step time, for the steps that the policy predicted."""
    num_preempted: int
    jain: float
    service_gap: float
    reservation_shortfall: float
    """Share of the reserved slot-seconds that waiting offline work did not get.

    A step in which offline computes all the prefill tokens it reserves is filling its slots, and not short of them, nor
    are those that are nested in it.
    """
    deadline_hits: float
    """Share of the jobs with a deadline that were done by it; nan without such jobs."""
    thirds: tuple[Third, ...] = ()
    """Attainment by prompt length, from the shortest prompts to the longest."""
    answers: tuple[Answer, ...] = field(default=(), repr=False)
    """The online requests of the measured part, for pooling several runs."""

    @property
    def total_tokens(self) -> float:
        """Tokens per second of both classes."""
        return self.online.total + self.offline.total


def report(run: Run, judged_by: PolicyConfig | None = None) -> Report:
    """Sum up a run over `[warmup, end]`, by the SLO and the reservation that the policy was told or by others.

    Whether every token came in time was noted in the run, by the SLO it was told: without one it is nan.
    """
    start, end = run.scenario.warmup_seconds, run.seconds
    seconds = max(end - start, 1e-9)
    replicas = len(run.replicas)
    config = judged_by or run.scenario.config
    online = _measured(run.online, start, end, config.ttft)
    answered = [item for item in online if item.last_token <= end and item.num_output > 1]
    answers = tuple(_answer(item, end) for item in online)
    steps = [step for replica in run.replicas for step in replica.steps if step.start >= start]
    computed = sum(
        step.online_prefill + step.offline_prefill + step.online_decode + step.offline_decode
        for replica in run.replicas
        for step in replica.steps
    )
    wasted = sum(item.num_recomputed for item in (*run.online, *run.offline))
    busy = sum(step.seconds for step in steps)
    slot_seconds = seconds * replicas * config.slots
    online_service = [replica.samples[RequestClass.ONLINE] for replica in run.replicas]
    samples = [each.after(start) for each in (*online_service, run.service)]
    return Report(
        seconds=seconds,
        num_online=len(online),
        ttft=Percentiles.of(answer.ttft for answer in answers),
        tpot=Percentiles.of(answer.tpot for answer in answers if not isnan(answer.tpot)),
        ttft_attainment=ttft_attainment(answers, config.ttft),
        tpot_attainment=tpot_attainment(answers, config.tpot),
        envelope_attainment=share([item.num_late == 0 for item in answered if item.request.ttft < inf]),
        goodput=sum(1 for item in answered if _met_both(item, config.ttft, config.tpot)) / seconds,
        online=_tokens(run.online, start, end),
        offline=_tokens(run.offline, start, end),
        wasted_tokens=wasted,
        wasted_share=wasted / max(computed, 1),
        busy_share=busy / (seconds * replicas),
        online_slots=sum(s.online_slots * s.seconds for s in steps) / slot_seconds,
        offline_slots=sum(s.offline_slots * s.seconds for s in steps) / slot_seconds,
        parked=sum(s.parked * s.seconds for s in steps) / (seconds * replicas),
        num_steps=len(steps),
        mean_step=busy / max(len(steps), 1),
        prediction_error=_prediction_error(steps),
        num_preempted=sum(replica.num_preempted for replica in run.replicas),
        jain=min((jain(sample) for sample in samples), default=1.0),
        service_gap=max((service_gap(sample) for sample in samples), default=0.0),
        reservation_shortfall=_shortfall(steps, config) if run.jobs else 0.0,
        deadline_hits=share([job.finished_at <= job.deadline for job in run.jobs if job.deadline is not None]),
        thirds=thirds(answers, ttft=config.ttft, tpot=config.tpot),
        answers=answers,
    )


def _measured(items: Sequence[Item], start: float, end: float, ttft: float) -> list[Item]:
    """Online requests of the measured part whose first token came or should have come within it."""
    return [
        item
        for item in items
        if item.request.arrival >= start and (item.first_token <= end or item.request.arrival + ttft < end)
    ]


def _answer(item: Item, end: float) -> Answer:
    """Return when the tokens of a request came, as far as they came in the run."""
    is_whole = item.last_token <= end and item.num_output > 1
    tpot = (item.last_token - item.first_token) / (item.num_output - 1) if is_whole else nan
    return Answer(item.request.num_prompt, min(item.first_token, end) - item.request.arrival, tpot)


def _met_both(item: Item, ttft: float, tpot: float) -> bool:
    took = (item.last_token - item.first_token) / (item.num_output - 1)
    return item.first_token - item.request.arrival <= ttft and took <= tpot


def _tokens(items: Iterable[Item], start: float, end: float) -> Tokens:
    done = [item for item in items if start <= item.last_token <= end]
    prefill = sum(item.request.num_prompt - item.request.num_prompt_cached for item in done)
    return Tokens(prefill / max(end - start, 1e-9), sum(item.num_output for item in done) / max(end - start, 1e-9))


def _prediction_error(steps: Sequence[Step]) -> float:
    errors = [abs(step.predicted - step.seconds) / step.seconds for step in steps if step.predicted > 0]
    return sum(errors) / len(errors) if errors else nan


def _shortfall(steps: Sequence[Step], config: PolicyConfig) -> float:
    reserved = cache(config.reservation)
    owed = missing = 0.0
    prefill = 0
    for step in steps:
        reservation = reserved(step.ceiling)
        due = min(reservation.slots, step.offline_present)
        owed += due * step.seconds
        prefill = prefill if step.is_nested else step.offline_prefill
        if prefill < reservation.chunk:
            missing += max(0, due - step.offline_slots) * step.seconds
    return missing / owed if owed else 0.0
