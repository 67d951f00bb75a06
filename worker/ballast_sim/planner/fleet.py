"""Compute the GPUs that the traffic needs, apart and mixed, the cost of a million tokens, and whether mixing pays.

Utilization means work: the tokens that a GPU serves over those that it serves with full batches of the same lengths.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, inf, isnan

from ballast_sim.errors import BadInput
from ballast_sim.planner.costs import GpuPrice
from ballast_sim.planner.deployment import Deployment, check_minutes
from ballast_sim.planner.fleet_plan import (
    FEWEST_APART,
    FEWEST_MIXED,
    FEWEST_REQUESTS,
    MOST_SIMULATED,
    FleetPlan,
    FleetTraffic,
    MaximumThroughputs,
    Option,
    per_million,
)
from ballast_sim.planner.inputs import PlanInputs
from ballast_sim.replay.feasibility import within_context
from ballast_sim.replay.policies import Ballast, Fill
from ballast_sim.replay.report import Report
from ballast_sim.replay.simulation import warmup_of
from ballast_sim.replay.traffic import Arrival, Trace, at_zero, busiest, excerpt, peak_rate, repeated, tokens_per_second

STEP_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of the TPOT to which steps may be filled. The planner takes the largest one that meets the SLO."""

FEWEST_REPLAYED = 3
"""Fewest requests of a replay. The first one is in the warm-up, and the last one comes at the end."""

Progress = Callable[[str], None]


def plan_fleet(
    inputs: PlanInputs,
    online: Trace,
    offline: Sequence[Arrival],
    progress: Progress = lambda _: None,
    *,
    has_own_load: bool = False,
) -> FleetPlan:
    """Compute today's fleet of the inputs, the fewest GPUs with classes apart, and mixed GPUs.

    With `has_own_load`, the busiest minutes of the trace set the load, and today's online GPUs follow from it.

    Raises:
        BadInput: a name is unknown, or a trace is too short.
        Impossible: this GPU cannot serve the model within the SLO.
    """
    tokens_per_second(online)  # a bad trace is refused before minutes are spent on the simulations
    deployment = Deployment.of(inputs, online, offline)
    fitting, items = (within_context(deployment.model.shape, traffic) for traffic in (online, offline))
    too_long = len(online) - len(fitting) + len(offline) - len(items)
    trace = at_zero(fitting)
    if has_own_load:  # refuse a sparse trace before any simulation
        _replayed(trace, peak_rate(trace, 60 * inputs.traffic_minutes), inputs.traffic_minutes)
    return _Planner(inputs, deployment, trace, items, progress, has_own_load, too_long).plan()


