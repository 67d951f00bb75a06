"""Check guarantees that a table of latencies does not show. Each guarantee has a run that stresses it.

- **reservation**: online traffic at ten times the maximum throughput. Offline keeps its reserved slots.
- **equal tenants**: the tenants of a trace with equal weights, each with a job that never ends.
- **unequal tenants**: three tenants with the weights 1, 2 and 4.
- **deadline**: a job with a tight but feasible deadline, submitted after three other jobs of its tenant, with bursts of
  online requests. With its deadline it is done in time. In order of submission it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from statistics import fmean

from ballast_policy.snapshot import PolicyConfig, TenantShare
from ballast_sim.errors import BadInput
from ballast_sim.replay.arrivals import bursts, generate
from ballast_sim.replay.fairness import most_ahead
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.report import report
from ballast_sim.replay.simulation import Run, Scenario, simulate, warmup_of
from ballast_sim.replay.step_model import StepModel, profile
from ballast_sim.replay.traffic import Arrival, Trace, at_rate, repeated

OVERLOAD = 10.0
MOST_SHORT = 0.002
"""Most reserved slot-seconds that may be missing, as a share. If all slots are in use, a slot that online borrowed
returns only when an answer ends."""
LEAST_JAIN, MOST_OFF = 0.98, 0.02
WEIGHTS = (1.0, 2.0, 4.0)
TIGHT_ITEMS, TIGHTNESS = 40, 1.7
"""Items of the tight job, and its deadline over the time that it takes as the only job (with shorter steps)."""


@dataclass(frozen=True, slots=True)
class GuaranteeResult:
    """Whether one guarantee was kept, with its figures."""

    name: str
    is_kept: bool
    sentence: str
    figures: dict[str, float]


@dataclass(frozen=True)
class GuaranteeRuns:
    """The engine and the traffic of the runs."""

    config: PolicyConfig
    model: StepModel
    trace: Trace
    """Online traffic."""
    tenants: Trace
    """Traffic with tenants."""
    offline: Sequence[Arrival]
    seconds: float = 300.0
    seed: int = 0

    def all(self) -> list[Callable[[], GuaranteeResult]]:
        """Return a function for each guarantee."""
        return [self.reservation, self.equal_tenants, self.unequal_tenants, self.deadline]

    def reservation(self, share: float = 0.10) -> GuaranteeResult:
        """Run ten times the online traffic that the engine can serve, with a reservation for offline."""
        config = replace(self.config, offline_share=share)
        rate = OVERLOAD * self._most_online()
        trace = at_rate(repeated(self.trace, rate * self.seconds), rate)
        online = [arrival for arrival in trace if arrival.seconds < self.seconds]
        run = self._run([SimulatedJob.endless("offline", self.offline)], config, online=online)
        found = report(run)
        reservation = run.replicas[0].host.reservation
        slots = config.slots * found.offline_slots
        steps = run.replicas[0].steps
        prefill = sum(step.offline_prefill for step in steps) / len(steps)
        return GuaranteeResult(
            "reservation",
            found.reservation_shortfall <= MOST_SHORT,
            f"online traffic is {rate:,.0f} tokens/s, {OVERLOAD:g} times the maximum throughput. {reservation.slots} "
            f"of {config.slots} slots and {reservation.chunk} prefill tokens of a step are reserved. Offline holds "
            f"{slots:.1f} slots on average and prefills {prefill:.1f} tokens per step: "
            f"{found.reservation_shortfall:.3%} of the reserved slot-seconds are missing. Offline throughput is "
            f"{found.offline.total:,.0f} tokens/s",
            {"shortfall": found.reservation_shortfall, "slots": slots, "offline_tokens_per_s": found.offline.total},
        )

    def equal_tenants(self) -> GuaranteeResult:
        """Run all tenants of the trace, each with a job that never ends."""
        run = self._run(self._by_tenant(self.tenants), self.config)
        found = report(run)
        bound = self._bound(self.tenants, 1.0)
        return GuaranteeResult(
            "equal tenants",
            found.jain >= LEAST_JAIN and found.service_gap <= bound,
            f"{len(run.jobs)} tenants: Jain index {found.jain:.4f} (at least {LEAST_JAIN}), widest service gap "
            f"{found.service_gap:,.0f} token costs (proven bound: {bound:,.0f})",
            {"jain": found.jain, "service_gap": found.service_gap, "bound": bound},
        )

    def unequal_tenants(self) -> GuaranteeResult:
        """Run three tenants with the same lengths and different weights."""
        names = {f"weight {weight:g}": weight for weight in WEIGHTS}
        config = replace(self.config, tenants={name: TenantShare(weight=weight) for name, weight in names.items()})
        run = self._run([SimulatedJob.endless(name, self.offline, tenant=name) for name in names], config)
        gained = self._gained(run)
        total = sum(gained[name] * weight for name, weight in names.items())
        shares = {name: gained[name] * weight / total for name, weight in names.items()}
        entitled = {name: weight / sum(WEIGHTS) for name, weight in names.items()}
        off = max(abs(shares[name] / entitled[name] - 1) for name in names)
        listed = ", ".join(f"{name}: {share:.1%} of {entitled[name]:.1%}" for name, share in shares.items())
        gap, bound = report(run).service_gap, self._bound(self.offline, min(WEIGHTS))
        return GuaranteeResult(
            "unequal tenants",
            off <= MOST_OFF and gap <= bound,
            f"{listed}; at most {off:.2%} off (allowed {MOST_OFF:.0%})",
            {"off": off, "service_gap": gap, "bound": bound},
        )

    def deadline(self) -> GuaranteeResult:
        """Run a tight job that is submitted after others, with and without its deadline."""
        rate = 0.5 * self._most_online() / fmean(arrival.num_tokens for arrival in self.trace)
        online = generate(
            bursts(0.5 * rate, 4 * rate, every=30.0, lasting=3.0),
            peak=4 * rate,
            seconds=4 * self.seconds,
            lengths=self.trace,
            seed=self.seed,
        )
        alone = self._finished(online, num_earlier=0)
        if not isfinite(alone):
            raise BadInput(
                f"the {TIGHT_ITEMS} items of the tight job are not done in {4 * self.seconds:g} s. Run longer"
            )
        deadline = TIGHTNESS * alone
        told, untold = self._finished(online, deadline=deadline), self._finished(online)
        return GuaranteeResult(
            "deadline",
            told <= deadline < untold,
            f"{TIGHT_ITEMS} items take {alone:.0f} s as the only job, and are due after {deadline:.0f} s. Submitted "
            f"after three other jobs, they are done after {told:.0f} s by least slack, and after {untold:.0f} s in "
            "order of submission",
            {"deadline": deadline, "by_slack": told, "by_submission": untold},
        )

    def _finished(self, online: Sequence[Arrival], *, num_earlier: int = 3, deadline: float | None = None) -> float:
        """Return when the tight job is done. If it has a deadline, the jobs submitted before it have later ones."""
        due = [86_400.0 * (i + 1) if deadline else None for i in range(num_earlier)]
        jobs = [SimulatedJob.of(f"earlier {i}", self.offline[: 3 * TIGHT_ITEMS], deadline=d) for i, d in enumerate(due)]
        jobs.append(SimulatedJob.of("tight", self.offline[:TIGHT_ITEMS], deadline=deadline))
        return self._run(jobs, self.config, online=online, seconds=4 * self.seconds).jobs[-1].finished_at

    def _most_online(self) -> float:
        """Return the tokens per second that fill the engine with online lengths alone."""
        jobs = [SimulatedJob.endless("offline", self.trace)]
        return report(self._run(jobs, replace(self.config, offline_share=0.0))).total_tokens

    def _by_tenant(self, trace: Trace) -> list[SimulatedJob]:
        lengths: dict[str, list[Arrival]] = {}
        for arrival in trace:
            lengths.setdefault(arrival.tenant, []).append(arrival)
        if len(lengths) < 2:
            raise BadInput(f"the trace of tenants has {len(lengths)}, expected 2 or more (column tenant or client)")
        return [SimulatedJob.endless(tenant, own, tenant=tenant) for tenant, own in lengths.items()]

    def _bound(self, lengths: Sequence[Arrival], weight: float) -> float:
        """Return the proven bound on the difference of service between two tenants over any span (`most_ahead`)."""
        longest = max(arrival.num_prompt for arrival in lengths), max(arrival.num_output for arrival in lengths)
        return 2 * most_ahead(self.config.slots, *longest, weight)

    def _gained(self, run: Run) -> dict[str, float]:
        """Return the service over weight of each tenant that always had work, in the measured part."""
        samples = run.service.after(run.scenario.warmup_seconds)
        return {tenant: samples[-1][tenant] - samples[0][tenant] for tenant in samples[0]}

    def _run(
        self,
        jobs: list[SimulatedJob],
        config: PolicyConfig,
        *,
        online: Sequence[Arrival] = (),
        seconds: float | None = None,
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
                warmup_seconds=warmup_of(seconds),
                seed=self.seed,
                cost=profile(self.model),
                is_guaranteed=True,
            )
        )
