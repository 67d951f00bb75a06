"""Run Ballast and the baselines on the same traffic: one row for each policy, load and reservation.

A load of x % means online tokens (prompt and answer) per second at x % of the SLO-bound throughput. This is
the throughput of a GPU with offline work alone and every step within the TPOT.
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
from ballast_sim.comparison.baselines import PEERS, QpsCap
from ballast_sim.comparison.chart_series import ChartSeries, series
from ballast_sim.errors import BadInput
from ballast_sim.replay.jobs import SimulatedJob
from ballast_sim.replay.policies import Ballast, Fill, held_to
from ballast_sim.replay.replica import Policy
from ballast_sim.replay.report import Report, report
from ballast_sim.replay.simulation import Run, Scenario, simulate
from ballast_sim.replay.step_model import StepModel, profile
from ballast_sim.replay.traffic import Arrival, Trace, excerpt, repeated, tokens_per_second

UNSUSPENDED = "ballast-vllm"
"""Ballast as inside vLLM, which cannot suspend a step."""
POLICIES = ("online-only", "offline-only", "static-split", *PEERS, "qps-cap", "ballast", UNSUSPENDED)
"""The policies of `all`, in the order of the table."""
FITTED = "ballast-fitted"
"""Ballast with a cost model that it fits to the run's own steps, as a worker does. Not part of `all`."""
STATIC_BUDGET = "static-budget"
"""The best fixed step time, by brute force: printed above the table, and a policy by name. Not part of `all`."""
BUDGETS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Static budgets that are tried, as shares of the TPOT."""
STATIC_CHUNKS = (512, 2048)
"""Prefill chunks that are tried with each static budget. A given budget without a chunk has the last one."""
KNOBS = {
    STATIC_BUDGET: "milliseconds of a step, with `x512` behind them for chunks of 512 tokens",
    "qps-cap": "offline requests per second",
    "ballast": "percent of interference allowed",
    UNSUSPENDED: "the same",
    FITTED: "the same",
}
"""Policies that take a value, as in `static-budget=35`, and the meaning of the value."""
KNOWN = (*POLICIES, STATIC_BUDGET, FITTED)
"""All names of policies."""
MOST_LOST = 0.01
"""Attainment that a tuned baseline (qps-cap, static-budget, static-split) may lose against online-only."""
HIGHEST_ATTAINMENT = 0.99
"""The attainment of the highest load, see `Bench.highest`."""
MOST_LOAD = 1.5
"""Highest load in the search for the load that online alone attains."""
PARTS = 10
"""GPUs that static-split divides."""


class Knob(NamedTuple):
    """A policy, and the value that it was given."""

    name: str
    value: float | None = None
    chunk_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one policy at one load and reservation."""

    policy: str
    load: float
    reservation: float
    result: Report
    total_tokens: float
    """Tokens per second and GPU."""
    offline_tokens: float
    note: str
    series: ChartSeries