@dataclass
class _Planner:
    inputs: PlanInputs
    deployment: Deployment
    trace: Trace
    offline: Sequence[Arrival]
    progress: Progress
    has_own_load: bool
    num_too_long: int
    """Requests that are left out because they are longer than the context of the model."""
    _alone: dict[int, Report] = field(default_factory=dict)
    """Simulations that were run already, by GPUs."""
    _mixed_runs: dict[tuple[int, int, int], Report] = field(default_factory=dict)
    """The same of mixed GPUs, by the arguments of `_routed`."""

    def plan(self) -> FleetPlan:
        self.progress(f"measuring the maximum throughput of one {self._unit}")
        alone = self.deployment.maximum(Fill, self.trace)
        full, bound = self.deployment.unbounded(self.offline), self.deployment.slo_bound(self.offline)
        self.maximums = maximums = MaximumThroughputs(alone.total_tokens, full, bound)
        self._size()
        fleet = self.inputs.fleet
        self.online_tokens = fleet.online_gpus * fleet.online_utilization_percent / 100 * maximums.online_full
        self.offline_tokens = fleet.offline_gpus * fleet.offline_utilization_percent / 100 * maximums.offline_full
        self.traffic = self._traffic(alone)
        given, apart = self._given(), self._right_sized()
        mixed = self._fewest_mixed(most=fleet.online_gpus + fleet.offline_gpus)
        same = self._mixed(fleet.online_gpus, f"mixed on the same {fleet.online_gpus}")
        ceiling, why = self.deployment.batch_ceiling(self.trace)
        options = tuple(option for option in (given, apart, mixed, same) if option)
        most = self.inputs.energy.budget_kilowatts or inf
        above = f"above energy.budgetKilowatts, {most:g} kW"
        over = [f"{one.name}: {one.kilowatts:,.2f} kW, {above}." for one in options if one.kilowatts > most]
        return FleetPlan(
            deployment=self.deployment,
            traffic=self.traffic,
            maximums=maximums,
            offline_tokens=self.offline_tokens,
            work=sum(self._work(self.offline_tokens)),
            batch_ceiling=ceiling,
            batch_ceiling_because=why,
            options=options,
            because=(*self._reasons(apart, mixed, same), *over),
            offline=self.offline,
        )

    def _size(self) -> None:
        """Set the GPUs of today that follow from a load: those that have the utilization of the inputs with it."""
        fleet, maximums, used = self.inputs.fleet, self.maximums, dict[str, float]()
        if self.has_own_load:
            work = peak_rate(self.trace, 60 * self.inputs.traffic_minutes) / maximums.online_full
            gpus = max(1, ceil(100 * work / fleet.online_utilization_percent - 1e-9))
            used |= {"online_gpus": gpus, "online_utilization_percent": 100 * work / gpus}
        if fleet.offline_tokens_per_second is not None:
            work = fleet.offline_tokens_per_second / maximums.offline_full
            gpus = max(1, ceil(100 * work / fleet.offline_utilization_percent - 1e-9)) if work else 0
            used |= {"offline_gpus": gpus, "offline_utilization_percent": 100 * work / max(1, gpus)}
        self.inputs = self.inputs.model_copy(update={"fleet": fleet.model_copy(update=used)})
        self.deployment = replace(self.deployment, inputs=self.inputs)

    def _traffic(self, alone: Report) -> FleetTraffic:
        """Return the busiest requests of the trace, with their times scaled to the load of the plan."""
        minutes, tokens = self.inputs.traffic_minutes, self.online_tokens
        part, seconds = min(1.0, MOST_SIMULATED / self.inputs.fleet.online_gpus), 60 * minutes
        rows, span, online = _replayed(self.trace, part * tokens, minutes)
        sets = "These minutes set" if self.has_own_load else "fleet.onlineGpus and fleet.onlineUtilizationPercent set"
        source = (
            f"The trace has {tokens_per_second(self.trace):,.0f} online tokens/s, and up to "
            f"{peak_rate(self.trace, seconds):,.0f} within {minutes:g} minutes. {sets} the load, {tokens:,.0f} "
            f"tokens/s: the plan replays requests {rows.start + 1:,} to {rows.stop:,}, which took {span:,.0f} s, in "
            f"{seconds:,.0f} s."
        )
        seconds = min(seconds, online[-1].seconds)
        answer = self.deployment.answer_seconds(self.trace, alone, most=self.deployment.config.tpot)
        check_minutes("trafficMinutes", minutes, seconds - warmup_of(seconds), answer)
        today = 1 / min(self.inputs.fleet.online_gpus, MOST_SIMULATED)  # the share of one of today's GPUs
        return FleetTraffic(part, online, seconds, tokens, source, least=min(today, FEWEST_REQUESTS / len(online)))

    @property
    def _unit(self) -> str:
        return self.deployment.model.gpu.unit

    def _given(self) -> Option:
        """Return today's fleet, with each class on its own GPUs."""
        fleet = self.inputs.fleet
        self.progress(f"simulating {fleet.online_gpus} online {self._unit}s apart")
        result = self._online_alone(fleet.online_gpus)
        if not result.num_online:
            raise BadInput(
                f"no online request arrives at one of {fleet.online_gpus} {self._unit}s after the warm-up: the traffic "
                "is too sparse. Increase trafficMinutes, or use fewer online GPUs"
            )
        return self._apart("apart, as it is", fleet.online_gpus, fleet.offline_gpus, result)

    def _right_sized(self) -> Option | None:
        """Return the fewest GPUs that meet the SLO and do the offline work with classes apart; None if no number does.

        Online GPUs are searched up to all of today's, as mixed GPUs are.
        """
        work, fleet = self._work(self.offline_tokens), self.inputs.fleet
        online, offline = (ceil(one - 1e-9) for one in work)
        self.progress(f"searching for the fewest online {self._unit}s apart")
        fits, most = self.deployment.fits, fleet.online_gpus + fleet.offline_gpus
        least = _fewest(lambda gpus: fits(self._online_alone(gpus)), most, low=online)
        name = f"{FEWEST_APART} {self._unit}s"
        return None if least is None else self._apart(name, least, offline, self._online_alone(least))

    def _online_alone(self, gpus: int) -> Report:
        """Simulate one of `gpus` GPUs that serve online alone."""
        if gpus not in self._alone:
            self._alone[gpus] = self.deployment.alone(self.traffic.of(1, gpus), self.traffic.seconds)
        return self._alone[gpus]

    def _fewest_mixed(self, most: int) -> Option | None:
        """Return the fewest GPUs that serve both classes; None if no number does."""
        needed = self.offline_tokens
        low = ceil(sum(self._work(needed)) - 1e-9)
        least = _fewest(lambda gpus: self._step_share(gpus, needed) is not None, most, low=low)
        for gpus in range(least or most + 1, most + 1):
            if option := self._mixed(gpus, f"{FEWEST_MIXED} {self._unit}s", needed):
                return option
        return None

    def _step_share(self, gpus: int, needed: float) -> int | None:
        """Return the index of the largest step share with which one of `gpus` meets the SLO and does its part of
        `needed`; None if no share does both.
        """
        self.progress(f"simulating one of {gpus} mixed {self._unit}s")
        if self._routed(1, gpus, 0).offline.total * gpus < needed:
            return None
        largest = self._largest_share(1, gpus)
        return None if largest is None or self._routed(1, gpus, largest).offline.total * gpus < needed else largest

    def _largest_share(self, simulated: int, gpus: int, start: int = 0) -> int | None:
        """Return the index of the largest step share from `start` on that meets the SLO; None if none does.

        Latency falls with the share, so this bisects if the first one does not meet it.
        """

        def fits(share: int) -> bool:
            return self.deployment.fits(self._routed(simulated, gpus, share))

        return start if fits(start) else _fewest(fits, len(STEP_SHARES) - 1, low=start + 1)

    def _mixed(self, gpus: int, name: str, needed: float = 0.0) -> Option | None:
        """Simulate all GPUs behind a router, with the largest step share that meets the SLO; None if no share does."""
        start, simulated = self._step_share(gpus, needed), min(gpus, MOST_SIMULATED)
        self.progress(f"simulating {simulated} mixed {self._unit}s behind a router")
        share = None if start is None else self._largest_share(simulated, gpus, start)
        if share is None:
            return None
        whole = self._routed(simulated, gpus, share)
        offline = whole.offline.total * gpus / simulated
        if offline < needed:
            return None
        note = f"steps filled to {STEP_SHARES[share]:.0%} of the TPOT"
        note += f", {MOST_SIMULATED} of them simulated" if gpus > MOST_SIMULATED else ""
        return replace(self._option(name, (gpus,), offline, whole, note), step_share=STEP_SHARES[share])

    def _routed(self, simulated: int, gpus: int, share: int) -> Report:
        """Simulate `simulated` of the mixed GPUs behind a router, with their steps filled to a share of the TPOT."""
        if (simulated, gpus, share) not in self._mixed_runs:
            self._mixed_runs[simulated, gpus, share] = self.deployment.run(
                Ballast,
                online=self.traffic.of(simulated, gpus),
                offline=self.offline,
                seconds=self.traffic.seconds,
                replicas=simulated,
                config=replace(self.deployment.config, tpot_share=STEP_SHARES[share]),
            )
        return self._mixed_runs[simulated, gpus, share]

    def _apart(self, name: str, online_gpus: int, offline_gpus: int, result: Report) -> Option:
        note = f"{online_gpus} online + {offline_gpus} offline"
        return self._option(name, (online_gpus, offline_gpus), self.offline_tokens, result, note)

    def _option(self, name: str, parts: tuple[int, ...], offline: float, result: Report, note: str) -> Option:
        """Return the figures of a fleet with one part of the GPUs for each class, or with one part for both."""
        work, gpus = self._work(offline), sum(parts)
        price = GpuPrice(self.deployment.model.gpu, self.inputs.energy, self.inputs.money)
        loads = work if len(parts) > 1 else (sum(work),)
        used = [load / number if number else 0.0 for load, number in zip(loads, parts, strict=True)]
        costs = [number * price.per_hour(one) for one, number in zip(used, parts, strict=True)]
        by_class = costs if len(parts) > 1 else [costs[0] * one / sum(work) for one in work]
        return Option(
            name=name,
            gpus=gpus,
            utilization=sum(work) / gpus,
            mfu=self._mfu(offline, gpus),
            ttft_attainment=result.ttft_attainment,
            tpot_attainment=result.tpot_attainment,
            online_tokens=self.online_tokens,
            offline_tokens=offline,
            dollars_per_hour=sum(costs),
            online_dollars=per_million(by_class[0], self.online_tokens),
            offline_dollars=per_million(by_class[1], offline),
            kilowatts=sum(number * price.kilowatts(one) for one, number in zip(used, parts, strict=True)),
            note=note,
        )

    def _work(self, offline: float) -> tuple[float, float]:
        """Return the work of both classes in GPUs, with `offline` tokens per second."""
        return self.online_tokens / self.maximums.online_full, offline / self.maximums.offline_full

    def _mfu(self, offline: float, gpus: int) -> float:
        each = self.deployment.operations_per_token
        operations = self.online_tokens * each(self.trace) + offline * each(self.offline)
        return operations / (gpus * self.deployment.model.rated_flops)

    def _reasons(self, apart: Option | None, mixed: Option | None, same: Option | None) -> list[str]:
        """Return the reasons for the figures."""
        fleet, maximums, unit = self.inputs.fleet, self.maximums, self._unit
        tpot, work = self.inputs.slo.tpot_milliseconds, sum(self._work(self.offline_tokens))
        longest, over = self.deployment.model.shape.longest, self.num_too_long
        lines = [
            self.traffic.source,
            *([f"Left out: {over:,} of the requests, longer than the context: {longest}."] if over else []),
            (
                f"{fleet.online_gpus} {unit}s at {fleet.online_utilization_percent:.4g} % and {fleet.offline_gpus} at "
                f"{fleet.offline_utilization_percent:.4g} % are {work:.1f} {unit}s of work: {ceil(work / 0.7 - 1e-9)} "
                f"{unit}s at 70 % by arithmetic alone."
            ),
            (
                f"Full batches without an SLO do {maximums.offline_full:,.0f} offline tokens/s on one {unit}. With "
                f"every step within {tpot:g} ms they do {maximums.offline_bound:,.0f} ({maximums.bound_share:.0%}), "
                f"because every step reads all weights once. This is the highest utilization of a mixed {unit}."
            ),
            self._verdict(apart, mixed),
            *(self._why_not_fewer(mixed) if mixed else []),
        ]
        if same and self.offline_tokens:
            more = same.offline_tokens / self.offline_tokens
            lines.append(
                f"The same {fleet.online_gpus} {unit}s, mixed, do {more:.1f} times the offline work of today's "
                f"{fleet.offline_gpus} offline {unit}s in addition to their online work, at {same.utilization:.0%}."
            )
        return lines

    def _why_not_fewer(self, mixed: Option) -> list[str]:
        """Return the reason why one GPU fewer is not enough."""
        gpus, unit = mixed.gpus - 1, self._unit
        if gpus < 1:
            return []
        largest = self._largest_share(1, gpus)
        if largest is None:
            found = self._routed(1, gpus, len(STEP_SHARES) - 1)
            steps = f"steps filled to {STEP_SHARES[-1]:.0%}"
            return [f"{gpus} mixed {unit}s miss the SLO even with {steps}: {_attained(found)}."]
        done = self._routed(1, gpus, largest).offline.total * gpus
        if done < self.offline_tokens:
            steps = f"within the SLO (steps filled to {STEP_SHARES[largest]:.0%})"
            return [f"{gpus} mixed {unit}s do {done:,.0f} of the {self.offline_tokens:,.0f} offline tokens/s {steps}."]
        return [f"{gpus} mixed {unit}s are enough with even parts of the requests, not behind the simulated router."]

    def _verdict(self, apart: Option | None, mixed: Option | None) -> str:
        """Return whether mixing pays."""
        given, unit = self.inputs.fleet.online_gpus + self.inputs.fleet.offline_gpus, self._unit
        alone = f"no number of separate online {unit}s up to {given} meets the SLO"
        if mixed is None:
            last = self._routed(1, given, len(STEP_SHARES) - 1)
            done, needed = last.offline.total * given, self.offline_tokens
            does = "the offline work" if done >= needed else f"{done:,.0f} of the {needed:,.0f} offline tokens/s"
            return (
                f"No number of mixed {unit}s up to {given} meets the SLO and does the offline work: "
                f"{'mixing does not pay' if apart else alone + ', either'}. With steps filled to "
                f"{STEP_SHARES[-1]:.0%}, {given} do {does}, with {_attained(last)}."
            )
        if apart is None:
            return f"Mixing needs {mixed.gpus} {unit}s, and {alone}, even without offline work."
        more = mixed.offline_tokens / apart.offline_tokens if apart.offline_tokens else 1.0
        if mixed.gpus < apart.gpus:
            return (
                f"Mixing needs {mixed.gpus} {unit}s. Classes apart need at least {apart.gpus} ({apart.note}), and "
                f"today's fleet has {given}: {1 - mixed.gpus / given:.0%} fewer."
            )
        if mixed.gpus == apart.gpus and more > 1:
            return (
                f"Mixing saves no {unit}: classes apart need {apart.gpus}, too ({apart.note}; today's fleet has "
                f"{given}). But it does {more:.1f} times the offline work on them, and online bursts can use all of "
                "them."
            )
        return (
            f"Mixing does not pay here: it needs {mixed.gpus} {unit}s, and classes apart need {apart.gpus} "
            f"({apart.note}). With every step within the TPOT, an offline token costs "
            f"{1 / self.maximums.bound_share - 1:.0%} more."
        )


