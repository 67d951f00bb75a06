"""Plan months ahead: services that grow, the GPUs that they need, bought or rented, and the power that they draw.

The plan compares four ways to run the same services. Each way adds one thing: one request at a time, dynamic batching,
quantized weights, and offline work on the GPUs of the online service with the same model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import ceil, inf
from random import Random

from ballast_sim.errors import BadInput, Impossible
from ballast_sim.planner.costs import HOURS_PER_MONTH, GpuPrice, Purchases, buy_or_rent
from ballast_sim.planner.deployment import Deployment
from ballast_sim.planner.encoder import MOST_BATCH, EncoderSlo, encoder_limit
from ballast_sim.planner.fleet import STEP_SHARES, Progress
from ballast_sim.planner.inputs import PlanInputs, ServiceInput, is_embedding
from ballast_sim.replay.model_shape import Quantization, shape
from ballast_sim.replay.policies import Ballast
from ballast_sim.replay.step_model import BatchWork, Roofline
from ballast_sim.replay.traffic import Arrival

FULL_BATCH = 1024
"""Prompts in an encoder's step if only throughput counts."""
LENGTHS = 512
"""Requests that are drawn to represent a service."""
SEARCH_REQUESTS = 800
"""Requests of one simulation in the search for the highest rate of a service."""


@dataclass(frozen=True, slots=True)
class Way:
    """A way to run services."""

    name: str
    is_batching: bool
    quantization: Quantization
    is_mixing: bool


@dataclass(frozen=True, slots=True)
class Capacity:
    """The requests per second that one GPU serves of one service."""

    service: ServiceInput
    peak: float
    """Rate within the SLO."""
    full: float
    """Rate with full batches and no SLO: a utilization of 100 %."""
    mixed: float = 0.0
    """Utilization that a GPU reaches with offline work of the same model."""
    because: str = ""
    texts: float = inf
    """Rate of vLLM's API server for an encoder, of both classes together."""

    @property
    def is_offline(self) -> bool:
        """Whether the service has no SLO."""
        return self.service.kind == "offline"


@dataclass(slots=True)
class _Pool:
    """Online GPUs with one model in a month."""

    gpus: int = 0
    work: float = 0.0
    """Work of the online services, in GPUs."""
    left: float = 0.0
    """Work that offline services can add."""
    texts: float = 0.0
    """Texts per second that the API servers can add."""
    taken: float = 0.0
    """Work that they add."""


@dataclass(frozen=True, slots=True)
class Month:
    """One month of a growth plan."""

    number: int
    gpus: int
    owned: int
    rented: int
    utilization: float
    kilowatts: float
    hardware_dollars: float
    """Rent, and the loss in value of bought GPUs."""
    power_dollars: float
    """Electricity of bought GPUs. The rent of the others includes theirs."""

    @property
    def dollars(self) -> float:
        """Hardware and electricity."""
        return self.hardware_dollars + self.power_dollars


@dataclass(frozen=True, slots=True)
class ServiceCost:
    """The cost of one service over the whole plan, per million units."""

    name: str
    unit: str
    hardware_dollars: float
    power_dollars: float
    kilowatt_hours: float

    @property
    def dollars(self) -> float:
        """Hardware and electricity per million units."""
        return self.hardware_dollars + self.power_dollars


@dataclass(frozen=True, slots=True)
class GrowthPlan:
    """The plan of one way over all months."""

    way: Way
    months: tuple[Month, ...]
    services: tuple[ServiceCost, ...]
    because: tuple[str, ...]

    @property
    def dollars(self) -> float:
        """Cost of the whole plan."""
        return sum(month.dollars for month in self.months)

    def over_budget(self, kilowatts: float | None) -> Month | None:
        """Return the first month that draws more power than the budget; None without one."""
        return next((m for m in self.months if kilowatts is not None and m.kilowatts > kilowatts), None)


def plan_ahead(inputs: PlanInputs, progress: Progress = lambda _: None) -> list[GrowthPlan]:
    """Plan all ways. A way that is impossible is left out, and the reasons of the first plan name it.

    Raises:
        BadInput: there is no service, or a name is unknown.
        Impossible: each way misses the SLO of a service, or does not fit the GPU.
    """
    if not inputs.ahead.services:
        raise BadInput("there is nothing to plan ahead: name at least one service under `ahead.services`")
    gpu = inputs.find_device()
    usual = Quantization.FP8 if gpu.fp8_flops > gpu.flops else Quantization.INT8
    quantized = inputs.quantization or usual
    ways: tuple[Way, ...] = (
        Way("one request at a time", is_batching=False, quantization=Quantization.NONE, is_mixing=False),
        Way("dynamic batching", is_batching=True, quantization=Quantization.NONE, is_mixing=False),
        Way(f"and {quantized.value} weights", is_batching=True, quantization=quantized, is_mixing=False),
        Way("and mixing", is_batching=True, quantization=quantized, is_mixing=True),
    )
    ways = ways if quantized is not Quantization.NONE else (*ways[:2], ways[3])
    plans, left_out, rates = list[GrowthPlan](), list[str](), dict[tuple[str, Quantization, str], float]()
    for way in ways:
        progress(way.name)
        try:
            plans.append(_Ahead(inputs, way, rates).plan())
        except Impossible as error:
            left_out.append(f"{way.name!r} is left out: {error}")
            if len(left_out) == len(ways):
                raise
    return [replace(plans[0], because=(*left_out, *plans[0].because)), *plans[1:]]


