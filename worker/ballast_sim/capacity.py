"""How many GPUs the traffic needs, apart and mixed, what a million tokens costs, and whether mixing pays at all.

Utilization here is work: the tokens a GPU serves over what it serves with full batches of the same lengths. One GPU's
worth of work is a GPU at 100 %.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import ceil

from ballast_policy.learning.cost import attended
from ballast_sim.deployment import Ballast, Deployment
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.inputs import PlanInputs
from ballast_sim.price import Price
from ballast_sim.report import Report
from ballast_sim.step_model import BatchWork
from ballast_sim.traffic import Arrival, Trace, at_rate, excerpt, tokens_per_second

STEP_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5)
"""Shares of the TPOT that steps may be filled to; the largest that keeps the SLO is taken."""
MOST_SIMULATED = 16
"""GPUs of a larger fleet that are simulated, with their part of the traffic."""

FEWEST_MIXED = "mixed, fewest GPUs"

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Tokens per second of one GPU that serves nothing else."""

    online_full: float
    """Online lengths in full batches, no SLO: what a utilization of 100 % means for online."""
    offline_full: float
    """Offline lengths in full batches."""
    offline_bound: float
    """Offline lengths with every step within the TPOT: the most while online decodes are resident."""

    @property
    def bound_share(self) -> float:
        """What is left of a GPU's throughput when its steps are held to the TPOT."""
        return self.offline_bound / self.offline_full


@dataclass(frozen=True, slots=True)
class Option:
    """One way to serve the traffic."""

    name: str
    gpus: int
    utilization: float
    mfu: float
    ttft_attainment: float
    tpot_attainment: float
    online_tokens: float
    """Per second, over all GPUs."""
    offline_tokens: float
    dollars_per_hour: float
    online_dollars: float
    """Per million tokens."""
    offline_dollars: float
    kilowatts: float
    note: str = ""
    step_share: float = 0.0
    """Of the TPOT that mixed steps are filled to."""

    @property
    def kilowatt_hours(self) -> float:
        """Per million tokens of both classes."""
        return per_million(self.kilowatts, self.online_tokens + self.offline_tokens)


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """The answer, with what it rests on."""

    deployment: Deployment
    ceilings: Ceilings
    online_tokens: float
    """What online asks for, tokens per second."""
    offline_tokens: float
    work: float
    """Both, in GPUs' worth."""
    batch_ceiling: int
    batch_ceiling_because: str
    options: tuple[Option, ...]
    because: tuple[str, ...]

    @property
    def mixed(self) -> Option | None:
        """The fewest mixed GPUs that do the work."""
        return next((option for option in self.options if option.name == FEWEST_MIXED), None)


def plan_fleet(
    inputs: PlanInputs, online: Trace, offline: Sequence[Arrival], progress: Progress = lambda _: None
) -> FleetPlan:
    """Compute the fleet of the inputs (GPUs apart at their utilization), right-sized, and mixed.

    Raises:
        BadInput: an unknown name or a trace too short.
        Impossible: the model or the SLO cannot be served on this GPU by anyone.
    """
    if not online or not offline:
        raise BadInput("a plan needs an online trace and offline lengths with at least one request each")
    tokens_per_second(online)  # refused before minutes are spent on the ceilings
    deployment = Deployment.of(inputs, online, offline)
    _check_prefill(deployment, online)
    return _Planner(inputs, deployment, online, offline, progress).plan()


def _check_prefill(deployment: Deployment, online: Trace) -> None:
    """Whether an idle GPU prefills enough of the prompts within the TTFT."""
    wanted = deployment.inputs.slo.attainment_percent / 100
    prompts = sorted(arrival.num_prompt for arrival in online)
    prompt = prompts[ceil(wanted * len(prompts) - 1e-9) - 1]
    seconds = deployment.model.seconds(BatchWork(prompt, attended(0, prompt), num_chunks=1))
    if seconds > deployment.ttft:
        raise Impossible(
            f"TTFT of {1e3 * deployment.ttft:g} ms is below the fastest prefill for {wanted:.0%} of requests: their "
            f"prompts have up to {prompt:,} tokens, which take {1e3 * seconds:.1f} ms on an idle {deployment.gpu.name}"
        )


