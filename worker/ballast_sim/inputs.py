"""What a plan is computed from: one YAML file, every figure with a default that is printed and can be changed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import Field, ValidationError, model_validator

from ballast_api.base import ApiModel
from ballast_api.errors import InvalidConfig
from ballast_sim.errors import BadInput
from ballast_sim.hardware import GPUS, Gpu
from ballast_sim.shape import KV_BYTES, Quantization, Shape, shape
from ballast_sim.step_model import Efficiency
from ballast_sim.worksheet import worksheet

_EFFICIENCY = Efficiency()
MOST_TOKENS = 10_000_000
MOST_GPUS = 100_000
MOST_RATE = 1e9
Rate = Annotated[float, Field(ge=1e-6, le=MOST_RATE)]
"""Requests per second."""


class GpuInput(ApiModel):
    """A GPU: a known one with figures changed, or a new one with all of them."""

    teraflops: float | None = Field(default=None, gt=0)
    """Dense bfloat16."""
    fp8_teraflops: float | None = Field(default=None, gt=0)
    terabytes_per_second: float | None = Field(default=None, gt=0)
    memory_gigabytes: float | None = Field(default=None, gt=0)
    watts: float | None = Field(default=None, gt=0)
    """At full load."""
    idle_watts: float | None = Field(default=None, ge=0)
    dollars_per_hour: float | None = Field(default=None, ge=0)
    """Rented."""
    purchase_dollars: float | None = Field(default=None, ge=0)
    """Bought, its share of the server included."""

    def onto(self, name: str, known: Gpu | None) -> Gpu:
        """The known GPU with what is given here in place of its own figures."""
        fp8 = self.fp8_teraflops or (self.teraflops if known is None else None)
        given = {
            "flops": _times(self.teraflops, 1e12),
            "fp8_flops": _times(fp8, 1e12),
            "bandwidth": _times(self.terabytes_per_second, 1e12),
            "memory": _times(self.memory_gigabytes, 1e9),
            "watts": self.watts,
            "idle_watts": self.idle_watts,
            "dollars_per_hour": self.dollars_per_hour,
            "purchase_dollars": self.purchase_dollars,
        }
        figures = {key: value for key, value in given.items() if value is not None}
        if known is not None:
            return Gpu(name, **{key: figures.get(key, getattr(known, key)) for key in given})
        if len(figures) < len(given):
            missing = ", ".join(key for key in given if key not in figures)
            raise BadInput(f"gpus.{name} is not a known GPU, so all its figures are needed; missing: {missing}")
        return Gpu(name, **figures)


class EfficiencyInput(ApiModel):
    """How much of the data sheet is reached; the defaults match published step times of an A100."""

    compute: float = Field(default=_EFFICIENCY.compute, gt=0, le=1)
    bandwidth: float = Field(default=_EFFICIENCY.bandwidth, gt=0, le=1)
    kv_bandwidth: float = Field(default=_EFFICIENCY.kv_bandwidth, gt=0, le=1)
    step_milliseconds: float = Field(default=1000 * _EFFICIENCY.step_seconds, ge=0)
    sequence_microseconds: float = Field(default=1e6 * _EFFICIENCY.sequence_seconds, ge=0)

    def value(self) -> Efficiency:
        """In the step model's units."""
        return Efficiency(
            self.compute,
            self.bandwidth,
            self.kv_bandwidth,
            self.step_milliseconds / 1e3,
            self.sequence_microseconds / 1e6,
        )


class SloInput(ApiModel):
    """What online requests are promised, and how many of them must get it."""

    ttft_milliseconds: float = Field(default=1000, gt=0)
    tpot_milliseconds: float = Field(default=50, gt=0)
    attainment_percent: float = Field(default=99, gt=0, le=100)


class EngineInput(ApiModel):
    """One replica: one engine on one GPU."""

    slots: int = Field(default=256, ge=1, le=4096)
    chunk_tokens: int = Field(default=512, ge=16, le=MOST_TOKENS)
    """Most prefill tokens in a step."""
    memory_percent: float = Field(default=92, gt=0, le=100)
    """Of the GPU's memory, for weights and KV."""
    block_tokens: int = Field(default=16, ge=1, le=4096)
    kv_dtype: Literal["bfloat16", "fp8", "int8"] = "bfloat16"
    """How the KV cache is stored."""
    reserved_percent: float = Field(default=10, ge=0, le=100)
    """Reservation of offline."""


