"""Ballast beside the baselines on the same traffic: one row for each policy, load and reservation.

A load of x % means online tokens (prompt and answer) per second at x % of the SLO-bound ceiling, which is what a GPU
does with offline work alone when every step is held to the TPOT.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from ballast_policy.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim import baselines
from ballast_sim.deployment import Ballast
from ballast_sim.errors import BadInput
from ballast_sim.pool import Job
from ballast_sim.replica import Policy
from ballast_sim.report import Percentiles, Report, report
from ballast_sim.simulation import Scenario, simulate
from ballast_sim.step_model import StepModel, profile
from ballast_sim.traffic import Arrival, Trace, excerpt

POLICIES = (
    "online-only",
    "static-split",
    "naive-priority",
    "sarathi",
    "qps-cap",
    "aimd",
    "greedy",
    "static-budget",
    "ballast",
)
"""In the order of the table. offline-only is the two ceilings."""
BUDGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Static budgets that are tried, as shares of the TPOT."""
MOST_LOST = 0.01
"""Attainment that a tuned baseline (qps-cap, static-budget, static-split) may lose against online-only."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under one load and reservation."""

    policy: str
    load: float
    reservation: float
    result: Report
    total_tokens: float
    """Per second."""
    offline_tokens: float
    note: str = ""


@dataclass
class Bench:
    """One traffic, one engine, one SLO; every row is a run on it."""

    trace: Trace
    offline: Sequence[Arrival]
    config: PolicyConfig
    model: StepModel
    seconds: float
    seed: int = 0
    noise: float = 0.0
    warmup_seconds: float = 60.0
    is_fitted: bool = False
    """Ballast fits its cost model on the run's own steps, instead of knowing it as the baselines do."""
    progress: Progress = lambda _: None
    _alone: dict[float, Report] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.seconds <= self.warmup_seconds:
            raise BadInput(f"a run of {self.seconds:g} s leaves nothing beside {self.warmup_seconds:g} s of warm-up")

    @cached_property
    def cost(self) -> CostModel:
        """What a profiling sweep finds."""
        return profile(self.model)

    @cached_property
    def unbounded(self) -> float:
        """Offline tokens per second alone, without an SLO."""
        return self._ceiling(baselines.unbounded)

    @cached_property
    def bound(self) -> float:
        """Offline tokens per second alone, every step within the TPOT."""
        return self._ceiling(lambda: baselines.held_to(self.config.tpot))

    def _ceiling(self, policy: Callable[[], Policy]) -> float:
        scenario = self._scenario(policy, (), 0.0)
        return report(simulate(replace(scenario, seconds=900.0, warmup_seconds=300.0))).total_tokens

    def highest_rate(self, attainment: float = 0.99) -> float:
        """Online tokens per second that online-only serves with that attainment; to 2 % of the bound."""
        low, high = 0.0, 1.5
        while high - low > 0.02:
            middle = (low + high) / 2
            low, high = (middle, high) if self._attains(self.alone(middle), attainment) else (low, middle)
        return low * self.bound

    def online(self, load: float) -> list[Arrival]:
        """The trace at a load."""
        return excerpt(self.trace, load * self.bound, self.seconds)

    def request_rate(self, load: float) -> float:
        """Online requests per second at a load."""
        online = self.online(load)
        return (len(online) - 1) / online[-1].seconds

    def alone(self, load: float) -> Report:
        """Online-only at a load."""
        if load not in self._alone:
            self._alone[load] = self._run(self._online_only, self.online(load), 0.0, has_offline=False)
        return self._alone[load]

    def row(self, policy: str, load: float, reservation: float) -> Row:
        """Run one policy."""
        self.progress(f"{policy} at {load:.0%}, reservation {reservation:.0%}")
        tpot, chunk = self.config.tpot, self.config.chunk_tokens
        plain: dict[str, Callable[[], Policy]] = {
            "greedy": lambda: baselines.greedy(tpot, chunk),
            "naive-priority": baselines.naive_priority,
            "sarathi": baselines.sarathi,
            "aimd": baselines.aimd,
        }
        match policy:
            case "online-only":
                return self._row(policy, load, reservation, self.alone(load))
            case "static-split":
                return self._static_split(load, reservation)
            case "qps-cap":
                return self._qps_cap(load, reservation)
            case "static-budget":
                return self._static_budget(load, reservation)
            case "ballast":
                result = self._run(Ballast, self.online(load), reservation, is_fitted=self.is_fitted)
                return self._row(policy, load, reservation, result)
            case name if name in plain:
                return self._row(policy, load, reservation, self._run(plain[name], self.online(load), 0.0))
        raise BadInput(f"unknown policy {policy!r}; known are {', '.join(POLICIES)}")

    def _online_only(self) -> Policy:
        return baselines.online_only(self.config.chunk_tokens)

    def _static_budget(self, load: float, reservation: float) -> Row:
        """The largest fixed step time that keeps the attainment, by brute force."""
        best: Row | None = None
        for share in BUDGETS:
            budget = share * self.config.tpot
            policy = partial(baselines.static_budget, budget, self.config.chunk_tokens)
            result = self._run(policy, self.online(load), 0.0)
            row = self._row("static-budget", load, reservation, result, f"{1e3 * budget:.1f} ms")
            if best is None or (self._keeps(row.result, load) and row.total_tokens > best.total_tokens):
                best = row
        assert best is not None
        return best

    def _qps_cap(self, load: float, reservation: float) -> Row:
        """The highest rate of offline requests that keeps the attainment, by bisection."""
        mean = sum(a.num_tokens for a in self.offline) / len(self.offline)
        low, high, best = 0.0, self.unbounded / mean, None
        for _ in range(6):
            middle = (low + high) / 2
            result = self._run(partial(baselines.qps_cap, middle), self.online(load), 0.0)
            if self._keeps(result, load):
                low, best = middle, self._row("qps-cap", load, reservation, result, f"{middle:.2f} requests/s")
            else:
                high = middle
        return best or self._row("qps-cap", load, reservation, self.alone(load), "no rate keeps the attainment")

    def _static_split(self, load: float, reservation: float) -> Row:
        """GPUs apart: the smallest of ten parts that serves online alone, the others offline without an SLO."""
        for parts in range(1, 10):
            result = self.alone(load * 10 / parts)
            if self._keeps(result, load):
                total = load * self.bound + (10 - parts) / 10 * self.unbounded
                note = f"{parts} of 10 GPUs online"
                offline = (10 - parts) / 10 * self.unbounded
                return Row("static-split", load, reservation, result, total, offline, note)
        return Row("static-split", load, reservation, self.alone(load), load * self.bound, 0.0, "all GPUs online")

    def _keeps(self, result: Report, load: float) -> bool:
        alone = self.alone(load)
        return (
            result.ttft_attainment >= alone.ttft_attainment - MOST_LOST
            and result.tpot_attainment >= alone.tpot_attainment - MOST_LOST
        )

    def _attains(self, result: Report, share: float) -> bool:
        return result.ttft_attainment >= share and result.tpot_attainment >= share

    def _row(self, policy: str, load: float, reservation: float, result: Report, note: str = "") -> Row:
        return Row(policy, load, reservation, result, result.total_tokens, result.offline.total, note)

    def _run(
        self,
        policy: Callable[[], Policy],
        online: Sequence[Arrival],
        reservation: float,
        *,
        has_offline: bool = True,
        is_fitted: bool = False,
    ) -> Report:
        scenario = self._scenario(policy, online, reservation)
        scenario = scenario if has_offline else replace(scenario, offline=list)
        return report(simulate(replace(scenario, cost=None if is_fitted else self.cost)))

    def _scenario(self, policy: Callable[[], Policy], online: Sequence[Arrival], reservation: float) -> Scenario:
        return Scenario(
            config=replace(self.config, offline_share=reservation),
            model=self.model,
            policy=policy,
            online=online,
            offline=lambda: [Job.endless("offline", self.offline)],
            seconds=self.seconds,
            warmup_seconds=self.warmup_seconds,
            seed=self.seed,
            noise=self.noise,
            cost=self.cost,
            is_guaranteed=policy is Ballast,
        )