@dataclass
class _Planner:
    inputs: PlanInputs
    deployment: Deployment
    trace: Trace
    offline: Sequence[Arrival]
    progress: Progress
    _ones: dict[tuple[int, int], Report] = field(default_factory=dict)

    def plan(self) -> FleetPlan:
        fleet = self.inputs.fleet
        self.progress("measuring the ceilings of one GPU")
        self.ceilings = ceilings = measure(self.deployment, self.trace, self.offline)
        if min(ceilings.online_full, ceilings.offline_full, ceilings.offline_bound) <= 0:
            raise BadInput(f"ceilingMinutes is {self.inputs.ceiling_minutes:g}: no request ends in so little time")
        self.online_tokens = fleet.online_gpus * fleet.online_utilization_percent / 100 * ceilings.online_full
        self.offline_tokens = fleet.offline_gpus * fleet.offline_utilization_percent / 100 * ceilings.offline_full
        seconds = self.inputs.traffic_minutes * 60
        self.part = min(1.0, MOST_SIMULATED / fleet.online_gpus)
        if self.trace[0].num_tokens >= self.part * self.online_tokens * seconds:
            raise BadInput(f"trafficMinutes is {self.inputs.traffic_minutes:g}: one request is all that comes in it")
        self.online = excerpt(self.trace, self.part * self.online_tokens, seconds)
        self.seconds = min(seconds, self.online[-1].seconds)
        options = [self._given(), self._right_sized()]
        mixed = self._fewest_mixed(most=fleet.online_gpus + fleet.offline_gpus)
        options += [mixed] if mixed else []
        same = self._mixed(fleet.online_gpus, f"mixed on the same {fleet.online_gpus}")
        options += [same] if same else []
        ceiling, why = self.deployment.batch_ceiling(self.trace)
        return FleetPlan(
            deployment=self.deployment,
            ceilings=ceilings,
            online_tokens=self.online_tokens,
            offline_tokens=self.offline_tokens,
            work=self.online_tokens / ceilings.online_full + self.offline_tokens / ceilings.offline_full,
            batch_ceiling=ceiling,
            batch_ceiling_because=why,
            options=tuple(options),
            because=tuple(self._reasons(options[1], mixed, same)),
        )

    def _given(self) -> Option:
        """The fleet as it stands: each class on GPUs of its own."""
        fleet = self.inputs.fleet
        self.progress(f"simulating {fleet.online_gpus} online GPUs apart")
        result = self._online_alone(fleet.online_gpus)
        return self._apart("apart, as it is", fleet.online_gpus, fleet.offline_gpus, result)

    def _right_sized(self) -> Option:
        """Apart with as few GPUs as keep the SLO and do the offline work."""
        offline = ceil(self.offline_tokens / self.ceilings.offline_full - 1e-9)
        most = self.inputs.fleet.online_gpus
        self.progress("looking for the fewest online GPUs apart")
        least = _fewest(lambda gpus: self.deployment.fits(self._online_alone(gpus)), most)
        if least is None:
            note = f"no number up to {most} keeps the SLO even without offline work"
            return replace(self._given(), name="apart, fewest GPUs", note=note)
        return self._apart("apart, fewest GPUs", least, offline, self._online_alone(least))

    def _online_alone(self, gpus: int) -> Report:
        """One of so many GPUs that serve online alone."""
        return self.deployment.alone(self._traffic(1, gpus), self.seconds)

    def _traffic(self, simulated: int, gpus: int) -> list[Arrival]:
        """What so many of `gpus` get of the online traffic: every so many-th request."""
        kept = simulated / gpus / self.part
        if kept > 1:
            return at_rate(self.online, self.online_tokens * simulated / gpus)
        return [a for i, a in enumerate(self.online) if int((i + 1) * kept) > int(i * kept)]

    def _fewest_mixed(self, most: int) -> Option | None:
        """As few GPUs as serve both classes."""
        needed = self.offline_tokens
        work = self.online_tokens / self.ceilings.online_full + needed / self.ceilings.offline_full
        least = _fewest(lambda gpus: self._step_share(gpus, needed) is not None, most, low=ceil(work))
        for gpus in range(least or most + 1, most + 1):
            option = self._mixed(gpus, FEWEST_MIXED, needed)
            if option:
                return option
        return None

    def _step_share(self, gpus: int, needed: float) -> int | None:
        """Index of the largest step share with which one of so many GPUs keeps the SLO and does its part of `needed`.

        Both fall with the share: bisection.
        """
        self.progress(f"simulating one of {gpus} mixed GPUs")
        if self._one(gpus, 0).offline.total * gpus < needed:
            return None
        low, high = 0, len(STEP_SHARES)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.deployment.fits(self._one(gpus, middle)) else (middle + 1, high)
        if low == len(STEP_SHARES) or self._one(gpus, low).offline.total * gpus < needed:
            return None
        return low

    def _one(self, gpus: int, share: int) -> Report:
        """One of so many mixed GPUs, with its steps filled to a share of the TPOT."""
        if (gpus, share) not in self._ones:
            self._ones[gpus, share] = self.deployment.run(
                Ballast,
                online=self._traffic(1, gpus),
                offline=self.offline,
                seconds=self.seconds,
                config=replace(self.deployment.config, tpot_share=STEP_SHARES[share]),
            )
        return self._ones[gpus, share]

    def _mixed(self, gpus: int, name: str, needed: float = 0.0) -> Option | None:
        """All of them behind a router, with the largest step share that keeps the SLO."""
        start = self._step_share(gpus, needed)
        for share in STEP_SHARES[start:] if start is not None else ():
            simulated = min(gpus, MOST_SIMULATED)
            self.progress(f"simulating {simulated} mixed GPUs behind a router")
            whole = self._routed(simulated, gpus, share)
            if self.deployment.fits(whole):
                offline = whole.offline.total * gpus / simulated
                return self._shared(name, gpus, whole, offline, share) if offline >= needed else None
        return None

    def _routed(self, simulated: int, gpus: int, share: float) -> Report:
        """So many of the mixed GPUs behind a router."""
        return self.deployment.run(
            Ballast,
            online=self._traffic(simulated, gpus),
            offline=self.offline,
            seconds=self.seconds,
            replicas=simulated,
            config=replace(self.deployment.config, tpot_share=share),
        )

    def _apart(self, name: str, online_gpus: int, offline_gpus: int, result: Report) -> Option:
        online_work = self.online_tokens / self.ceilings.online_full
        offline_work = self.offline_tokens / self.ceilings.offline_full
        price = self._price
        online_each = online_work / online_gpus
        offline_each = offline_work / offline_gpus if offline_gpus else 0.0
        online_cost = online_gpus * price.per_hour(online_each)
        offline_cost = offline_gpus * price.per_hour(offline_each)
        gpus = online_gpus + offline_gpus
        return Option(
            name=name,
            gpus=gpus,
            utilization=(online_work + offline_work) / gpus,
            mfu=self._mfu(self.online_tokens, self.offline_tokens, gpus),
            ttft_attainment=result.ttft_attainment,
            tpot_attainment=result.tpot_attainment,
            online_tokens=self.online_tokens,
            offline_tokens=self.offline_tokens,
            dollars_per_hour=online_cost + offline_cost,
            online_dollars=per_million(online_cost, self.online_tokens),
            offline_dollars=per_million(offline_cost, self.offline_tokens),
            kilowatts=online_gpus * price.kilowatts(online_each) + offline_gpus * price.kilowatts(offline_each),
            note=f"{online_gpus} online + {offline_gpus} offline",
        )

    def _shared(self, name: str, gpus: int, result: Report, offline: float, step_share: float) -> Option:
        online_work = self.online_tokens / self.ceilings.online_full
        offline_work = offline / self.ceilings.offline_full
        work = online_work + offline_work
        cost = gpus * self._price.per_hour(work / gpus)
        return Option(
            name=name,
            gpus=gpus,
            utilization=work / gpus,
            mfu=self._mfu(self.online_tokens, offline, gpus),
            ttft_attainment=result.ttft_attainment,
            tpot_attainment=result.tpot_attainment,
            online_tokens=self.online_tokens,
            offline_tokens=offline,
            dollars_per_hour=cost,
            online_dollars=per_million(cost * online_work / work, self.online_tokens),
            offline_dollars=per_million(cost * offline_work / work, offline),
            kilowatts=gpus * self._price.kilowatts(work / gpus),
            note=f"steps filled to {step_share:.0%} of the TPOT"
            + (f", {MOST_SIMULATED} of them simulated" if gpus > MOST_SIMULATED else ""),
            step_share=step_share,
        )

    @property
    def _price(self) -> Price:
        return Price(self.deployment.gpu, self.inputs.energy, self.inputs.money)

    def _mfu(self, online: float, offline: float, gpus: int) -> float:
        deployment = self.deployment
        operations = online * deployment.operations_per_token(self.trace)
        operations += offline * deployment.operations_per_token(self.offline)
        return operations / (gpus * deployment.gpu.flops)

    def _reasons(self, apart: Option, mixed: Option | None, same: Option | None) -> list[str]:
        """Why the figures are as they are, each with its own."""
        fleet, ceilings, tpot = self.inputs.fleet, self.ceilings, self.inputs.slo.tpot_milliseconds
        work = self.online_tokens / ceilings.online_full + self.offline_tokens / ceilings.offline_full
        lines = [
            (
                f"{fleet.online_gpus} GPUs at {fleet.online_utilization_percent:g} % and {fleet.offline_gpus} at "
                f"{fleet.offline_utilization_percent:g} % are {work:.1f} GPUs of work: {ceil(work / 0.7 - 1e-9)} GPUs "
                "at 70 % by arithmetic alone."
            ),
            (
                f"Full batches without an SLO do {ceilings.offline_full:,.0f} offline tokens/s on one GPU. With steps "
                f"held to {tpot:g} ms they do {ceilings.offline_bound:,.0f} ({ceilings.bound_share:.0%}): every "
                "step reads the weights once, whatever it holds. That is the most that a mixed GPU can be utilized."
            ),
        ]
        lines.append(self._verdict(apart, mixed))
        lines += self._why_not_fewer(mixed) if mixed else []
        if same and self.offline_tokens:
            more = same.offline_tokens / self.offline_tokens
            lines.append(
                f"The same {fleet.online_gpus} GPUs, mixed, do {more:.1f} times the offline work of today's "
                f"{fleet.offline_gpus} offline GPUs beside their online work, at {same.utilization:.0%}."
            )
        return lines

    def _why_not_fewer(self, mixed: Option) -> list[str]:
        """What one GPU fewer would miss."""
        gpus = mixed.gpus - 1
        if gpus < 1:
            return []
        fits = [share for share in range(len(STEP_SHARES)) if self.deployment.fits(self._one(gpus, share))][:1]
        if not fits:
            found = self._one(gpus, len(STEP_SHARES) - 1)
            missed = f"TTFT met by {found.ttft_attainment:.2%}, TPOT by {found.tpot_attainment:.2%}"
            return [f"{gpus} mixed GPUs miss the SLO even with steps filled to {STEP_SHARES[-1]:.0%}: {missed}."]
        done = self._one(gpus, fits[0]).offline.total * gpus
        if done < self.offline_tokens:
            steps = f"with the SLO kept (steps filled to {STEP_SHARES[fits[0]]:.0%})"
            return [f"{gpus} mixed GPUs do {done:,.0f} of the {self.offline_tokens:,.0f} offline tokens/s {steps}."]
        return [f"{gpus} mixed GPUs do it each for itself, but not behind a router, which spreads requests unevenly."]

    def _verdict(self, apart: Option, mixed: Option | None) -> str:
        """Whether mixing pays."""
        given = self.inputs.fleet.online_gpus + self.inputs.fleet.offline_gpus
        if mixed is None:
            last = self._one(given, len(STEP_SHARES) - 1)
            return (
                f"No number of mixed GPUs up to {given} keeps the SLO and does the offline work: mixing does not pay. "
                f"With steps filled to {STEP_SHARES[-1]:.0%}, {given} do {last.offline.total * given:,.0f} of the "
                f"{self.offline_tokens:,.0f} offline tokens/s, and TTFT is met by {last.ttft_attainment:.2%}, TPOT by "
                f"{last.tpot_attainment:.2%}."
            )
        more = mixed.offline_tokens / apart.offline_tokens if apart.offline_tokens else 1.0
        if mixed.gpus < apart.gpus:
            return (
                f"Mixing needs {mixed.gpus} GPUs where classes apart need {apart.gpus} at least ({apart.note}) and "
                f"{given} stand today: {1 - mixed.gpus / given:.0%} fewer."
            )
        if mixed.gpus == apart.gpus and more > 1:
            return (
                f"Mixing saves no GPU against {apart.gpus} apart when right-sized ({apart.note}; {given} stand today), "
                f"but does {more:.1f} times the offline work on them and lets bursts of online use them all."
            )
        return (
            f"Mixing does not pay here: {mixed.gpus} mixed GPUs against {apart.gpus} apart when right-sized "
            f"({apart.note}). With steps held to the TPOT an offline token costs "
            f"{1 / self.ceilings.bound_share - 1:.0%} more."
        )


def measure(deployment: Deployment, online: Sequence[Arrival], offline: Sequence[Arrival]) -> Ceilings:
    """Simulate one GPU with nothing but each class's lengths."""
    return Ceilings(
        online_full=deployment.unbounded(online),
        offline_full=deployment.unbounded(offline),
        offline_bound=deployment.slo_bound(offline),
    )


def _fewest(works: Callable[[int], bool], most: int, low: int = 1) -> int | None:
    """Smallest number, `low` to `most`, that works, given that all larger ones do; by bisection."""
    high = most + 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle + 1, high)
    return low if low <= most else None


def per_million(per_hour: float, tokens_per_second: float) -> float:
    """What a million tokens takes of something that is counted by the hour."""
    return per_hour / 3600 / tokens_per_second * 1e6 if tokens_per_second else 0.0
