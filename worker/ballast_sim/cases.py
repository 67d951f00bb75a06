"""The promises that no table of latency shows: each a run that would break it, and the figure that came of it.

- **reservation**: online traffic at ten times what the engine can serve, and offline keeps its reserved slots.
- **equal tenants**: the tenants of a trace, each with a job that never ends, on equal weights.
- **unequal tenants**: three of them on weights 1, 2 and 4.
- **deadline**: a job that is tight but feasible, behind three others of its tenant, beside bursts of online requests;
  told its deadline it is done in time, in the order of submission it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ballast_policy.fairness.ledger import most_ahead
from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.arrivals import bursts, generate
from ballast_sim.deployment import Ballast
from ballast_sim.errors import BadInput
from ballast_sim.pool import Job
from ballast_sim.report import report
from ballast_sim.simulation import Run, Scenario, simulate
from ballast_sim.step_model import StepModel, profile
from ballast_sim.traffic import Arrival, Trace, at_rate, repeated

OVERLOAD = 10.0
MOST_SHORT = 0.002
"""Share of the reserved slot-seconds: where all slots are in use, one that online borrowed comes back only when an
answer ends."""
LEAST_JAIN, MOST_OFF = 0.98, 0.02
WEIGHTS = (1.0, 2.0, 4.0)
TIGHT_ITEMS, TIGHTNESS = 40, 1.7
"""Items of the tight job, and its deadline over the time it takes with the offline share to itself (shorter steps)."""


@dataclass(frozen=True, slots=True)
class Case:
    """One promise."""

    name: str
    is_kept: bool
    sentence: str
    figures: dict[str, float]


@dataclass(frozen=True)
class Court:
    """The engine and the traffic that the cases are made of."""

    config: PolicyConfig
    model: StepModel
    trace: Trace
    """Online lengths; with tenants for the cases of tenants."""
    tenants: Trace
    offline: Sequence[Arrival]
    seconds: float = 300.0
    seed: int = 0

    def cases(self) -> list[Callable[[], Case]]:
        """All of them, each to be called."""
        return [self.reservation, self.equal_tenants, self.unequal_tenants, self.deadline]

    def reservation(self, share: float = 0.10) -> Case:
        """Ten times more online than the engine does, with a reservation for offline."""
        config = replace(self.config, offline_share=share)
        full = report(self._run([Job.endless("offline", self.trace)], replace(config, offline_share=0.0)))
        rate = OVERLOAD * full.total_tokens
        trace = at_rate(repeated(self.trace, rate * self.seconds), rate)
        online = [arrival for arrival in trace if arrival.seconds < self.seconds]
        run = self._run([Job.endless("offline", self.offline)], config, online=online)
        found = report(run)
        reservation = run.replicas[0].host.reservation
        slots = config.slots * found.offline_slots
        steps = run.replicas[0].steps
        prefill = sum(step.offline_prefill for step in steps) / len(steps)
        return Case(
            "reservation",
            found.reservation_shortfall <= MOST_SHORT,
            f"online asks for {rate:,.0f} tokens/s, {OVERLOAD:g} times what the engine does; {reservation.slots} of "
            f"{config.slots} slots and {reservation.chunk} prefill tokens of a step are reserved; offline holds "
            f"{slots:.1f} slots on average and prefills {prefill:.1f} tokens a step: "
            f"{found.reservation_shortfall:.3%} of the reserved slot-seconds are missing, offline does "
            f"{found.offline.total:,.0f} tokens/s",
            {"shortfall": found.reservation_shortfall, "slots": slots, "offline_tokens_per_s": found.offline.total},
        )

    def equal_tenants(self) -> Case:
        """Every tenant of the trace has work without end."""
        run = self._run(self._by_tenant(self.tenants), self.config)
        found = report(run)
        bound = self._bound(self.tenants, 1.0)
        return Case(
            "equal tenants",
            found.jain >= LEAST_JAIN and found.service_gap <= bound,
            f"{len(run.jobs)} tenants: Jain index {found.jain:.4f} (at least {LEAST_JAIN}), widest service gap "
            f"{found.service_gap:,.0f} of {bound:,.0f} token costs that are proven",
            {"jain": found.jain, "service_gap": found.service_gap, "bound": bound},
        )

    def unequal_tenants(self) -> Case:
        """Three tenants of the same lengths, and weights that differ."""
        names = {f"weight {weight:g}": weight for weight in WEIGHTS}
        config = replace(self.config, tenants={name: TenantShare(weight=weight) for name, weight in names.items()})
        run = self._run([Job.endless(name, self.offline, tenant=name) for name in names], config)
        gained = self._gained(run)
        total = sum(gained[name] * weight for name, weight in names.items())
        shares = {name: gained[name] * weight / total for name, weight in names.items()}
        entitled = {name: weight / sum(WEIGHTS) for name, weight in names.items()}
        off = max(abs(shares[name] / entitled[name] - 1) for name in names)
        listed = ", ".join(f"{name}: {share:.1%} of {entitled[name]:.1%}" for name, share in shares.items())
        gap, bound = report(run).service_gap, self._bound(self.offline, min(WEIGHTS))
        return Case(
            "unequal tenants",
            off <= MOST_OFF and gap <= bound,
            f"{listed}; at most {off:.2%} off (allowed {MOST_OFF:.0%})",
            {"off": off, "service_gap": gap, "bound": bound},
        )

    def deadline(self) -> Case:
        """A tight job behind others, told its deadline and not."""
        rate = 0.5 * self._online_rate()
        online = generate(
            bursts(0.5 * rate, 4 * rate, every=30.0, lasting=3.0),
            peak=4 * rate,
            seconds=4 * self.seconds,
            lengths=self.trace,
            seed=self.seed,
        )
        alone = self._finished([self._tight(None)], online)
        deadline = TIGHTNESS * alone
        told = self._finished([*self._others(), self._tight(deadline)], online)
        untold = self._finished([*self._others(), self._tight(None)], online)
        return Case(
            "deadline",
            told <= deadline < untold,
            f"{TIGHT_ITEMS} items take {alone:.0f} s with the offline share to themselves; due after {deadline:.0f} s "
            f"behind three other jobs they are done after {told:.0f} s by least slack, {untold:.0f} s in order of "
            "submission",
            {"deadline": deadline, "by_slack": told, "by_submission": untold},
        )

    def _tight(self, deadline: float | None) -> Job:
        return Job.of("tight", self.offline[:TIGHT_ITEMS], deadline=deadline)

    def _others(self) -> list[Job]:
        return [Job.of(f"earlier {i}", self.offline[: 3 * TIGHT_ITEMS], deadline=86_400.0 * (i + 1)) for i in range(3)]

    def _finished(self, jobs: list[Job], online: Sequence[Arrival]) -> float:
        if jobs[-1].deadline is None:
            for job in jobs:
                job.deadline = None
        run = self._run(jobs, self.config, online=online, seconds=4 * self.seconds)
        return run.jobs[-1].finished_at

    def _online_rate(self) -> float:
        """Requests per second that fill the engine with online lengths alone."""
        full = report(self._run([Job.endless("offline", self.trace)], replace(self.config, offline_share=0.0)))
        return full.total_tokens / (sum(arrival.num_tokens for arrival in self.trace) / len(self.trace))

    def _by_tenant(self, trace: Trace) -> list[Job]:
        lengths: dict[str, list[Arrival]] = {}
        for arrival in trace:
            lengths.setdefault(arrival.tenant, []).append(arrival)
        if len(lengths) < 2:
            raise BadInput(f"the trace of tenants names {len(lengths)}, wanted two or more (column tenant or client)")
        return [Job.endless(tenant, own, tenant=tenant) for tenant, own in lengths.items()]

    def _bound(self, lengths: Sequence[Arrival], weight: float) -> float:
        """How far the service of two tenants may grow apart over any span (`most_ahead`)."""
        longest = max(arrival.num_prompt for arrival in lengths), max(arrival.num_output for arrival in lengths)
        return 2 * most_ahead(self.config.slots, *longest, weight)

    def _gained(self, run: Run) -> dict[str, float]:
        """Service over weight of each tenant that always had work, in the measured part."""
        samples = run.service.after(run.scenario.warmup_seconds)
        return {tenant: samples[-1][tenant] - samples[0][tenant] for tenant in samples[0]}

    def _run(
        self, jobs: list[Job], config: PolicyConfig, *, online: Sequence[Arrival] = (), seconds: float | None = None
    ) -> Run:
        seconds = seconds or self.seconds
        return simulate(
            Scenario(
                config=config,
                model=self.model,
                policy=Ballast,
                online=online,
                offline=lambda: jobs,
                seconds=seconds,
                warmup_seconds=seconds / 5,
                seed=self.seed,
                cost=profile(self.model),
                is_guaranteed=True,
            )
        )
