"""Ballast beside the baselines on the same traffic: one row for each policy, load and reservation.

A load of x % means online tokens (prompt and answer) per second at x % of the SLO-bound ceiling, which is what a GPU
does with offline work alone when every step is held to the TPOT.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import ceil, inf, nan
from typing import NamedTuple

from ballast_policy.learning.cost import CostModel
from ballast_policy.snapshot import PolicyConfig
from ballast_sim import baselines
from ballast_sim.deployment import Ballast
from ballast_sim.errors import BadInput
from ballast_sim.pool import Job
from ballast_sim.replica import Policy
from ballast_sim.report import Report, report
from ballast_sim.series import NOTHING, Series, series
from ballast_sim.simulation import Run, Scenario, simulate
from ballast_sim.step_model import StepModel, profile
from ballast_sim.traffic import Arrival, Trace, excerpt, repeated, tokens_per_second

POLICIES = (
    "online-only",
    "offline-only",
    "static-split",
    "naive-priority",
    "sarathi",
    "qps-cap",
    "aimd",
    "greedy",
    "ballast",
)
"""In the order of the table."""
FITTED = "ballast-fitted"
"""Ballast with a cost model that it fits on the run's own steps, as a worker does; not part of `all`."""
STATIC_BUDGET = "static-budget"
"""The best fixed step time, by brute force: a bound that is printed above the table, and a policy by name."""
BUDGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
STATIC_CHUNKS = (512, 2048)
"""Static budgets that are tried, as shares of the TPOT, and prefill chunks; a budget by hand takes the larger chunk."""
KNOBS = {
    STATIC_BUDGET: "milliseconds of a step, with `x512` behind them for chunks of 512 tokens",
    "qps-cap": "offline requests per second",
    "ballast": "percent of interference allowed",
    FITTED: "the same",
}
"""What a policy may be given by hand, as in `static-budget=35`."""
KNOWN = (*POLICIES, STATIC_BUDGET, FITTED)
"""Names that a row can have."""
MOST_LOST = 0.01
"""Attainment that a tuned baseline (qps-cap, static-budget, static-split) may lose against online-only."""
MOST_LOAD = 1.5
"""Nothing above it is tried where a load is looked for that online alone attains."""
PARTS = 10
"""GPUs that static-split divides."""


