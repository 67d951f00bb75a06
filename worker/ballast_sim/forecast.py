"""Plan months ahead: services that grow, the GPUs they need, bought or rented, and the power they draw.

Four ways to run the same services are compared, each adding one thing: one request at a time, dynamic batching,
quantized weights, and offline work mixed into the GPUs of the online service that serves the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from ballast_policy.cost import attended
from ballast_sim.capacity import STEP_SHARES
from ballast_sim.deployment import Ballast, Deployment
from ballast_sim.encoder import encoder_limit
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.inputs import PlanInputs, ServiceInput
from ballast_sim.price import HOURS_PER_MONTH, Price
from ballast_sim.shape import Quantization, shape
from ballast_sim.step_model import Roofline, Work
from ballast_sim.traffic import Arrival

LENGTHS = 512
"""Requests drawn to stand for a service."""
SEARCH_REQUESTS = 800
"""Traffic of one simulation in the search for a service's highest rate."""
MOST_USED = 0.9
"""Share of the highest rate that a GPU is planned for at the peak."""

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Way:
    """How services are run."""

    name: str
    is_batching: bool
    quantization: Quantization
    is_mixing: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """What one GPU does for one service, in requests per second."""

    peak: float
    """Within the SLO."""
    full: float
    """With full batches and no SLO: what a utilization of 100 % means."""
    mixed: float = 0.0
    """Utilization that a GPU reaches when offline work of the same model fills it up."""


@dataclass(frozen=True, slots=True)
class Month:
    """One month of a way."""

    number: int
    gpus: int
    bought: int
    """Owned so far."""
    rented: int
    utilization: float
    kilowatts: float
    dollars: float


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """What one service comes to over the whole plan."""

    name: str
    unit: str
    dollars_per_million: float
    kilowatt_hours_per_million: float


@dataclass(frozen=True, slots=True)
class Outlook:
    """One way over all months."""

    way: Way
    months: tuple[Month, ...]
    services: tuple[ServiceCost, ...]
    because: tuple[str, ...]

    @property
    def dollars(self) -> float:
        """Over the whole plan."""
        return sum(month.dollars for month in self.months)

    def over_budget(self, kilowatts: float | None) -> Month | None:
        """The first month that draws more than the site may."""
        return next((m for m in self.months if kilowatts is not None and m.kilowatts > kilowatts), None)


def plan_ahead(inputs: PlanInputs, progress: Progress = lambda _: None) -> list[Outlook]:
    """Compute all ways; one that cannot meet an SLO is left out, unless none can.

    Raises:
        BadInput: there is no service, or a name is not known.
        Impossible: no way serves some service; says by which figure.
    """
    if not inputs.ahead.services:
        raise BadInput("there is nothing to plan ahead: name at least one service under `ahead.services`")
    gpu = inputs.find_gpu(inputs.gpu)
    quantized = inputs.quantization
    if quantized is Quantization.NONE:
        quantized = Quantization.FP8 if gpu.fp8_flops > gpu.flops else Quantization.INT8
    ways = (
        Way("one request at a time", is_batching=False, quantization=Quantization.NONE, is_mixing=False),
        Way("dynamic batching", is_batching=True, quantization=Quantization.NONE, is_mixing=False),
        Way(f"and {quantized.value} weights", is_batching=True, quantization=quantized, is_mixing=False),
        Way("and mixing", is_batching=True, quantization=quantized, is_mixing=True),
    )
    outlooks, impossible = [], None
    for way in ways:
        progress(way.name)
        try:
            outlooks.append(_Ahead(inputs, way).outlook())
        except Impossible as error:
            impossible = error
    if not outlooks and impossible:
        raise impossible
    return outlooks


