"""The sections that an InferenceDeployment and a WorkerConfig share.

Units stand in the names. Fields marked hot take effect in a running worker; the others need a restart, and the worker
says so by name when they change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from ballast_api.base import ApiModel, keyed_by
from ballast_api.rules import Later, Rule

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$")]
"""A name that is safe in Redis keys, metric labels and Kubernetes annotations."""


class Model(ApiModel):
    """What is served."""

    uri: str = Field(min_length=1, examples=["file:///models/llama-3-8b"])
    """A checkpoint directory (`config.json`, `*.safetensors`, `tokenizer.json`), as `file://` URI or plain path."""
    served_name: Name | None = None
    """The name clients ask for; by default the directory's own name."""
    revision: str = ""
    """Names this version of the weights; a generated prefix is only continued under the same revision."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Longest prompt plus output, tokens; by default the checkpoint's own limit."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights and computation. `auto`: float32 on CPU, the checkpoint's own on a GPU."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` fills the architecture of `config.json` with seeded random weights: for benchmarks of larger shapes."""


class Engine(ApiModel):
    """How the engine computes."""

    later: ClassVar[Mapping[str, Later]] = {
        "quantization": Later(
            "string", "quantized weights are not supported yet. Remove the field, or lower model.dtype"
        ),
        "kv_dtype": Later(
            "string",
            "quantized KV is not supported yet: KV has the dtype of the model. Remove the field, or lower model.dtype",
        ),
        "speculative": Later(
            "object", "speculative decoding is not supported yet: the model decodes each token itself. Remove the field"
        ),
        "tensor_parallel": Later(
            "integer",
            "the engine serves one device per worker; several GPUs need the vLLM backend, which comes later. Remove "
            "the field and take a model that fits one device",
        ),
    }
    rules = (
        Rule(
            "self.backend == 'native'",
            lambda engine: engine.backend == "native",
            "engine.backend: this version has one engine, its own; vLLM as a backend comes later. Remove the field, or "
            "say native",
        ),
    )

    backend: Literal["native", "vllm"] = "native"
    """Which engine runs the model: `native`, Ballast's own. `vllm` is refused: it comes later."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """`auto` takes the first GPU, else the CPU."""
    attention: Literal["auto", "sdpa", "cpu"] = "auto"
    """Attention backend: `cpu` is the compiled kernel, `sdpa` works everywhere; `auto` takes the fastest there is."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine; 0 leaves one core of those this process may use to HTTP and the queue."""
    block_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block."""
    kv_memory_mebibytes: int | None = Field(default=None, ge=1)
    """Memory for KV; by default a share of what is free (half on CPU, nine tenths on a GPU), at most what `slots` full
    contexts can use."""
    prefill_chunk_tokens: int = Field(default=512, ge=1)
    """Most prefill tokens in a step. Hot."""
    prefix_cache: bool = True
    """Reuse the KV of equal prompt prefixes."""
    isolate_tenants: bool = False
    """Never share prefix-cache blocks between tenants (closes the timing channel, costs hits)."""


class Slo(ApiModel):
    """What online requests are promised. Hot."""

    later: ClassVar[Mapping[str, Later]] = {
        "latency_milliseconds": Later(
            "number", "encoders, whose one promise is latency, are not served yet. Use ttftMilliseconds"
        ),
    }

    ttft_milliseconds: float = Field(default=1000, gt=0)
    """Time from arrival to the first token."""
    tpot_milliseconds: float = Field(default=100, gt=0)
    """Time for each token after the first."""
    objective_percent: float = Field(default=99, ge=50, lt=100)
    """Share of requests that must get it: 99 promises the p99. Alerts judge by it."""


class Tenant(ApiModel):
    """Who may use the deployment, and with which share. Hot."""

    name: Name
    weight: float = Field(default=1, gt=0, le=1000)
    """Share of service within a class and priority, relative to the other tenants that wait."""
    max_priority: int = Field(default=100, ge=-1000, le=1000)
    """Requests and jobs above it are taken down to it."""
    max_slots: int | None = Field(default=None, ge=1)
    """Most slots its offline requests hold at a time in one worker."""
    reserved_percent: float = Field(default=0, ge=0, le=100)
    """Share of the slots of its class that this tenant gets first while it has work for them, before the other tenants
    of its priority. Nothing is owed for the time before."""


class Offline(ApiModel):
    """What offline work gets. Hot."""

    rules = (
        Rule(
            "self.reservedPercent <= self.maxPercent",
            lambda offline: offline.reserved_percent <= offline.max_percent,
            "offline.reservedPercent ({reservedPercent}) is above offline.maxPercent ({maxPercent}): lower the "
            "reservation or raise the maximum",
        ),
        Rule(
            "!has(self.tenants) || self.tenants.map(tenant, tenant.reservedPercent).sum() <= 100.0",
            lambda offline: sum(tenant.reserved_percent for tenant in offline.tenants) <= 100,
            "offline.tenants reserve more than 100 % of the slots together: lower a reservedPercent",
        ),
    )

    reserved_percent: float = Field(default=10, ge=0, le=100)
    """Share of slots and KV that offline keeps whatever the online load; idle reservation is lent."""
    max_percent: float = Field(default=100, ge=0, le=100)
    """Most slots offline may hold, of all slots."""
    max_interference_percent: float | None = Field(default=None, gt=0, le=1000)
    """Most that offline work may add to TTFT and TPOT of online, median and p99 over the last minute of a pod, in
    percent of what they are without it; the reservation comes on top. Not set: the SLO alone bounds what it adds."""
    queue: Name | None = None
    """The queue in Redis this deployment works from; by default `<namespace>/<name>`. Several may share one: each
    scales by its own online load, and by all of the queue's offline work."""
    tenants: tuple[Tenant, ...] = Field(default=(), max_length=1000, json_schema_extra=keyed_by("name"))
    """Empty: any tenant, equal weights. Otherwise a tenant that is not listed is refused."""
    batch_window_milliseconds: float = Field(default=0, ge=0, le=1000)
    """How long an idle engine waits after the first arrival to begin with a whole batch, online first; never so long
    that a first token comes late. 0 does not wait: a model that generates lets newcomers in at every step."""
    max_attempts: int = Field(default=5, ge=1, le=100)
    """Attempts of an item before it is a dead letter; giving back spends none."""
    lease_seconds: float = Field(default=30, ge=1, le=3600)
    """How long a worker that fell silent keeps an item."""
    results_days: float = Field(default=7, gt=0)
    """How long the results of a completed job are kept."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [tenant.name for tenant in self.tenants]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"offline.tenants names {', '.join(twice)} more than once: keep one entry per tenant")
        return self


class Limits(ApiModel):
    """What a worker refuses. Hot."""

    max_queued_requests: int = Field(default=256, ge=0)
    """Online requests that may wait for a slot; above it HTTP answers 429 with Retry-After."""
    max_body_kibibytes: int = Field(default=4096, ge=1)
    """Largest HTTP body and largest line of a job."""


class Cost(ApiModel):
    """What the hardware costs, for the cost metrics. Hot."""

    dollars_per_gpu_hour: float = Field(default=0, ge=0)
    """Price of one worker's device for an hour; 0 leaves the cost metrics at zero."""