class FleetInput(ApiModel):
    """The GPUs there are, apart: what each class has and how busy they are.

    A utilization is the work done over what the same GPUs do with full batches of the same lengths.
    """

    online_gpus: int = Field(default=8, ge=1, le=MOST_GPUS)
    online_utilization_percent: float = Field(default=20, gt=0, le=100)
    offline_gpus: int = Field(default=4, ge=0, le=MOST_GPUS)
    offline_utilization_percent: float = Field(default=30, ge=0, le=100)


class EnergyInput(ApiModel):
    """Electricity, and what the building adds."""

    dollars_per_kilowatt_hour: float = Field(default=0.12, ge=0)
    pue: float = Field(default=1.3, ge=1)
    """Power drawn by the building over power drawn by the machines."""
    server_percent: float = Field(default=40, ge=0)
    """What CPU, memory, network and fans draw on top of the GPU."""
    budget_kilowatts: float | None = Field(default=None, gt=0)
    """Most power the site may draw, PUE included."""


class MoneyInput(ApiModel):
    """How GPUs are paid for."""

    way: Literal["rent", "buy", "cheapest"] = "rent"
    """`cheapest` decides month by month, in plans ahead; in a plan for today it takes the lower price per hour."""
    amortization_months: int = Field(default=36, ge=1, le=1200)
    """Until when a bought GPU is written off, evenly."""
    resale_percent: float = Field(default=50, ge=0, le=100)
    """What it sells for when new, of its price; falls evenly to nothing over the amortization."""


class ServiceInput(ApiModel):
    """One service that grows: an LLM answering people, an encoder, or offline work."""

    name: str = Field(min_length=1)
    kind: Literal["online", "encoder", "offline"] = "online"
    """Offline work is for any model and has no SLO."""
    model: str
    requests_per_second: tuple[Rate, Rate]
    """In the first and in the last month; between them it grows by an equal factor each month."""
    prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    """On average."""
    output_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """On average; 0 where the model is an encoder."""
    latency_milliseconds: float = Field(default=30, gt=0)
    """Encoders: from arrival to answer."""
    latency_percentile: float = Field(default=95, gt=0, lt=100)
    """Encoders: share of the requests that keep the latency."""
    batch_window_milliseconds: float = Field(default=10, ge=0, le=1000)
    """Encoders: how long the first request of a batch waits for others."""
    peak_factor: float = Field(default=2.0, ge=1, le=1000)
    """Busiest minute over the average; GPUs are counted for the peak, offline work for the average."""

    def rate(self, month: int, months: int) -> float:
        """Average requests per second in a month, counted from 0."""
        first, last = self.requests_per_second
        growth: float = (last / first) ** (month / max(months - 1, 1))
        return first * growth

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "online" and self.output_tokens < 1:
            raise ValueError(f"outputTokens is {self.output_tokens}: a service that generates needs 1 or more")
        if self.kind == "encoder" and self.output_tokens:
            raise ValueError(f"outputTokens is {self.output_tokens}: an encoder generates nothing, leave it out")
        return self


class CeilingInput(ApiModel):
    """One batch ceiling to compute: the largest batch that keeps one latency SLO."""

    name: str = Field(min_length=1)
    model: str
    prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    output_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """0 for an encoder."""
    milliseconds: float = Field(gt=0)
    """From arrival to the first token; for an encoder to the answer."""
    percentile: float = Field(default=95, gt=0, lt=100)
    """Share of the requests that keep it."""
    requests_per_second: Rate
    """What comes in while the batch is full."""
    steps: Literal["roofline", "published"] = "roofline"
    """Where step times come from; `published` are measurements of llama-3-8b on an A100."""


SERVICES = (
    ServiceInput(
        name="embeddings", kind="encoder", model="bge-large", requests_per_second=(8000, 20000), prompt_tokens=128
    ),
    ServiceInput(name="chat", model="llama-3-8b", requests_per_second=(20, 60), prompt_tokens=1155, output_tokens=211),
    ServiceInput(
        name="summaries",
        kind="offline",
        model="llama-3-8b",
        requests_per_second=(5, 20),
        prompt_tokens=2588,
        output_tokens=291,
    ),
)


class AheadInput(ApiModel):
    """A plan over months."""

    months: int = Field(default=18, ge=1, le=120)
    most_used_percent: float = Field(default=90, gt=0, le=100)
    """Of the highest rate that keeps the SLO: what a GPU is planned for at the peak."""
    services: tuple[ServiceInput, ...] = SERVICES

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [service.name for service in self.services]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"services named twice: {', '.join(twice)}; give each a name of its own")
        return self