def as_json(row: Row, bench: Bench) -> dict[str, Any]:
    """A row under the names of the evidence file: fractions of 1, milliseconds."""
    result = row.result
    return {
        "policy": row.policy,
        "load_percent": 100 * row.load,
        "reservation_percent": 100 * row.reservation,
        "ttft_ms": _milliseconds(result.ttft),
        "tpot_ms": _milliseconds(result.tpot),
        "ttft_attainment": result.ttft_attainment,
        "tpot_attainment": result.tpot_attainment,
        "envelope_attainment": result.envelope_attainment,
        "goodput_requests_per_s": result.goodput,
        "total_tokens_per_s": row.total_tokens,
        "offline_tokens_per_s": row.offline_tokens,
        "slo_bound_tokens_per_s": bench.bound,
        "unbounded_tokens_per_s": bench.unbounded,
        "slot_utilization": result.online_slots + result.offline_slots,
        "wasted_tokens": result.wasted_tokens,
        "jain": result.jain,
        "service_gap": result.service_gap,
        "reservation_shortfall": result.reservation_shortfall,
        "deadline_hits": None if result.deadline_hits != result.deadline_hits else result.deadline_hits,
        "note": row.note,
    }


def _milliseconds(percentiles: Percentiles) -> dict[str, float]:
    return {name: 1e3 * getattr(percentiles, name) for name in ("p50", "p95", "p99")}
