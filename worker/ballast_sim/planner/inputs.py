"""The inputs of a plan: one YAML file. Every figure has a default, which `ballast plan --show-inputs` prints."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ballast_api.base import ApiModel
from ballast_api.commented_yaml import commented_yaml
from ballast_api.yaml_file import YamlFile
from ballast_sim.errors import BadInput
from ballast_sim.planner.encoder import TEXT_MILLISECONDS, ApiServer
from ballast_sim.replay.feasibility import MEMORY_PERCENT, kv_tokens
from ballast_sim.replay.hardware import ETHERNET, GPUS, PCIE, Accelerator
from ballast_sim.replay.model_shape import KV_BYTES, ModelShape, Quantization, shape
from ballast_sim.replay.step_model import Efficiency, Roofline

MOST_TOKENS = 10_000_000
MOST_GPUS = 100_000
MOST_RATE = 1e9
Rate = Annotated[float, Field(ge=1e-6, le=MOST_RATE)]
"""Requests per second."""


class GpuInput(ApiModel):
    """A known GPU with other figures, or a new GPU with all figures."""

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
    link_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """From one GPU to the others of its machine, in one direction; of a new GPU by default PCIe 4.0."""
    network_gigabytes_per_second: float | None = Field(default=None, gt=0)
    """From one GPU to other nodes, in one direction; of a new GPU by default 100 Gbit/s."""

    def onto(self, name: str, known: Accelerator | None) -> Accelerator:
        """Return the known GPU with these figures in place of its own; raise BadInput if a new GPU lacks a figure."""
        given = {field: (getattr(self, name), unit) for name, (field, unit) in _FIGURES.items()}
        figures = {field: value * unit for field, (value, unit) in given.items() if value is not None}
        usual = {"fp8_flops": figures["flops"]} if "flops" in figures else {}
        if known is not None:
            return replace(known, **(usual if known.fp8_flops == known.flops else {}) | figures)
        figures = {"link": PCIE, "network": ETHERNET, **usual, **figures}
        if missing := ", ".join(field for field in given if field not in figures):
            raise BadInput(f"gpus.{name} is not a known GPU, so it needs all figures; missing: {missing}")
        return Accelerator(name, **figures)

    @classmethod
    def describing(cls, gpu: Accelerator) -> Self:
        """Return all figures of a GPU."""
        figures = {name: getattr(gpu, field) / unit for name, (field, unit) in _FIGURES.items()}
        return cls(**{name: float(f"{value:.12g}") for name, value in figures.items()})  # 0.1 + 0.2 is 0.3


_FIGURES = {
    "teraflops": ("flops", 1e12),
    "fp8_teraflops": ("fp8_flops", 1e12),
    "terabytes_per_second": ("bandwidth", 1e12),
    "memory_gigabytes": ("memory", 1e9),
    "watts": ("watts", 1.0),
    "idle_watts": ("idle_watts", 1.0),
    "dollars_per_hour": ("dollars_per_hour", 1.0),
    "purchase_dollars": ("purchase_dollars", 1.0),
    "link_gigabytes_per_second": ("link", 1e9),
    "network_gigabytes_per_second": ("network", 1e9),
}
"""For each field of `GpuInput`, the field of `Accelerator` and the factor between their units."""


class SloInput(ApiModel):
    """Latencies that online requests are promised, and the share of them that must meet both."""

    ttft_milliseconds: float = Field(default=1000, gt=0)
    tpot_milliseconds: float = Field(default=50, gt=0)
    attainment_percent: float = Field(default=99, gt=0, le=100)


class EngineInput(ApiModel):
    """One replica: one engine on one GPU, or on a group of GPUs that share the model."""

    tensor_parallel: int = Field(default=1, ge=1, le=16)
    """GPUs that share the model of a replica. Above 1, each GPU of the plan is such a group: its counts, prices and
    power are those of groups."""
    nodes: int = Field(default=1, ge=1, le=16)
    """Nodes with equal parts of these GPUs."""
    adapters: int = Field(default=0, ge=0, le=1000)
    """LoRA adapters in memory at a time, with all linear layers, experts and embeddings, as vLLM holds them."""
    adapter_rank: int = Field(default=16, ge=1, le=512)
    """Largest rank of the adapters."""
    slots: int = Field(default=256, ge=1, le=4096)
    chunk_tokens: int = Field(default=512, ge=16, le=MOST_TOKENS)
    """Most prefill tokens in a step."""
    memory_percent: float = Field(default=MEMORY_PERCENT, gt=0, le=100)
    """Share of the GPU's memory for weights and KV."""
    block_tokens: int = Field(default=16, ge=1, le=4096)
    kv_dtype: Literal["bfloat16", "fp8", "int8"] = "bfloat16"
    """Number format of the KV cache."""
    reserved_percent: float = Field(default=10, ge=0, le=100)
    """Reservation of offline."""
    api_server_milliseconds: float = Field(default=TEXT_MILLISECONDS, ge=0, le=10_000)
    """Encoders: CPU time of vLLM's API server for one text. A replica has one such process, which limits its texts per
    second. The default was measured with one text in each request; with 50 it is about 0.6. 0 sets no limit."""