CEILINGS = (
    CeilingInput(
        name="7B model",
        model="llama-2-7b",
        prompt_tokens=150,
        output_tokens=150,
        milliseconds=50,
        percentile=99,
        requests_per_second=2,
    ),
    CeilingInput(
        name="8B model by published steps",
        model="llama-3-8b",
        prompt_tokens=128,
        output_tokens=128,
        milliseconds=50,
        percentile=99,
        requests_per_second=1,
        steps="published",
    ),
    CeilingInput(name="small encoder", model="bge-base", prompt_tokens=256, milliseconds=30, requests_per_second=1000),
)


class PlanInputs(ApiModel):
    """Everything a plan depends on, beside the traces."""

    model: str = "llama-3-8b"
    gpu: str = "a100"
    quantization: Quantization = Quantization.NONE
    slo: SloInput = SloInput()
    engine: EngineInput = EngineInput()
    fleet: FleetInput = FleetInput()
    energy: EnergyInput = EnergyInput()
    money: MoneyInput = MoneyInput()
    efficiency: EfficiencyInput = EfficiencyInput()
    gpus: dict[str, GpuInput] = Field(default_factory=dict)
    """Figures that differ from the defaults, and GPUs that are not known."""
    ahead: AheadInput = AheadInput()
    ceilings: tuple[CeilingInput, ...] = CEILINGS
    """What `ballast plan --ceilings` answers."""
    traffic_minutes: float = Field(default=5, gt=0, le=240)
    """How much traffic each simulation replays."""
    ceiling_minutes: float = Field(default=9, gt=0, le=240)
    """How long full batches are simulated for a ceiling; the first third, in which they fill, is left out."""
    seed: int = 0

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file; what it leaves out has its default.

        Raises:
            InvalidConfig: says every field that is wrong.
        """
        data = _read(path)
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidConfig(str(path), InvalidConfig.sentences(error)) from error

    def dump(self) -> str:
        """All figures as YAML, the GPUs' own among them: change what differs and hand it back."""
        gpus = {name: self._described(name) for name in (*GPUS, *sorted(set(self.gpus) - set(GPUS)))}
        return worksheet(self.model_copy(update={"gpus": gpus}))

    def _described(self, name: str) -> GpuInput:
        return GpuInput.model_validate(describe(self.find_gpu(name)))

    def find_shape(self, name: str) -> Shape:
        """A model by name or by the path of its config.json, with the KV type of this file.

        Raises:
            BadInput: it is neither.
        """
        return replace(shape(name), kv_bytes=KV_BYTES[self.engine.kv_dtype])

    def find_gpu(self, name: str) -> Gpu:
        """A GPU by name, with the figures of this file.

        Raises:
            BadInput: it is not known, here or at all.
        """
        key = name.lower()
        given = {other.lower(): changed for other, changed in self.gpus.items()}.get(key)
        known = GPUS.get(key)
        if given:
            return given.onto(key, known)
        if known is None:
            names = ", ".join(dict.fromkeys((*GPUS, *self.gpus)))
            raise BadInput(f"unknown GPU {name!r}; known are {names}. Describe another under `gpus` in the input file")
        return known


def _read(path: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise InvalidConfig(str(path), [str(error)]) from error
    except ValueError as error:  # no UTF-8, or a date that no calendar has
        raise InvalidConfig(str(path), [f"is no YAML in UTF-8: {error}"]) from error
    except RecursionError as error:
        raise InvalidConfig(str(path), ["is nested too deeply"]) from error
    if data is None:
        return {}
    if not isinstance(data, dict) or not all(isinstance(key, str) for key in data):
        raise InvalidConfig(str(path), [f"found {type(data).__name__}, wanted a mapping with names as keys"])
    return data


def describe(gpu: Gpu) -> dict[str, float]:
    """A GPU's figures under the names of the input file."""
    figures = {
        "teraflops": gpu.flops / 1e12,
        "fp8Teraflops": gpu.fp8_flops / 1e12,
        "terabytesPerSecond": gpu.bandwidth / 1e12,
        "memoryGigabytes": gpu.memory / 1e9,
        "watts": gpu.watts,
        "idleWatts": gpu.idle_watts,
        "dollarsPerHour": gpu.dollars_per_hour,
        "purchaseDollars": gpu.purchase_dollars,
    }
    return {name: float(f"{value:.12g}") for name, value in figures.items()}  # 0.1 + 0.2 is 0.3


def _times(value: float | None, unit: float) -> float | None:
    return None if value is None else value * unit