@dataclass
class _Ahead:
    inputs: PlanInputs
    way: Way

    def outlook(self) -> Outlook:
        inputs = self.inputs
        services = inputs.ahead.services
        capacities = [self._capacity(service) for service in services]
        months = range(inputs.ahead.months)
        needs = [self._gpus(services, capacities, month) for month in months]
        counts = [sum(need) for need in needs]
        rented, bought, paid = self._pay(counts)
        price, rows = Price(inputs.find_gpu(inputs.gpu), inputs.energy, inputs.money), []
        for month in months:
            work = sum(s.rate(month, len(months)) / c.full for s, c in zip(services, capacities, strict=True))
            used = work / counts[month] if counts[month] else 0.0
            power = counts[month] * price.kilowatts(used)
            dollars = paid[month] + bought[month] * price.power_per_hour(used) * HOURS_PER_MONTH
            rows.append(Month(month + 1, counts[month], bought[month], rented[month], used, power, dollars))
        costs = self._costs(services, capacities, rows)
        because = tuple(self._reason(s, c) for s, c in zip(services, capacities, strict=True))
        return Outlook(self.way, tuple(rows), costs, because)

    def _capacity(self, service: ServiceInput) -> Capacity:
        update = {"model": service.model, "quantization": self.way.quantization}
        inputs = self.inputs.model_copy(update=update)
        if service.kind == "encoder":
            return self._encoder(inputs, service)
        lengths = draw_lengths(service, self.inputs.seed)
        deployment = Deployment.of(inputs, lengths)
        full_tokens = deployment.unbounded(lengths)
        mean = sum(a.num_tokens for a in lengths) / len(lengths)
        if not self.way.is_batching:
            alone = self._alone(deployment, service)
            return Capacity(alone, full_tokens / mean)
        full = full_tokens / mean
        if service.kind == "offline":
            return Capacity(full, full)
        peak = self._highest_rate(deployment, lengths, full)
        average = peak * MOST_USED / service.peak_factor
        return Capacity(peak, full, self._mixed(deployment, lengths, average, full) if self.way.is_mixing else 0.0)

    def _encoder(self, inputs: PlanInputs, service: ServiceInput) -> Capacity:
        model = shape(service.model)
        if not model.is_encoder:
            raise BadInput(f"service {service.name}: {model.name} generates text; its kind is online or offline")
        roofline = Roofline(model, inputs.find_gpu(inputs.gpu), inputs.quantization, inputs.efficiency.value())
        full = encoder_limit(roofline, service.prompt_tokens, 1.0).requests_per_second
        if not self.way.is_batching:
            one = encoder_limit(roofline, service.prompt_tokens, service.latency_milliseconds / 1e3, most=1)
            return Capacity(one.requests_per_second, full)
        limit = encoder_limit(roofline, service.prompt_tokens, service.latency_milliseconds / 1e3)
        return Capacity(limit.requests_per_second, max(full, limit.requests_per_second))

    def _alone(self, deployment: Deployment, service: ServiceInput) -> float:
        """Requests per second, one after the other."""
        prompt, output = service.prompt_tokens, service.output_tokens
        first = deployment.model.seconds(Work(prompt, attended(0, prompt), num_chunks=1))
        each = deployment.model.seconds(Work(num_decode=1, decode_context=prompt + output // 2))
        return 1 / (first + (output - 1) * each)

    def _highest_rate(self, deployment: Deployment, lengths: Sequence[Arrival], full: float) -> float:
        """Requests per second of Poisson arrivals that one GPU serves within the SLO, to 3 %."""
        low, high = 0.0, full
        while high - low > 0.03 * full:
            middle = (low + high) / 2
            online = self._poisson(middle, lengths)
            result = deployment.alone(online, online[-1].seconds)
            low, high = (middle, high) if deployment.fits(result) else (low, middle)
        if not low:
            slo = deployment.inputs.slo
            raise Impossible(
                f"{deployment.shape.name} on one {deployment.gpu.name} does not keep {slo.ttft_milliseconds:g} ms TTFT "
                f"and {slo.tpot_milliseconds:g} ms TPOT even at {high:.2f} requests/s"
            )
        return low

    def _mixed(self, deployment: Deployment, lengths: Sequence[Arrival], rate: float, full: float) -> float:
        """Utilization of a GPU at the average online rate with offline work filling it up, the SLO kept."""
        online = self._poisson(rate, lengths)
        mean = sum(a.num_tokens for a in lengths) / len(lengths)
        for share in STEP_SHARES:
            config = replace(deployment.config, tpot_share=share)
            result = deployment.run(Ballast, online=online, offline=lengths, seconds=online[-1].seconds, config=config)
            if deployment.fits(result):
                return result.total_tokens / mean / full
        return 0.0

    def _poisson(self, rate: float, lengths: Sequence[Arrival]) -> list[Arrival]:
        """The same arrivals for every rate, only closer together, so that more of them never wait less by chance."""
        random = Random(self.inputs.seed)
        seconds, arrivals = 0.0, []
        for _ in range(SEARCH_REQUESTS):
            arrivals.append(replace(random.choice(lengths), seconds=seconds))
            seconds += random.expovariate(rate)
        return arrivals

    def _gpus(self, services: Sequence[ServiceInput], capacities: Sequence[Capacity], month: int) -> list[int]:
        """GPUs of each service: the peak within the SLO; offline the average, in what mixing leaves over first."""
        months = self.inputs.ahead.months
        needs = []
        left: dict[str, float] = {}
        for service, capacity in zip(services, capacities, strict=True):
            if service.kind == "offline":
                needs.append(0)
                continue
            rate = service.rate(month, months)
            gpus = ceil(rate * service.peak_factor / (capacity.peak * MOST_USED) - 1e-9)
            spare = gpus * capacity.mixed - rate / capacity.full
            left[service.model] = left.get(service.model, 0.0) + max(0.0, spare)
            needs.append(gpus)
        for index, (service, capacity) in enumerate(zip(services, capacities, strict=True)):
            if service.kind == "offline":
                work = service.rate(month, months) / capacity.peak
                taken = min(work, left.get(service.model, 0.0))
                left[service.model] = left.get(service.model, 0.0) - taken
                needs[index] = ceil(work - taken - 1e-9)
        return needs

    def _pay(self, counts: Sequence[int]) -> tuple[list[int], list[int], list[float]]:
        """Decide for each GPU that is ever needed whether it is bought; give rented, owned and dollars by month."""
        money = self.inputs.money
        price = Price(self.inputs.find_gpu(self.inputs.gpu), self.inputs.energy, money)
        rented, owned, paid = ([0] * len(counts) for _ in range(3))
        dollars = [float(x) for x in paid]
        for index in range(max(counts)):
            needed = [month for month, count in enumerate(counts) if count > index]
            held = len(counts) - needed[0]
            rent = len(needed) * HOURS_PER_MONTH * price.gpu.dollars_per_hour
            buy = price.purchase_for(held)
            power = held * HOURS_PER_MONTH * price.power_per_hour(1.0)
            if money.way == "buy" or (money.way == "cheapest" and buy + power < rent):
                for month in range(needed[0], len(counts)):
                    owned[month] += 1
                    dollars[month] += buy / held
            else:
                for month in needed:
                    rented[month] += 1
                    dollars[month] += HOURS_PER_MONTH * price.gpu.dollars_per_hour
        return rented, owned, dollars

    def _costs(
        self, services: Sequence[ServiceInput], capacities: Sequence[Capacity], months: Sequence[Month]
    ) -> tuple[ServiceCost, ...]:
        """Split each month's money and energy by the work done."""
        found = []
        works = [
            [s.rate(m, len(months)) / c.full for s, c in zip(services, capacities, strict=True)]
            for m in range(len(months))
        ]
        for index, service in enumerate(services):
            each = 1 if service.kind == "encoder" else service.prompt_tokens + service.output_tokens
            units = sum(service.rate(m, len(months)) * each for m in range(len(months))) * HOURS_PER_MONTH * 3600 / 1e6
            shares = [work[index] / sum(work) for work in works]
            dollars = sum(share * month.dollars for share, month in zip(shares, months, strict=True))
            energy = sum(s * m.kilowatts for s, m in zip(shares, months, strict=True)) * HOURS_PER_MONTH
            unit = "embeddings" if service.kind == "encoder" else "tokens"
            found.append(ServiceCost(service.name, unit, dollars / units, energy / units))
        return tuple(found)

    def _reason(self, service: ServiceInput, capacity: Capacity) -> str:
        """One GPU's figures for a service."""
        line = f"{service.name}: one GPU serves {capacity.peak:,.1f} requests/s"
        line += "" if service.kind == "offline" else " within the SLO"
        line += f", {capacity.full:,.1f} in full batches"
        return line + (f"; mixed it is used to {capacity.mixed:.0%}" if capacity.mixed else "")


def draw_lengths(service: ServiceInput, seed: int) -> list[Arrival]:
    """Lengths around a service's means, spread as those of real conversations are (exponential, cut at six means)."""
    random = Random(seed)
    most = shape(service.model).max_context

    def draw(mean: int) -> int:
        return max(1, round(min(random.expovariate(1 / mean), 6 * mean)))

    lengths = []
    for _ in range(LENGTHS):
        output = min(draw(service.output_tokens), most // 2)
        lengths.append(Arrival(0.0, min(draw(service.prompt_tokens), most - output), output))
    return lengths