class FleetInput(ApiModel):
    """Today's GPUs, with classes apart: the number of each class, and their utilization.

    A utilization is the work done over the work that the same GPUs do with full batches of the same lengths.
    """

    online_gpus: int = Field(default=8, ge=1, le=MOST_GPUS)
    """With the utilization, the online load. If both are left out, the busiest minutes of `--online` are the load."""
    online_utilization_percent: float = Field(default=20, gt=0, le=100)
    offline_gpus: int = Field(default=4, ge=0, le=MOST_GPUS)
    """With the utilization, the offline work, which differs by GPU and model."""
    offline_utilization_percent: float = Field(default=30, ge=0, le=100)
    offline_tokens_per_second: float | None = Field(default=None, ge=0, le=1e8)
    """Offline work in place of these two figures: the tokens of prompts and answers per second, over all GPUs."""

    @property
    def has_online_load(self) -> bool:
        """Whether the inputs set the online load, and not the trace."""
        return bool({"online_gpus", "online_utilization_percent"} & self.model_fields_set)

    @model_validator(mode="after")
    def _check(self) -> Self:
        other = {"offline_gpus", "offline_utilization_percent"} & self.model_fields_set
        if other and self.offline_tokens_per_second is not None:
            raise ValueError(
                "offlineTokensPerSecond sets the offline work, and so do offlineGpus and offlineUtilizationPercent. "
                "Leave out one of these two ways"
            )
        return self


class EnergyInput(ApiModel):
    """Electricity, with the overhead of server and building."""

    dollars_per_kilowatt_hour: float = Field(default=0.12, ge=0)
    pue: float = Field(default=1.3, ge=1)
    """Power drawn by the building over power drawn by the machines."""
    server_percent: float = Field(default=40, ge=0)
    """Power of CPU, memory, network and fans, relative to the GPU."""
    budget_kilowatts: float | None = Field(default=None, gt=0)
    """Most power that the site may draw, with PUE."""


class MoneyInput(ApiModel):
    """Renting or buying GPUs."""

    way: Literal["rent", "buy", "cheapest"] = "rent"
    """`cheapest` decides for each GPU in a plan ahead, and takes the lower price per hour in a plan for today."""
    amortization_months: int = Field(default=36, ge=1, le=1200)
    """Months over which a bought GPU is written off evenly."""
    resale_percent: float = Field(default=50, ge=0, le=100)
    """Resale value of a new GPU, in percent of its price; falls evenly to 0 over the amortization."""