class Knob(NamedTuple):
    """A policy by name, and what it was given by hand."""

    name: str
    value: float | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One policy under one load and reservation."""

    policy: str
    load: float
    reservation: float
    result: Report
    total_tokens: float
    """Per second and GPU."""
    offline_tokens: float
    note: str = ""
    series: Series = NOTHING


@dataclass
class Bench:
    """One traffic, one engine, one SLO; every row is a run on it. Travels between processes."""

    trace: Trace
    offline: Sequence[Arrival]
    config: PolicyConfig
    model: StepModel
    seconds: float
    seed: int = 0
    noise: float = 0.0
    warmup_seconds: float = 60.0
    ceiling_seconds: float = 900.0
    """How long offline work alone runs; the first third, in which the batch fills, is left out."""
    num_layers: int = 32
    """Of the model: where a step can be suspended."""
    is_fitted: bool = False
    """Ballast fits its cost model on the run's own steps, instead of knowing it as the baselines do."""
    is_paced: bool = False
    """The trace keeps its own times. Otherwise it is stretched to a load."""
    bound_tpot: float | None = None
    """The TPOT to which the SLO-bound ceiling is held, if it is not the SLO's."""
    capped_slo: tuple[float, float] | None = None
    """TTFT and TPOT that Ballast is told when a row has its own cap, in seconds. The rows are judged by `config`."""
    ceilings: dict[str, Row] = field(default_factory=dict)
    """As far as they were asked for; so the next."""
    alones: dict[float, Row] = field(default_factory=dict)
    """Online-only by load."""

    def __post_init__(self) -> None:
        if self.seconds <= self.warmup_seconds:
            raise BadInput(f"a run of {self.seconds:g} s leaves nothing beside {self.warmup_seconds:g} s of warm-up")

    @cached_property
    def cost(self) -> CostModel:
        """What a profiling sweep finds."""
        return profile(self.model)

    # Ceilings

    def ceiling(self, name: str) -> Row:
        """Offline alone: `full` batches without an SLO, or every step `bound` to the TPOT."""
        if name not in self.ceilings:
            held = partial(baselines.held_to, self.bound_tpot or self.config.tpot)
            policy = held if name == "bound" else baselines.unbounded
            seconds = self.ceiling_seconds
            scenario = replace(self.scenario(policy, ()), seconds=seconds, warmup_seconds=seconds / 3)
            self.ceilings[name] = self._row("offline-only", 0.0, 0.0, simulate(scenario))
        return self.ceilings[name]

    @property
    def unbounded(self) -> float:
        """Offline tokens per second alone, without an SLO."""
        return self.ceiling("full").total_tokens

    @property
    def bound(self) -> float:
        """Offline tokens per second alone, every step within the TPOT."""
        return self.ceiling("bound").total_tokens

    def highest(self, attainment: float = 0.99) -> Row:
        """Online-only at the highest load that it serves with that attainment, to 2 % of the bound; load 0 is none."""
        low, high = 0.0, MOST_LOAD
        while high - low > 0.02:
            middle = (low + high) / 2
            result = self.alone(middle).result
            is_met = min(result.ttft_attainment, result.tpot_attainment) >= attainment
            low, high = (middle, high) if is_met else (low, middle)
        return self.alone(low) if low else replace(self.alone(high), load=0.0)

    # Traffic

    @property
    def own_load(self) -> float:
        """Load of the trace at its own times."""
        return tokens_per_second(self.trace) / self.bound

    def online(self, load: float) -> list[Arrival]:
        """The trace at a load; it comes round again where it is too short. A paced trace comes as it is."""
        if self.is_paced:
            return list(self.trace)
        rate = load * self.bound
        return excerpt(repeated(self.trace, rate * self.seconds), rate, self.seconds)

    def request_rate(self, load: float) -> float:
        """Online requests per second at a load."""
        online = self.online(load)
        return (len(online) - 1) / online[-1].seconds

    # Rows

    def alone(self, load: float) -> Row:
        """Online-only at a load: Ballast without a job, so that what is lost against it is what offline work costs."""
        if load not in self.alones:
            scenario = replace(self.scenario(Ballast, self.online(load)), offline=list)
            self.alones[load] = self._row("online-only", load, 0.0, simulate(scenario))
        return self.alones[load]

    def rows(self, policy: str, load: float, reservations: Sequence[float]) -> list[Row]:
        """Run one policy; the baselines know no reservation, so that one run of theirs is judged by each."""
        name, value, chunk = knob(policy)
        if name in {"ballast", FITTED}:
            return [self._ballast(policy, load, reservation) for reservation in reservations]
        tokens, tpot = self.config.chunk_tokens, self.config.tpot
        plain: dict[str, Callable[[], Policy]] = {
            "naive-priority": baselines.naive_priority,
            "sarathi": baselines.sarathi,
            "aimd": baselines.aimd,
            "greedy": partial(baselines.greedy, tpot, tokens),
        }
        if value is not None:
            is_rate = name == "qps-cap"
            budget = partial(baselines.static_budget, value / 1e3, chunk or STATIC_CHUNKS[-1])
            plain[policy] = partial(baselines.qps_cap, value) if is_rate else budget
        tuned = {"static-split": self._static_split, "qps-cap": self._qps_cap, STATIC_BUDGET: self._static_budget}
        if policy in plain:
            run = simulate(self.scenario(plain[policy], self.online(load)))
            return [self._row(policy, load, reservation, run) for reservation in reservations]
        if policy in tuned:
            row = tuned[policy](load)
        elif policy == "online-only":
            row = self.alone(load)
        elif policy == "offline-only":
            row = self.ceiling("full")
        else:
            raise BadInput(f"unknown policy {policy!r}; known are all, {', '.join(KNOWN)}")
        return [replace(row, policy=policy, load=load, reservation=reservation) for reservation in reservations]

    def _ballast(self, policy: str, load: float, reservation: float) -> Row:
        name, value, _ = knob(policy)
        config = replace(self.config, offline_share=reservation)
        if value is not None:
            ttft, tpot = self.capped_slo or (config.ttft, config.tpot)
            config = replace(config, max_interference=value / 100, ttft=ttft, tpot=tpot)
        scenario = replace(
            self.scenario(Ballast, self.online(load)),
            config=config,
            cost=None if self.is_fitted or name == FITTED else self.cost,
            is_guaranteed=True,
        )
        return self._row(policy, load, reservation, simulate(scenario))

    def _static_budget(self, load: float) -> Row:
        """The largest fixed step time that keeps the attainment, by brute force."""
        best: Row | None = None
        for share, chunk in product(BUDGETS, STATIC_CHUNKS):
            budget = share * self.config.tpot
            run = simulate(self.scenario(partial(baselines.static_budget, budget, chunk), self.online(load)))
            row = self._row(STATIC_BUDGET, load, 0.0, run, f"{1e3 * budget:.1f} ms, chunks of {chunk}")
            if best is None or (self.keeps(row) and row.total_tokens > best.total_tokens):
                best = row
        assert best is not None
        return best

    def _qps_cap(self, load: float) -> Row:
        """The highest rate of offline requests that keeps the attainment, by bisection."""
        mean = sum(a.num_tokens for a in self.offline) / len(self.offline)
        low, high = 0.0, self.unbounded / mean
        best = replace(self.alone(load), note="no rate keeps the attainment")
        for _ in range(6):
            middle = (low + high) / 2
            run = simulate(self.scenario(partial(baselines.qps_cap, middle), self.online(load)))
            row = self._row("qps-cap", load, 0.0, run, f"{middle:.2f} requests/s")
            if self.keeps(row):
                low, best = middle, row
            else:
                high = middle
        return best

    def _static_split(self, load: float) -> Row:
        """GPUs apart: the smallest of ten parts that serves online alone, the others offline without an SLO."""
        self.check_split()
        alone = self.alone(load).result
        for parts in range(max(1, ceil(load * PARTS / MOST_LOAD)), PARTS):
            row = self.alone(load * PARTS / parts)
            if self._within(row.result, alone):
                offline = (PARTS - parts) / PARTS * self.unbounded
                total = row.result.online.total * parts / PARTS + offline
                note = f"{parts} of {PARTS} GPUs online"
                return replace(row, total_tokens=total, offline_tokens=offline, note=note)
        return replace(self.alone(load), note="all GPUs online")

    def check_split(self) -> None:
        """Check that a load can be divided among GPUs.

        Raises:
            BadInput: the traffic has times of its own.
        """
        if self.is_paced:
            raise BadInput("static-split divides a load among GPUs; this traffic has times of its own: leave it out")

    def keeps(self, row: Row) -> bool:
        """Whether a row attains what online-only does, less `MOST_LOST`."""
        return self._within(row.result, self.alone(row.load).result)

    def keeps_cap(self, row: Row, cap: float) -> bool:
        """Whether the p99 of TTFT and of TPOT are at most `cap` above those of online alone."""
        result, alone = row.result, self.alone(row.load).result
        pairs = ((result.ttft, alone.ttft), (result.tpot, alone.tpot))
        return all(found.p99 <= (1 + cap) * usual.p99 for found, usual in pairs)

    def keeps_its_own(self, row: Row, *, like: Row | None = None) -> bool:
        """Whether a row keeps the cap of `like` if that has one, or else the attainment; `like` is the row itself."""
        _, cap, _ = knob((like or row).policy)
        return self.keeps(row) if cap is None else self.keeps_cap(row, cap / 100)

    def best_static(self, rows: Iterable[Row], row: Row) -> Row | None:
        """Return the static budget among `rows` with the most offline tokens that keeps what `row` has to keep."""
        static = [each for each in rows if knob(each.policy).name == STATIC_BUDGET and each.load == row.load]
        kept = [each for each in static if self.keeps_its_own(each, like=row)]
        return max(kept, key=lambda each: each.offline_tokens, default=None)

    def _within(self, result: Report, alone: Report) -> bool:
        return (
            result.ttft_attainment >= alone.ttft_attainment - MOST_LOST
            and result.tpot_attainment >= alone.tpot_attainment - MOST_LOST
        )

    def _row(self, policy: str, load: float, reservation: float, run: Run, note: str = "") -> Row:
        result = report(run, replace(self.config, offline_share=reservation))
        total, offline = result.total_tokens, result.offline.total
        return Row(policy, load, reservation, result, total, offline, note, series(run))

    def scenario(self, policy: Callable[[], Policy], online: Sequence[Arrival]) -> Scenario:
        return Scenario(
            config=replace(self.config, offline_share=0.0),
            model=self.model,
            policy=policy,
            online=online,
            offline=lambda: [Job.endless("offline", self.offline)],
            seconds=self.seconds,
            warmup_seconds=self.warmup_seconds,
            seed=self.seed,
            noise=self.noise,
            num_layers=self.num_layers,
            cost=self.cost,
        )


def knob(policy: str) -> Knob:
    """Split `name=value`; the value is None where there is none.

    Raises:
        BadInput: the value is no number above 0, or the policy has no knob.
    """
    name, sign, text = policy.partition("=")
    if not sign:
        return Knob(name)
    chunk = None
    if name == STATIC_BUDGET and "x" in text:
        text, _, tokens = text.partition("x")
        chunk = int(tokens) if tokens.isdigit() else 0
    try:
        value = float(text)
    except ValueError:
        value = nan
    if name not in KNOBS or not 0 < value < inf or chunk == 0:
        known = ", ".join(f"{policy} ({meaning})" for policy, meaning in KNOBS.items())
        raise BadInput(f"policy {policy!r}: wanted a number above 0 for one of {known}")
    return Knob(name, value, chunk)
