"""Predict whether jobs meet their deadlines, from the state of the queue and the status of its workers. PURE.

The outlook and its sentence are computed in the same way at submission, at intake and while a job runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf

from ballast_openai.errors import counted
from ballast_policy.jobs.deadline import Feasibility, JobWork, Rates, Verdict, feasible, seconds_of
from ballast_queue.job import MOST_ACTIVE, Job, JobHead, Outlook
from ballast_queue.status import LEAST_RATE, WorkerStatus

NEAREST = f"the {MOST_ACTIVE:,} jobs with the nearest deadlines"
STOPPED = 10 * LEAST_RATE
"""A rate of a worker below this is that of waiting work of which nothing runs."""


def rates_of(workers: Sequence[WorkerStatus]) -> Rates:
    """Return the offline work that all ready workers together do per second, if there is enough of it.

    A worker without a measurement counts as the mean of the workers with one. If no worker has one, the rate is 0.
    """
    ready = ready_of(workers)
    return Rates(
        items=_total([worker.offline_items_per_second for worker in ready]),
        output_tokens=_total([worker.offline_tokens_per_second for worker in ready]),
    )


def order_rates_of(workers: Sequence[WorkerStatus]) -> Rates:
    """Return the same of the time in which offline work ran: what orders jobs does not fall while none runs.

    With a rate near 0, the largest job would have the least slack, however late it is due.
    """
    ready = ready_of(workers)
    return Rates(
        items=_total([worker.offline_items_while_running for worker in ready]),
        output_tokens=_total([worker.offline_tokens_while_running for worker in ready]),
    )


def _total(rates: Sequence[float]) -> float:
    measured = [rate for rate in rates if rate > 0]
    return sum(measured) * len(rates) / len(measured) if measured else 0.0


def ready_of(workers: Sequence[WorkerStatus]) -> list[WorkerStatus]:
    """Return the workers that accept work."""
    return [worker for worker in workers if worker.is_ready and not worker.is_draining]


def work_of(job: Job | JobHead) -> JobWork:
    """Return the remaining work of a job."""
    remaining = job.counts.waiting + job.counts.leased if isinstance(job, Job) else job.remaining
    return JobWork(job.tenant, job.priority, job.deadline, remaining, job.output_left)


class Forecast:
    """Computes the outlook of the jobs of one queue at one moment. `Jobs.active` limits how many it knows."""

    def __init__(
        self, active: Sequence[Job], workers: Sequence[WorkerStatus], now: float, weights: Mapping[str, float]
    ) -> None:
        self._ready = len(ready_of(workers))
        self._rates = rates_of(workers)
        self._now = now
        self._weights = weights
        self._is_cut = len(active) >= MOST_ACTIVE
        self._groups: dict[tuple[int, str], dict[str, JobWork]] = defaultdict(dict)
        for job in active:
            if job.state.is_claimable:
                self._groups[job.priority, job.tenant][job.id] = work_of(job)
        # For another tenant or priority the sums suffice, however many jobs it has.
        self._sums = {group: _sums(works.values()) for group, works in self._groups.items()}

    def of(self, job: Job) -> tuple[Outlook, str]:
        """Return the outlook of a job, and a sentence with its figures."""
        found = self._feasible(job, self._rates)
        return Outlook(found.verdict), self._sentence(job, found)

    def is_in_time(self, job: Job, rates: Rates) -> bool:
        """Return whether a job would meet its deadline at other rates."""
        return self._feasible(job, rates).verdict is Verdict.YES

    def _feasible(self, job: Job, rates: Rates) -> Feasibility:
        group = (job.priority, job.tenant)
        own = self._groups.get(group, {})
        others = [work for job_id, work in own.items() if job_id != job.id]
        for other, sums in self._sums.items():
            if other != group:
                others += sums
        return feasible(work_of(job), others, rates, self._now, self._weights)

    def by_pressure(self, jobs: Iterable[Job]) -> list[Job]:
        """Return jobs by the part of the rate that they, and those before them, need until they are due; most first.

        In the order of deadlines, a tenant could hide the job of another behind many small ones.
        """
        ahead: dict[int, float] = defaultdict(float)
        for work in (work for group in self._groups.values() for work in group.values()):
            ahead[work.priority] += self._seconds(work)
        higher = {priority: sum(s for other, s in ahead.items() if other > priority) for priority in ahead}
        own: dict[tuple[int, str], float] = defaultdict(float)
        found: list[tuple[float, Job]] = []
        for job in sorted(jobs, key=lambda job: inf if job.deadline is None else job.deadline):
            own[job.priority, job.tenant] += self._seconds(work_of(job))
            needed = higher[job.priority] + own[job.priority, job.tenant] / self._weights.get(job.tenant, 1.0)
            left = (inf if job.deadline is None else job.deadline) - self._now
            found.append((needed / left if left > 0 else inf, job))
        return [job for _, job in sorted(found, key=lambda pair: -pair[0])]

    def _seconds(self, work: JobWork) -> float:
        return seconds_of(work, self._rates) or 0.0

    def _sentence(self, job: Job, found: Feasibility) -> str:
        if not self._ready:
            return "no ready worker has published its rates to this queue"
        workers = counted(self._ready, "worker")
        if found.verdict is Verdict.UNKNOWN or found.seconds_needed is None:
            return f"no rate is known yet: no item of {workers} has ended while others waited for slots"
        has_tokens = job.output_left and self._rates.output_tokens
        rate, unit = (self._rates.output_tokens, "output token") if has_tokens else (self._rates.items, "item")
        shown = f"{round(rate):,}" if has_tokens and rate >= 1 else f"{rate:,.3g}"
        per_second = f"1 {unit}/s" if shown == "1" else f"{shown} {unit}s/s"
        alone = found.seconds_needed - found.seconds_ahead
        ahead = f" after {duration(found.seconds_ahead)} of work before it" if found.seconds_ahead >= 1 else ""
        left = f"{duration(found.seconds_left)} remain" if found.seconds_left > 0 else "the deadline has passed"
        cut = f"; only {NEAREST} count" if self._is_cut else ""
        if rate < STOPPED * self._ready:
            return f"offline work waits, {workers} {'runs' if self._ready == 1 else 'run'} none of it, and {left}{cut}"
        return f"it needs {duration(alone)} at {per_second} of {workers}{ahead}, and {left}{cut}"


def _sums(works: Iterable[JobWork]) -> list[JobWork]:
    """Add up the work of one tenant: that of jobs with known output tokens, and that of jobs counted by items."""
    sums: dict[bool, JobWork] = {}
    for work in works:
        is_known = work.output_tokens > 0
        so_far = sums.get(is_known, JobWork(work.tenant, work.priority, None, 0))
        items, tokens = so_far.items + work.items, so_far.output_tokens + work.output_tokens
        sums[is_known] = replace(so_far, items=items, output_tokens=tokens)
    return list(sums.values())


def duration(seconds: float) -> str:
    """Return a time span in its two largest units: `90` is `1m30s`."""
    left = round(seconds)
    if left < 1:
        return "0s"
    parts = []
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m"), (1, "s")):
        count, left = divmod(left, size)
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts[:2])