def _replayed(trace: Trace, tokens: float, minutes: float) -> tuple[range, float, list[Arrival]]:
    """Return the rows with the tokens of these minutes in the least time, their seconds, and them scaled to the time.

    Raises:
        BadInput: they have too few requests.
    """
    trace = repeated(trace, 60 * minutes * tokens)
    rows = busiest(trace, 60 * minutes * tokens)
    online = at_zero(trace[rows.start : rows.stop])
    replayed = excerpt(online, tokens, 60 * minutes)
    if len(replayed) < FEWEST_REPLAYED:
        found = f"trafficMinutes is {minutes:g}: fewer than {FEWEST_REPLAYED} requests arrive in this time"
        raise BadInput(f"{found}. Increase it, or use a busier trace")
    return rows, online[-1].seconds, replayed


def _attained(found: Report) -> str:
    if isnan(found.ttft_attainment):
        return "no online request in the measured part"
    tpot = "" if isnan(found.tpot_attainment) else f", TPOT by {found.tpot_attainment:.2%}"
    return f"TTFT met by {found.ttft_attainment:.2%}{tpot}"


def _fewest(works: Callable[[int], bool], most: int, low: int = 1) -> int | None:
    """Bisect for the smallest number from `low` to `most` that works; None if none does. All larger numbers work."""
    found = low + bisect_left(range(low, most + 1), x=True, key=works)
    return found if found <= most else None