@dataclass
class Bench:
    """One traffic, one engine and one SLO, on which each row is run. It can be sent to another process."""

    trace: Trace
    offline: Sequence[Arrival]
    config: PolicyConfig
    model: StepModel
    seconds: float
    seed: int = 0
    noise: float = 0.0
    warmup_seconds: float = 60.0
    maximum_seconds: float = 900.0
    """Length of a run of offline work alone. The first third, in which the batch fills, does not count."""
    num_layers: int = 32
    """Layers of the model. A step can be suspended between two of them."""
    is_fitted: bool = False
    """Whether Ballast fits its cost model to the steps of the run. If not, it knows the step times, as baselines do."""
    is_paced: bool = False
    """Whether the trace keeps its own times. Otherwise, its times are scaled to a load."""
    bound_tpot: float | None = None
    """TPOT of the SLO-bound throughput; None for the TPOT of the SLO."""
    capped_slo: tuple[float, float] | None = None
    """TTFT and TPOT in seconds for Ballast in a row with its own cap. The rows are judged by `config`."""
    maximums: dict[str, Row] = field(default_factory=dict)
    """Results of offline work alone that were computed already."""
    alones: dict[float, Row] = field(default_factory=dict)
    """Results of online-only by load that were computed already."""

    def __post_init__(self) -> None:
        if self.seconds <= self.warmup_seconds:
            raise BadInput(f"a run of {self.seconds:g} s is not longer than its warm-up of {self.warmup_seconds:g} s")
        if not self.is_paced:
            tokens_per_second(self.trace)  # a trace without a span is refused before minutes are spent

    @cached_property
    def cost(self) -> CostModel:
        """Cost model of a profiling sweep."""
        return profile(self.model)

    # Maximum throughputs

    def maximum(self, name: str) -> Row:
        """Run offline work alone: in `full` batches without an SLO, or with every step `bound` to the TPOT."""
        if name not in self.maximums:
            held = partial(held_to, self.bound_tpot or self.config.tpot)
            policy = held if name == "bound" else Fill
            seconds = self.maximum_seconds
            scenario = replace(self.scenario(policy, ()), seconds=seconds, warmup_seconds=seconds / 3)
            self.maximums[name] = self._row("offline-only", 0.0, 0.0, simulate(scenario))
        return self.maximums[name]

    @property
    def unbounded(self) -> float:
        """Tokens per second of offline work alone, without an SLO."""
        return self.maximum("full").total_tokens

    @property
    def bound(self) -> float:
        """Tokens per second of offline work alone, with every step within the TPOT."""
        return self.maximum("bound").total_tokens

    def highest(self) -> Row:
        """Search for the highest load that online-only serves with 99 % attainment, to 2 % of the bound.

        The row has load 0 if no load reaches 99 %.
        """
        low, high = 0.0, MOST_LOAD
        while high - low > 0.02:
            middle = (low + high) / 2
            result = self.alone(middle).result
            is_met = result.keeps(HIGHEST_ATTAINMENT, HIGHEST_ATTAINMENT)
            low, high = (middle, high) if is_met else (low, middle)
        return self.alone(low) if low else replace(self.alone(high), load=0.0)

    # Traffic

    @property
    def own_load(self) -> float:
        """Load of the trace with its own times."""
        return tokens_per_second(self.trace) / self.bound

    def online(self, load: float) -> list[Arrival]:
        """Return the trace at a load, repeated if it is too short. A paced trace stays as it is."""
        if self.is_paced:
            return list(self.trace)
        rate = load * self.bound
        return excerpt(repeated(self.trace, rate * self.seconds), rate, self.seconds)

    def request_rate(self, load: float) -> float:
        """Return the online requests per second at a load."""
        online = self.online(load)
        return (len(online) - 1) / online[-1].seconds

    # Rows

    def alone(self, load: float) -> Row:
        """Run Ballast without a job. A loss against this row is the cost of offline work."""
        if load not in self.alones:
            scenario = replace(self.scenario(Ballast, self.online(load)), offline=list)
            self.alones[load] = self._row("online-only", load, 0.0, simulate(scenario))
        return self.alones[load]

    def rows(self, policy: str, load: float, reservations: Sequence[float]) -> list[Row]:
        """Run one policy. Baselines have no reservation, so each reservation judges the same run of a baseline."""
        name, value, chunk = knob(policy)
        if name in {"ballast", UNSUSPENDED, FITTED}:
            return [self._ballast(policy, load, reservation) for reservation in reservations]
        made: Callable[[], Policy] | None = partial(PEERS[name], self.config) if name in PEERS else None
        if value is not None:
            budget = partial(held_to, value / 1e3, chunk or STATIC_CHUNKS[-1])
            made = partial(QpsCap, rate=value) if name == "qps-cap" else budget
        if made is not None:
            run = simulate(self.scenario(made, self.online(load)))
            return [self._row(policy, load, reservation, run) for reservation in reservations]
        tuned: dict[str, Callable[[float], Row]] = {
            "online-only": self.alone,
            "offline-only": lambda _: self.maximum("full"),
            "static-split": self._static_split,
            "qps-cap": self._qps_cap,
            STATIC_BUDGET: self._static_budget,
        }
        row = tuned[policy](load)
        return [replace(row, policy=policy, load=load, reservation=reservation) for reservation in reservations]

    def _ballast(self, policy: str, load: float, reservation: float) -> Row:
        name, value, _ = knob(policy)
        can_suspend = self.config.can_suspend and name != UNSUSPENDED
        config = replace(self.config, offline_share=reservation, can_suspend=can_suspend)
        if value is not None:
            ttft, tpot = self.capped_slo or (config.ttft, config.tpot)
            config = replace(config, max_interference=value / 100, ttft=ttft, tpot=tpot)
        scenario = replace(
            self.scenario(Ballast, self.online(load)),
            config=config,
            cost=None if self.is_fitted or name == FITTED else self.cost,
        )
        return self._row(policy, load, reservation, simulate(scenario))

    def _static_budget(self, load: float) -> Row:
        """Run the fixed step time with the most tokens that keeps the attainment, by brute force."""
        kept = []
        for share, chunk in product(BUDGETS, STATIC_CHUNKS):
            budget = share * self.config.tpot
            run = simulate(self.scenario(partial(held_to, budget, chunk), self.online(load)))
            row = self._row(STATIC_BUDGET, load, 0.0, run, f"steps of {1e3 * budget:.1f} ms, chunks of {chunk}")
            kept += [row] if self.keeps(row) else []
        none = replace(self.alone(load), note="no static budget keeps the attainment")
        return max(kept, key=lambda row: row.total_tokens, default=none)

    def _qps_cap(self, load: float) -> Row:
        """Run the highest rate of offline requests that keeps the attainment, by bisection."""
        mean = sum(a.num_tokens for a in self.offline) / len(self.offline)
        low, high = 0.0, self.unbounded / mean
        best = replace(self.alone(load), note="no rate keeps the attainment")
        for _ in range(6):
            middle = (low + high) / 2
            run = simulate(self.scenario(partial(QpsCap, rate=middle), self.online(load)))
            row = self._row("qps-cap", load, 0.0, run, f"{middle:.2f} requests/s")
            if self.keeps(row):
                low, best = middle, row
            else:
                high = middle
        return best

    def _static_split(self, load: float) -> Row:
        """Run classes apart: the fewest of ten GPUs serve online alone, and the others serve offline without an SLO."""
        alone, full = self.alone(load).result, self.maximum("full").result
        for parts in range(max(1, ceil(load * PARTS / MOST_LOAD)), PARTS):
            row = self.alone(load * PARTS / parts)
            if self._within(row.result, alone):
                mine, other = parts / PARTS, (PARTS - parts) / PARTS
                goodput, slots = mine * row.result.goodput, (mine * row.result.online_slots, other * full.offline_slots)
                result = replace(row.result, goodput=goodput, online_slots=slots[0], offline_slots=slots[1])
                offline = other * self.unbounded
                total, note = mine * row.result.online.total + offline, f"{parts} of {PARTS} GPUs online"
                return replace(row, result=result, total_tokens=total, offline_tokens=offline, note=note)
        return replace(self.alone(load), note="all GPUs online")

    def keeps(self, row: Row) -> bool:
        """Return whether a row has the attainment of online-only, less `MOST_LOST`."""
        return self._within(row.result, self.alone(row.load).result)

    def keeps_cap(self, row: Row, cap: float) -> bool:
        """Return whether the p99 of TTFT and of TPOT are at most `cap` above those of online alone."""
        result, alone = row.result, self.alone(row.load).result
        pairs = ((result.ttft, alone.ttft), (result.tpot, alone.tpot))
        return all(found.p99 <= (1 + cap) * usual.p99 for found, usual in pairs)

    def keeps_its_own(self, row: Row, *, like: Row | None = None) -> bool:
        """Return whether a row keeps the cap of `like`, or the attainment if `like` has no cap.

        Without `like`, the row is judged by its own cap.
        """
        _, cap, _ = knob((like or row).policy)
        return self.keeps(row) if cap is None else self.keeps_cap(row, cap / 100)

    def best_static(self, rows: Iterable[Row], row: Row) -> Row | None:
        """Return the static budget with the most offline tokens that keeps the cap or the attainment of `row`.

        Return None if no static budget in `rows` does.
        """
        static = [each for each in rows if knob(each.policy).name == STATIC_BUDGET and each.load == row.load]
        kept = [each for each in static if self.keeps_its_own(each, like=row)]
        return max(kept, key=lambda each: each.offline_tokens, default=None)

    def _within(self, result: Report, alone: Report) -> bool:
        return result.keeps(alone.ttft_attainment - MOST_LOST, alone.tpot_attainment - MOST_LOST)

    def _row(self, policy: str, load: float, reservation: float, run: Run, note: str = "") -> Row:
        result = report(run, replace(self.config, offline_share=reservation))
        total, offline = result.total_tokens, result.offline.total
        return Row(policy, load, reservation, result, total, offline, note, series(run))

    def scenario(self, policy: Callable[[], Policy], online: Sequence[Arrival]) -> Scenario:
        """Return the scenario of one run, without a reservation."""
        return Scenario(
            config=replace(self.config, offline_share=0.0),
            model=self.model,
            policy=policy,
            online=online,
            offline=lambda: [SimulatedJob.endless("offline", self.offline)],
            seconds=self.seconds,
            warmup_seconds=self.warmup_seconds,
            seed=self.seed,
            noise=self.noise,
            num_layers=self.num_layers,
            cost=self.cost,
        )


def knob(policy: str) -> Knob:
    """Split `name=value`, or raise BadInput. The value is None if there is none, and else a number above 0."""
    name, sign, text = policy.partition("=")
    if name not in KNOWN:
        raise BadInput(f"unknown policy {policy!r}; known are all, {', '.join(KNOWN)}")
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
        raise BadInput(f"policy {policy!r}: expected a number above 0 for one of {known}")
    return Knob(name, value, chunk)
