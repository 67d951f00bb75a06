"""Plan months ahead: services that grow, the GPUs they need, bought or rented, and the power they draw.

Four ways to run the same services are compared, each adding one thing: one request at a time, dynamic batching,
quantized weights, and offline work mixed into the GPUs of the online service that serves the same model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from ballast_policy.learning.cost import attended
from ballast_sim.capacity import STEP_SHARES
from ballast_sim.deployment import Ballast, Deployment
from ballast_sim.encoder import Promise, batch_seconds, encoder_limit
from ballast_sim.errors import BadInput, Impossible
from ballast_sim.inputs import PlanInputs, ServiceInput
from ballast_sim.memory import kv_tokens
from ballast_sim.payment import Payments, pay
from ballast_sim.price import HOURS_PER_MONTH, Price
from ballast_sim.shape import Quantization, Shape, shape
from ballast_sim.step_model import BatchWork, Roofline
from ballast_sim.traffic import Arrival

FULL_BATCH = 1024
"""Prompts in an encoder's step when only throughput counts."""
LENGTHS = 512
"""Requests drawn to stand for a service."""
SEARCH_REQUESTS = 800
"""Traffic of one simulation in the search for a service's highest rate."""

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
    because: str = ""


@dataclass(frozen=True, slots=True)
class Month:
    """One month of a way."""

    number: int
    gpus: int
    owned: int
    rented: int
    utilization: float
    kilowatts: float
    hardware_dollars: float
    """Rent, and what bought GPUs lose in value."""
    power_dollars: float
    """Electricity of the bought ones; the rent of the others holds theirs."""

    @property
    def dollars(self) -> float:
        """Both."""
        return self.hardware_dollars + self.power_dollars


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """What one service comes to over the whole plan."""

    name: str
    unit: str
    hardware_dollars: float
    """Per million."""
    power_dollars: float
    kilowatt_hours: float

    @property
    def dollars(self) -> float:
        """Per million, hardware and electricity."""
        return self.hardware_dollars + self.power_dollars


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
        price, rows = Price(inputs.find_gpu(inputs.gpu), inputs.energy, inputs.money), []
        paid = pay(counts, price)
        for month in months:
            work = sum(s.rate(month, len(months)) / c.full for s, c in zip(services, capacities, strict=True))
            used = work / counts[month] if counts[month] else 0.0
            rows.append(
                Month(
                    number=month + 1,
                    gpus=counts[month],
                    owned=paid.owned[month],
                    rented=paid.rented[month],
                    utilization=used,
                    kilowatts=counts[month] * price.kilowatts(used),
                    hardware_dollars=paid.dollars[month],
                    power_dollars=paid.owned[month] * price.power_per_hour(used) * HOURS_PER_MONTH,
                )
            )
        because = [self._reason(s, c) for s, c in zip(services, capacities, strict=True)]
        waited_for = {service.model for service in services if service.kind != "offline"}
        if self.way.is_mixing and not any(s.kind == "offline" and s.model in waited_for for s in services):
            because.append("nothing to mix: no offline service has the model of one that people wait for")
        because += [_purchases(paid), *self._power(rows)]
        return Outlook(self.way, tuple(rows), self._costs(services, capacities, rows), tuple(because))

    def _capacity(self, service: ServiceInput) -> Capacity:
        update = {"model": service.model, "quantization": self.way.quantization}
        inputs = self.inputs.model_copy(update=update)
        model = inputs.find_shape(service.model)
        _check(service, model)
        if model.is_encoder:
            return self._encoder(inputs, service, model)
        lengths = draw_lengths(service, self.inputs.seed)
        deployment = Deployment.of(inputs, lengths)
        mean = sum(a.num_tokens for a in lengths) / len(lengths)
        full = deployment.unbounded(lengths) / mean
        if not self.way.is_batching:
            return Capacity(self._alone(deployment, service), full)
        if service.kind == "offline":
            return Capacity(full, full)
        peak = self._highest_rate(deployment, lengths, full)
        average = peak * self._most_used / service.peak_factor
        return Capacity(peak, full, self._mixed(deployment, lengths, average, full) if self.way.is_mixing else 0.0)

    @property
    def _most_used(self) -> float:
        return self.inputs.ahead.most_used_percent / 100

    def _encoder(self, inputs: PlanInputs, service: ServiceInput, model: Shape) -> Capacity:
        gpu = inputs.find_gpu(inputs.gpu)
        kv_tokens(inputs, gpu, model, service.prompt_tokens)
        roofline = Roofline(model, gpu, inputs.quantization, inputs.efficiency.value())
        prompt = service.prompt_tokens
        full = FULL_BATCH / batch_seconds(roofline, FULL_BATCH, prompt)
        if service.kind == "offline":
            return Capacity(full if self.way.is_batching else 1 / batch_seconds(roofline, 1, prompt), full)
        promise = Promise(
            latency=service.latency_milliseconds / 1e3,
            share=service.latency_percentile / 100,
            window=service.batch_window_milliseconds / 1e3 if self.way.is_batching else 0.0,
        )
        if not self.way.is_batching:
            return Capacity(encoder_limit(roofline, prompt, promise, most=1).requests_per_second, full)
        limit = encoder_limit(roofline, prompt, promise)
        peak = limit.requests_per_second
        full = max(full, peak)
        return Capacity(peak, full, peak / full if self.way.is_mixing else 0.0, limit.because)

    def _alone(self, deployment: Deployment, service: ServiceInput) -> float:
        """Requests per second, one after the other."""
        prompt, output = service.prompt_tokens, service.output_tokens
        first = deployment.model.seconds(BatchWork(prompt, attended(0, prompt), num_chunks=1))
        each = deployment.model.seconds(BatchWork(num_decode=1, decode_context=prompt + output // 2))
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
            gpus = ceil(rate * service.peak_factor / (capacity.peak * self._most_used) - 1e-9)
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
            is_encoder = not service.output_tokens
            each = 1 if is_encoder else service.prompt_tokens + service.output_tokens
            units = sum(service.rate(m, len(months)) * each for m in range(len(months))) * HOURS_PER_MONTH * 3600 / 1e6
            shares = [work[index] / sum(work) for work in works]
            found.append(
                ServiceCost(
                    name=service.name,
                    unit="embeddings" if is_encoder else "tokens",
                    hardware_dollars=sum(s * m.hardware_dollars for s, m in zip(shares, months, strict=True)) / units,
                    power_dollars=sum(s * m.power_dollars for s, m in zip(shares, months, strict=True)) / units,
                    kilowatt_hours=sum(s * m.kilowatts for s, m in zip(shares, months, strict=True))
                    * HOURS_PER_MONTH
                    / units,
                )
            )
        return tuple(found)

    def _power(self, months: Sequence[Month]) -> list[str]:
        """What a power budget feeds, where it does not feed all."""
        budget = self.inputs.energy.budget_kilowatts
        over = next((month for month in months if budget is not None and month.kilowatts > budget), None)
        if over is None or budget is None:
            return []
        fed = int(budget / (over.kilowatts / over.gpus) + 1e-9)
        needs = (
            f"{over.gpus} ({over.kilowatts:,.1f} kW, the server's share and a PUE of {self.inputs.energy.pue:g} in it)"
        )
        return [f"{budget:g} kW feed {fed} GPUs as busy as those of month {over.number}, which needs {needs}"]

    def _reason(self, service: ServiceInput, capacity: Capacity) -> str:
        """One GPU's figures for a service."""
        line = f"{service.name}: one GPU serves {capacity.peak:,.1f} requests/s"
        if not self.way.is_batching:
            line += " one after the other, waiting left out"
        elif service.kind != "offline":
            line += " within the SLO"
        line += f", {capacity.full:,.1f} in full batches"
        line += f"; mixed it is used to {capacity.mixed:.0%}" if capacity.mixed else ""
        return line + (f" ({capacity.because})" if capacity.because else "")


def _check(service: ServiceInput, model: Shape) -> None:
    """Whether the model can do what the service asks for."""
    if model.is_encoder == bool(service.output_tokens):
        wanted = "is an encoder: outputTokens is 0" if model.is_encoder else "generates text: outputTokens is 1 or more"
        raise BadInput(f"service {service.name}: {model.name} {wanted}")
    tokens = service.prompt_tokens + service.output_tokens
    if tokens > model.max_context:
        raise BadInput(
            f"service {service.name}: {tokens:,} tokens of prompt and answer on average, but {model.name} takes at "
            f"most {model.max_context:,}"
        )


def _purchases(paid: Payments) -> str:
    """When how many are bought and rented, in a sentence."""
    buys = [f"{gpus} in month {month}" for month, gpus in enumerate(paid.bought, start=1) if gpus]
    first = next((month for month, gpus in enumerate(paid.rented, start=1) if gpus), None)
    bought = f"buy {', '.join(buys)}" if buys else "buy none"
    return bought + (f"; rent from month {first} on, {max(paid.rented)} at most" if first else "; rent none")


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