@dataclass
class _Ahead:
    inputs: PlanInputs
    way: Way
    rates: dict[tuple[str, Quantization, str], float]
    """Rates that earlier ways found already: `full` and `peak` of a service, with the format of its weights."""

    def plan(self) -> GrowthPlan:
        inputs = self.inputs
        capacities = [self._capacity(service) for service in inputs.ahead.services]
        works = [[self._rate(c, month) / c.full for c in capacities] for month in range(inputs.ahead.months)]
        charged = [self._gpus(capacities, month) for month in range(inputs.ahead.months)]
        counts = [round(sum(gpus)) for gpus in charged]
        price, rows = GpuPrice(inputs.find_device(), inputs.energy, inputs.money), []
        paid = buy_or_rent(counts, price)
        for month, (count, work) in enumerate(zip(counts, works, strict=True)):
            used = sum(work) / count if count else 0.0
            rows.append(
                Month(
                    number=month + 1,
                    gpus=count,
                    owned=paid.owned[month],
                    rented=paid.rented[month],
                    utilization=used,
                    kilowatts=count * price.kilowatts(used),
                    hardware_dollars=paid.dollars[month],
                    power_dollars=paid.owned[month] * price.power_per_hour(used) * HOURS_PER_MONTH,
                )
            )
        because = [self._reason(capacity) for capacity in capacities]
        online_pools = {c.service.pool for c in capacities if not c.is_offline}
        if self.way.is_mixing and not any(c.is_offline and c.service.pool in online_pools for c in capacities):
            because.append("nothing to mix: no offline service has the model of an online service or an encoder")
        because += [_purchases(paid), *self._power(rows)]
        costs = tuple(self._cost(c, rows, [g[i] / sum(g) for g in charged]) for i, c in enumerate(capacities))
        return GrowthPlan(self.way, tuple(rows), costs, tuple(because))

    def _rate(self, capacity: Capacity, month: int) -> float:
        return capacity.service.rate(month, self.inputs.ahead.months)

    def _capacity(self, service: ServiceInput) -> Capacity:
        quantization = None if self.inputs.stated(service.model) else self.way.quantization
        inputs = self.inputs.model_copy(update={"model": service.model, "quantization": quantization})
        roofline = inputs.roofline(service.model, is_embedding=is_embedding(service))
        roofline.shape.check(f"service {service.name}", service.prompt_tokens, service.output_tokens)
        if roofline.shape.is_encoder:
            return self._encoder(inputs, service, roofline)
        lengths = draw_lengths(service, self.inputs.seed)
        online, offline = ((), lengths) if service.kind == "offline" else (lengths, ())
        deployment = Deployment.of(inputs, online, offline)
        mean = sum(a.num_tokens for a in lengths) / len(lengths)
        full = self._once(service, roofline, "full", lambda: deployment.unbounded(lengths) / mean)
        if not self.way.is_batching:
            return Capacity(service, self._alone(deployment, service), full)
        if offline:
            return Capacity(service, full, full)
        peak = self._once(service, roofline, "peak", lambda: self._highest_rate(deployment, lengths, full))
        if not self.way.is_mixing:
            return Capacity(service, peak, full)
        busiest = peak * (self.inputs.ahead.most_used_percent / 100)
        mixed = self._mixed(deployment, lengths, (busiest, busiest / service.peak_factor), full)
        return Capacity(service, peak, full, mixed, "" if mixed else "not mixed: offline work makes it miss the SLO")

    def _once(self, service: ServiceInput, roofline: Roofline, kind: str, found: Callable[[], float]) -> float:
        """Find a rate, unless an earlier way did."""
        key = service.name, roofline.quantization, kind
        if key not in self.rates:
            self.rates[key] = found()
        return self.rates[key]

    def _encoder(self, inputs: PlanInputs, service: ServiceInput, roofline: Roofline) -> Capacity:
        inputs.kv_tokens(roofline, service.prompt_tokens)  # raises Impossible
        prompt, api = service.prompt_tokens, inputs.api_server
        full = FULL_BATCH / roofline.predict(BatchWork.of_prompts(FULL_BATCH, prompt))
        if service.kind == "offline":
            rate = full if self.way.is_batching else 1 / roofline.predict(BatchWork.of_prompts(1, prompt))
            return Capacity(service, min(rate, api.texts_per_second), full, because=api.limit(rate))
        slo = EncoderSlo(
            latency=service.latency_milliseconds / 1e3,
            share=service.latency_percentile / 100,
            window=service.batch_window_milliseconds / 1e3 if self.way.is_batching else 0.0,
        )
        limit = encoder_limit(roofline, prompt, slo, most=MOST_BATCH if self.way.is_batching else 1)
        rate = limit.requests_per_second
        full, peak = max(full, rate), min(rate, api.texts_per_second)
        because = "; ".join(filter(None, (limit.because if self.way.is_batching else "", api.limit(rate))))
        mixed = peak / full if self.way.is_mixing else 0.0
        return Capacity(service, peak, full, mixed, because, api.texts_per_second)

    def _alone(self, deployment: Deployment, service: ServiceInput) -> float:
        """Return the requests per second if one is served after the other."""
        prompt, output = service.prompt_tokens, service.output_tokens
        first = deployment.model.predict(BatchWork.of_prompts(1, prompt))
        each = deployment.model.predict(BatchWork(num_decode=1, decode_context=prompt + output // 2))
        return 1 / (first + (output - 1) * each)

    def _highest_rate(self, deployment: Deployment, lengths: Sequence[Arrival], full: float) -> float:
        """Search for the highest rate of Poisson arrivals that one GPU serves within the SLO, to 3 %."""
        low, high = 0.0, full
        while high - low > 0.03 * full:
            middle = (low + high) / 2
            online = self._poisson(middle, lengths)
            result = deployment.alone(online, online[-1].seconds)
            low, high = (middle, high) if deployment.fits(result) else (low, middle)
        if not low:
            slo, model = deployment.inputs.slo, deployment.model
            raise Impossible(
                f"{model.shape.name} on one {model.gpu.name} does not meet {slo.ttft_milliseconds:g} ms TTFT "
                f"and {slo.tpot_milliseconds:g} ms TPOT even at {high:.2f} requests/s"
            )
        return low

    def _mixed(self, deployment: Deployment, lengths: Sequence[Arrival], rates: Sequence[float], full: float) -> float:
        """Return the utilization at the last rate, with offline work and within the SLO at all rates; 0 if none is."""
        mean = sum(a.num_tokens for a in lengths) / len(lengths)
        for share in STEP_SHARES:
            config = replace(deployment.config, tpot_share=share)
            for rate in rates:
                online = self._poisson(rate, lengths)
                seconds = online[-1].seconds
                result = deployment.run(Ballast, online=online, offline=lengths, seconds=seconds, config=config)
                if not deployment.fits(result):
                    break
            else:
                return result.total_tokens / mean / full
        return 0.0

    def _poisson(self, rate: float, lengths: Sequence[Arrival]) -> list[Arrival]:
        """Draw the same arrivals for every rate, only closer together, so no wait falls with the rate by chance."""
        random = Random(self.inputs.seed)
        seconds, arrivals = 0.0, []
        for _ in range(SEARCH_REQUESTS):
            arrivals.append(replace(random.choice(lengths), seconds=seconds))
            seconds += random.expovariate(rate)
        return arrivals

    def _gpus(self, capacities: Sequence[Capacity], month: int) -> list[float]:
        """Return the GPUs of a month that each service is charged for. Their sum is a whole number.

        Online services and encoders have GPUs for their peak within the SLO. Offline services first use the capacity
        that mixing leaves free on these, and then have GPUs for the rest of their mean rate. GPUs that are used by both
        are charged by the work on them.
        """
        most_used, pools = self.inputs.ahead.most_used_percent / 100, defaultdict[tuple[str, bool], _Pool](_Pool)
        charged, taken = [0.0] * len(capacities), [0.0] * len(capacities)
        for i, capacity in enumerate(capacities):
            if not capacity.is_offline:
                service, rate = capacity.service, self._rate(capacity, month)
                gpus = max(1, ceil(rate * service.peak_factor / (capacity.peak * most_used) - 1e-9))
                pool = pools[service.pool]
                pool.left += max(0.0, gpus * capacity.mixed - rate / capacity.full)
                pool.texts += max(0.0, gpus * capacity.texts - rate)
                pool.gpus += gpus
                pool.work += rate / capacity.full
                charged[i] = gpus
        for i, capacity in enumerate(capacities):
            if capacity.is_offline:
                pool, work = pools[capacity.service.pool], self._rate(capacity, month) / capacity.full
                taken[i] = min(work, pool.left, pool.texts / capacity.full)
                pool.left -= taken[i]
                pool.texts -= taken[i] * capacity.full
                pool.taken += taken[i]
                rest = ceil((work - taken[i]) * capacity.full / capacity.peak - 1e-9)
                charged[i] = max(0 if taken[i] else 1, rest)
        for i, capacity in enumerate(capacities):
            pool = pools[capacity.service.pool]
            each = pool.gpus / (pool.work + pool.taken) if pool.gpus else 0.0
            charged[i] = (
                charged[i] + each * taken[i] if capacity.is_offline else charged[i] / pool.gpus * each * pool.work
            )
        return charged

    def _cost(self, capacity: Capacity, months: Sequence[Month], shares: Sequence[float]) -> ServiceCost:
        """Return the cost and energy of a service, by its share of the GPUs of each month."""
        service = capacity.service
        is_encoder = not service.output_tokens
        each = 1 if is_encoder else service.prompt_tokens + service.output_tokens
        units = sum(self._rate(capacity, m) * each for m in range(len(months))) * HOURS_PER_MONTH * 3600 / 1e6

        def share_of(figures: Iterable[float]) -> float:
            return sum(share * figure for share, figure in zip(shares, figures, strict=True))

        return ServiceCost(
            name=service.name,
            unit="embeddings" if is_encoder else "tokens",
            hardware_dollars=share_of(month.hardware_dollars for month in months) / units,
            power_dollars=share_of(month.power_dollars for month in months) / units,
            kilowatt_hours=share_of(month.kilowatts for month in months) * HOURS_PER_MONTH / units,
        )

    def _power(self, months: Sequence[Month]) -> list[str]:
        """Return how many GPUs the power budget feeds, if it does not feed all."""
        energy, budget = self.inputs.energy, self.inputs.energy.budget_kilowatts
        over = next((month for month in months if budget is not None and month.kilowatts > budget), None)
        if over is None or budget is None:
            return []
        unit, fed = self.inputs.find_device().unit, int(budget / (over.kilowatts / over.gpus) + 1e-9)
        needs = f"{over.gpus} ({over.kilowatts:,.1f} kW, with the server's share and a PUE of {energy.pue:g})"
        return [f"{budget:g} kW feed {fed} {unit}s as busy as those of month {over.number}, which needs {needs}"]

    def _reason(self, capacity: Capacity) -> str:
        """Return the figures of one GPU for a service."""
        unit = self.inputs.find_device().unit
        line = f"{capacity.service.name} ({capacity.service.model}): one {unit} serves {capacity.peak:,.1f} requests/s"
        if not self.way.is_batching:
            line += " one after the other, without waiting"
        elif not capacity.is_offline:
            line += " within the SLO"
        line += f", {capacity.full:,.1f} in full batches"
        line += f"; mixed, its utilization is {capacity.mixed:.0%}" if capacity.mixed else ""
        stated = self.inputs.stated(capacity.service.model)
        line += f"; {stated} weights, as its config.json states" if stated else ""
        return line + (f" ({capacity.because})" if capacity.because else "")


def _purchases(paid: Purchases) -> str:
    """Return a sentence with the GPUs that are bought and rented by month."""
    buys = [f"{gpus} in month {month}" for month, gpus in enumerate(paid.bought, start=1) if gpus]
    first = next((month for month, gpus in enumerate(paid.rented, start=1) if gpus), None)
    bought = f"buy {', '.join(buys)}" if buys else "buy none"
    return bought + (f"; rent from month {first} on, {max(paid.rented)} at most" if first else "; rent none")


def draw_lengths(service: ServiceInput, seed: int) -> list[Arrival]:
    """Draw lengths with the means of a service, exponential as in real conversations, and cut at the context."""
    random, most = Random(seed), shape(service.model).max_context
    drawn = [(min(random.expovariate(1), 6.0), min(random.expovariate(1), 6.0)) for _ in range(LENGTHS)]
    outputs = _scaled([one for one, _ in drawn], service.output_tokens, [most - service.prompt_tokens] * LENGTHS)
    prompts = _scaled([one for _, one in drawn], service.prompt_tokens, [most - output for output in outputs])
    return [Arrival(0.0, prompt, output) for prompt, output in zip(prompts, outputs, strict=True)]


def _scaled(drawn: Sequence[float], mean: int, most: Sequence[int]) -> list[int]:
    """Return lengths in proportion to `drawn`, from 1 to `most` each, with the wanted mean."""

    def lengths(factor: float) -> list[int]:
        return [max(1, min(round(factor * one), longest)) for one, longest in zip(drawn, most, strict=True)]

    low, high = 0.0, max(most) / min(drawn)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(lengths(middle)) < mean * len(drawn) else (low, middle)
    return lengths(high)