class ServiceInput(ApiModel):
    """One service that grows: an online LLM, an encoder, or offline work."""

    name: str = Field(min_length=1)
    kind: Literal["online", "encoder", "offline"] = "online"
    """Offline work can have any model, and has no SLO."""
    model: str
    requests_per_second: tuple[Rate, Rate]
    """Rates of the first and the last month; the rate grows by an equal factor each month."""
    prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    """Mean."""
    output_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """Mean; 0 for an encoder, and for a decoder that serves embeddings."""
    latency_milliseconds: float = Field(default=30, gt=0)
    """Encoders: SLO from arrival to answer."""
    latency_percentile: float = Field(default=95, gt=0, lt=100)
    """Encoders: share of the requests that must meet the latency."""
    batch_window_milliseconds: float = Field(default=10, ge=0, le=1000)
    """Encoders: time that the first request of a batch waits for others."""
    peak_factor: float = Field(default=2.0, ge=1, le=1000)
    """Rate of the busiest minute over the mean; GPUs are counted for the peak, offline work for the mean."""

    @property
    def pool(self) -> tuple[str, bool]:
        """Services with the same model can share GPUs if both generate or both do not."""
        return self.model, self.output_tokens > 0

    def rate(self, month: int, months: int) -> float:
        """Return the mean requests per second in a month. Months are counted from 0."""
        first, last = self.requests_per_second
        growth: float = (last / first) ** (month / max(months - 1, 1))
        return first * growth

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "online" and self.output_tokens < 1:
            raise ValueError(f"outputTokens is {self.output_tokens}: an online service needs 1 or more")
        if self.kind == "encoder" and self.output_tokens:
            raise ValueError(f"outputTokens is {self.output_tokens}: an encoder generates nothing. Leave it out")
        return self


class CeilingInput(ApiModel):
    """One batch ceiling to compute: the largest batch that meets one latency SLO."""

    name: str = Field(min_length=1)
    model: str
    prompt_tokens: int = Field(ge=1, le=MOST_TOKENS)
    output_tokens: int = Field(default=0, ge=0, le=MOST_TOKENS)
    """0 for an encoder, and for a decoder that serves embeddings."""
    milliseconds: float = Field(gt=0)
    """SLO from arrival to the first token; for an encoder to the answer."""
    percentile: float = Field(default=95, gt=0, lt=100)
    """Share of the requests that must meet the SLO."""
    requests_per_second: Rate
    """Rate of arrivals while the batch is full."""
    steps: Literal["roofline", "published"] = "roofline"
    """Source of the step times; `published` are measurements of llama-3-8b on an A100."""


def is_embedding(asked: ServiceInput | CeilingInput) -> bool:
    """Return whether the model serves embeddings, also one that can generate: outputTokens is 0, and not left out."""
    return not asked.output_tokens and (
        "output_tokens" in asked.model_fields_set or getattr(asked, "kind", "") == "encoder"
    )


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
    """Load of a GPU at the peak, in percent of the highest rate that meets the SLO."""
    services: tuple[ServiceInput, ...] = SERVICES

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [service.name for service in self.services]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"several services have the same name: {', '.join(twice)}. Give each its own name")
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
    CeilingInput(name="small encoder", model="bge-base", prompt_tokens=256, milliseconds=30, requests_per_second=500),
)


class PlanInputs(YamlFile):
    """Everything that a plan depends on, except the traces."""

    model: str = "llama-3-8b"
    gpu: str = "a100"
    quantization: Quantization | None = None
    """Format of the weights: none (bfloat16), fp8, int8 or int4; by default as the config.json of a model states."""
    slo: SloInput = SloInput()
    engine: EngineInput = EngineInput()
    fleet: FleetInput = FleetInput()
    energy: EnergyInput = EnergyInput()
    money: MoneyInput = MoneyInput()
    efficiency: Efficiency = Efficiency()
    gpus: dict[str, GpuInput] = Field(default_factory=dict)
    """Figures that differ from the defaults, and new GPUs."""
    ahead: AheadInput = AheadInput()
    ceilings: tuple[CeilingInput, ...] = CEILINGS
    """Batch ceilings that `ballast plan --ceilings` computes."""
    traffic_minutes: float = Field(default=5, gt=0, le=240)
    """Length of the traffic that each simulation replays."""
    throughput_minutes: float = Field(default=9, gt=0, le=240)
    """Length of a simulation of full batches; the first third, in which they fill, does not count."""
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [name.lower() for name in self.gpus]
        if twice := [name for name in self.gpus if names.count(name.lower()) > 1]:
            raise ValueError(f"gpus has names that differ only in case: {', '.join(twice)}. Use one of them")
        for name in self.gpus:
            self.find_gpu(name)  # a plan compares with every GPU
        return self

    def dump(self) -> str:
        """Return all figures as YAML, with those of every GPU. A load that is not set is a comment. `load` reads it."""
        names = (*GPUS, *sorted(name for name in self.gpus if name.lower() not in GPUS))
        gpus = {name: GpuInput.describing(self.find_gpu(name)) for name in names}
        text, fleet = commented_yaml(self.model_copy(update={"gpus": gpus})), self.fleet
        unset = [] if fleet.has_online_load else ["onlineGpus", "onlineUtilizationPercent"]
        unset += [] if fleet.offline_tokens_per_second is None else ["offlineGpus", "offlineUtilizationPercent"]
        return re.sub(rf"^  (({'|'.join(unset)}): [0-9])", r"  # \1", text, flags=re.MULTILINE) if unset else text

    def find_shape(self, name: str) -> ModelShape:
        """Find a model by name or by the path of its config.json, with the KV format of these inputs.

        With more GPUs than KV heads, each head is on several GPUs.

        Raises:
            BadInput: the model is unknown, or its heads cannot be shared by the GPUs of a group.
        """
        found, count = shape(name), self.engine.tensor_parallel
        if not found.divides(count):
            raise BadInput(
                f"engine.tensorParallel is {count}, which does not divide the {found.heads} heads and {found.kv_heads} "
                f"KV heads of {found.name}. Use another number of GPUs"
            )
        return replace(found, kv_bytes=KV_BYTES[self.engine.kv_dtype] * max(1.0, count / found.kv_heads))

    @property
    def api_server(self) -> ApiServer:
        """The process before the GPU of an encoder."""
        return ApiServer(self.engine.api_server_milliseconds)

    def roofline(self, name: str, *, is_embedding: bool = False) -> Roofline:
        """Return the step times of a model, which may serve embeddings; raise BadInput as the two `find` methods."""
        shape = self.find_shape(name)
        shape = replace(shape, is_encoder=shape.is_encoder or is_embedding)
        return Roofline(shape, self.find_device(), shape.weights(self.quantization), self.efficiency)

    def stated(self, name: str) -> Quantization | str | None:
        """Return the quantization that the config.json of a model states, if these inputs use it; else None."""
        found = shape(name).quantization
        return None if self.quantization or found is Quantization.NONE else found

    def kv_tokens(self, model: Roofline, longest: int) -> int:
        """Return the tokens of KV cache beside the weights of a model, as `feasibility.kv_tokens` does."""
        engine = self.engine
        return kv_tokens(
            model,
            longest=longest,
            slots=engine.slots,
            memory_percent=engine.memory_percent,
            ranks=engine.adapters * engine.adapter_rank,
        )

    def find_device(self) -> Accelerator:
        """Return the GPU of these inputs, or the group of them that one replica has.

        Raises:
            BadInput: the GPU is unknown, a new GPU has not all figures, or the nodes cannot have equal parts.
        """
        count, nodes = self.engine.tensor_parallel, self.engine.nodes
        if count % nodes:
            raise BadInput(
                f"engine.nodes is {nodes}, which does not divide engine.tensorParallel, {count}. Each node has as many "
                "GPUs of a replica as the others"
            )
        return self.find_gpu(self.gpu).group(count, nodes)

    def find_gpu(self, name: str) -> Accelerator:
        """Find a GPU by name, with the figures of these inputs; raise BadInput if it is unknown or lacks figures."""
        key = name.lower()
        given = {other.lower(): changed for other, changed in self.gpus.items()}.get(key)
        known = GPUS.get(key)
        if given:
            return given.onto(key, known)
        if known is None:
            names = ", ".join(dict.fromkeys((*GPUS, *self.gpus)))
            raise BadInput(f"unknown GPU {name!r}; known are {names}. Describe another under `gpus` in the input file")
        return known
