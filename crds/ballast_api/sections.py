"""The sections that an InferenceDeployment and a WorkerConfig share.

The name of a field contains its unit. A field of type `Hot` takes effect in a running worker. The others need a
restart, and a worker names them when they change.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from ballast_api.base import ApiModel, keyed_by
from ballast_api.hot import Hot
from ballast_api.rules import Rule
from ballast_api.vllm_arguments import OWNED, Argument

MOST_CHARACTERS = 253
NAME = r"^[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?$"
Name = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS, pattern=NAME)]
"""A name that is safe in Redis keys, metric labels and Kubernetes annotations."""


MODEL_NAME = NAME.replace("/-]", "/:-]")
ModelName = Annotated[str, Field(min_length=1, max_length=MOST_CHARACTERS, pattern=MODEL_NAME)]
"""The name of a model for clients, such as `qwen2.5:7b`. No Redis key contains it."""


def is_name(text: str) -> bool:
    """Return whether a text is a `Name`."""
    return len(text) <= MOST_CHARACTERS and re.fullmatch(NAME, text) is not None


def is_model_name(text: str) -> bool:
    """Return whether a text is a `ModelName`."""
    return len(text) <= MOST_CHARACTERS and re.fullmatch(MODEL_NAME, text) is not None


def refuse_twice(field: str, names: Sequence[str], entry: str) -> None:
    """Raise `ValueError` if a list contains a name more than once."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{field} contains {', '.join(twice)} more than once. Keep one entry per {entry}")


LOCATION = (
    "^(hf://+[A-Za-z0-9._-]+/[A-Za-z0-9._-]+(@.*|/*)|s3://[A-Za-z0-9._:-]+(/.*)?|"
    "pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/([.]?|[.]{3,}|[.]*[^./\\n][^/\\n]*))*|file://(localhost)?/.*)$"
)
"""The location of a model, for Python and CEL (RE2). After two slashes of `file://`, the first part of a path would
be a host. A bucket may be an ARN, which has colons. No part of the path in a claim is `..`, as for `ballast fetch`."""
LOCATIONS = (
    "hf://OWNER/NAME (or hf://OWNER/NAME@REVISION), s3://BUCKET/PREFIX, pvc://CLAIM/PATH or file:///DIRECTORY, e.g. "
    "hf://Qwen/Qwen3-8B, s3://bucket/prefix, pvc://claim/path or file:///directory/in/the/image"
)
LocationUri = Annotated[str, Field(min_length=1, max_length=2048)]


def is_location(uri: str) -> bool:
    """Return whether a URI is the location of a model, an adapter or a draft model."""
    return re.fullmatch(LOCATION, uri) is not None


class Adapter(ApiModel):
    """A LoRA adapter of the model. Clients name it in the field `model` of a request."""

    rules = (
        Rule(
            "!has(self.tenants) || size(self.tenants) > 0",
            lambda adapter: adapter.tenants is None or len(adapter.tenants) > 0,
            "tenants of an adapter is an empty list, so no tenant could use it. Name a tenant, remove the field to "
            "open the adapter to all tenants, or remove the adapter",
        ),
        Rule(
            f"self.uri.matches('{LOCATION}')",
            lambda adapter: is_location(adapter.uri),
            f"uri of an adapter must be {LOCATIONS}",
        ),
    )

    name: ModelName
    """The model name that clients use."""
    uri: LocationUri
    """Location of the adapter (`adapter_config.json`, `*.safetensors`), with the forms of the model's `uri`."""
    tenants: tuple[Name, ...] | None = Field(default=None, max_length=1000)
    """Tenants that may use the adapter; by default all. An empty list is refused."""


class Model(ApiModel):
    """The model that the worker serves."""

    uri: str = Field(min_length=1, examples=["file:///models/llama-3-8b"])
    """Directory of the checkpoint (`config.json`, `*.safetensors`, `tokenizer.json`), as a `file://` URI or a plain
    path."""
    served_name: ModelName | None = None
    """The model name that clients use; by default the name of the directory."""
    aliases: tuple[ModelName, ...] = Field(
        default=(), max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}
    )
    """Further model names that clients may use, in requests and in items of jobs. Answers, metrics and the status have
    the served name. Resources that share a queue need the same aliases. Use a new alias in jobs a minute after the last
    pod is replaced: until then, its items may be refused. Remove an alias when no item uses it."""
    revision: str = ""
    """Name of this version of the weights. A partly generated answer is continued only under the same revision, and,
    unless it is a commit of 40 hexadecimal digits, only with the same files."""
    max_model_len: int | None = Field(default=None, ge=16)
    """Maximum tokens of prompt plus output; by default the limit of the checkpoint."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and computation. `auto` means float32 with the native engine, and the checkpoint's own type
    with vLLM."""
    load_format: Literal["auto", "dummy"] = "auto"
    """`dummy` fills the architecture of `config.json` with seeded random weights, for benchmarks of large models."""
    adapters: tuple[Adapter, ...] = Field(default=(), max_length=128, json_schema_extra=keyed_by("name"))
    """LoRA adapters. They need vLLM."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_twice("model.aliases", self.aliases, "name")
        refuse_twice("model.adapters", [adapter.name for adapter in self.adapters], "adapter")
        return self


class Speculative(ApiModel):
    """Speculative decoding: several tokens are proposed, and the model checks them in one step. Ballast switches it off
    while it does not pay.
    """

    rules = (
        Rule(
            "(self.method == 'draftModel') == has(self.draftUri)",
            lambda speculative: (speculative.method == "draftModel") == (speculative.draft_uri is not None),
            "engine.speculative.draftUri belongs to the method draftModel, which needs it. Set both, or neither",
        ),
        Rule(
            f"!has(self.draftUri) || self.draftUri.matches('{LOCATION}')",
            lambda speculative: speculative.draft_uri is None or is_location(speculative.draft_uri),
            f"engine.speculative.draftUri must be {LOCATIONS}",
        ),
    )

    method: Literal["ngram", "draftModel"]
    """`ngram` proposes tokens that followed the same words earlier in the request. `draftModel` runs a smaller
    model."""
    draft_tokens: int = Field(default=4, ge=1, le=32)
    """Maximum tokens that are proposed at a time."""
    draft_uri: LocationUri | None = None
    """Location of the draft model, with the forms of the model's `uri`."""


class VllmSettings(ApiModel):
    """Arguments of vLLM that no field of Ballast expresses."""

    rules = tuple(group.rule() for group in OWNED)

    args: tuple[Argument, ...] = Field(default=(), max_length=64)
    """Arguments of `vllm serve`, one in each entry, e.g. `--enable-auto-tool-choice` and `--tool-call-parser=hermes`.
    Arguments that Ballast sets itself are refused. vLLM's parser checks the others when a worker starts, and the
    condition `Degraded` shows what it refuses."""


Backend = Literal["native", "vllm"]


class EngineSettings(ApiModel):
    """How the engine computes."""

    backend: Backend | None = None
    """The engine that runs the model. `native` is Ballast's own engine, for dense models on CPUs. `vllm` is vLLM with
    Ballast's scheduler, for most of vLLM's models and features. It was tried on CPUs, and not yet on a GPU. It has an
    image of its own. By default `vllm` for a resource with GPUs, and `native` without."""
    quantization: str | None = Field(default=None, max_length=63, pattern=r"^[a-z0-9][a-z0-9_-]*$", examples=["fp8"])
    """Quantization of the weights, by vLLM's name, such as `fp8`, `awq` or `gptq`. By default as the checkpoint states.
    It needs vLLM."""
    kv_dtype: str | None = Field(default=None, max_length=63, pattern=r"^[a-z0-9][a-z0-9_]*$", examples=["fp8"])
    """Data type of KV: `fp8`, `int8`, or another name of vLLM. By default that of the model. It needs vLLM, which has
    no `int8` on a CPU."""
    speculative: Speculative | None = None
    """Speculative decoding. It needs vLLM."""
    vllm: VllmSettings = VllmSettings()
    attention: Literal["auto", "sdpa", "cpu"] = "auto"
    """Attention of the native engine. `cpu` is the compiled kernel, `sdpa` is that of torch, and `auto` uses the
    compiled kernel if it can run the model."""
    threads: int = Field(default=0, ge=0)
    """CPU threads of the engine. 0 uses all cores of the process except one, which HTTP and the queue need.
    vLLM decides them itself with 0, and has a use for them only on CPU."""
    block_tokens: int = Field(default=16, ge=1, le=1024)
    """Tokens in a KV block of the native engine."""
    kv_memory_mebibytes: int | None = Field(default=None, ge=1)
    """Memory for KV, on each GPU. By default the native engine uses half of the free memory, and at most what `slots`
    requests of maximum length need. vLLM has its own default."""
    prefill_chunk_tokens: Hot[int] = Field(default=512, ge=1)
    """Maximum prefill tokens in a step with lent offline prompts, or of unknown time. Online prompts fill up to four
    times as many if the SLO leaves time for them. With vLLM, they also fit into `--max-num-batched-tokens`, beside a
    token for each slot."""
    prefix_cache: bool = True
    """Reuse the KV of equal prompt prefixes."""
    isolate_tenants: bool = False
    """Never share prefix-cache blocks between tenants. Otherwise `cached_tokens` in the usage of an answer and the time
    to its first token show a tenant how much of its prompt others have sent. This lowers the hit rate."""


def backend_rules(uses_vllm: str) -> tuple[Rule, ...]:
    """Return the rules for the fields that belong to one backend.

    Args:
        uses_vllm: CEL condition over the whole, with the same value as `backend == "vllm"` of the model.
    """
    return (
        Rule(
            f"({uses_vllm}) || !(has(self.model.adapters) && size(self.model.adapters) > 0 "
            "|| has(self.engine.kvDtype) || has(self.engine.quantization) || has(self.engine.speculative) "
            "|| has(self.engine.vllm) && has(self.engine.vllm.args) && size(self.engine.vllm.args) > 0)",
            lambda whole: (
                whole.backend == "vllm"
                or not (
                    whole.model.adapters
                    or whole.engine.kv_dtype is not None
                    or whole.engine.quantization is not None
                    or whole.engine.speculative is not None
                    or whole.engine.vllm.args
                )
            ),
            "model.adapters, engine.quantization, engine.kvDtype, engine.speculative and engine.vllm.args need vLLM, "
            "and the native engine runs this model. Set engine.backend to vllm, or remove the fields",
        ),
        Rule(
            f"!({uses_vllm}) || (self.engine.attention == 'auto' && self.engine.blockTokens == 16)",
            lambda whole: (
                whole.backend == "native" or (whole.engine.attention == "auto" and whole.engine.block_tokens == 16)
            ),
            "engine.attention and engine.blockTokens belong to the native engine, and vLLM runs this model. Remove the "
            "fields, or set --attention-backend or --block-size in engine.vllm.args",
        ),
    )


SloName = Literal["ttft", "tpot", "latency"]
TTFT_MILLISECONDS, TPOT_MILLISECONDS = 1000.0, 100.0
"""The SLO of a model that generates text, unless the resource sets another."""


class Slo(ApiModel):
    """The latency that online requests are promised: TTFT and TPOT of a model that generates text, or one latency of a
    model that returns vectors or scores.
    """

    rules = (
        Rule(
            "!has(self.latencyMilliseconds) || !(has(self.ttftMilliseconds) || has(self.tpotMilliseconds))",
            lambda slo: (
                slo.latency_milliseconds is None or (slo.ttft_milliseconds is None and slo.tpot_milliseconds is None)
            ),
            "slo.latencyMilliseconds is the SLO of a model that returns vectors or scores, and slo.ttftMilliseconds "
            "and slo.tpotMilliseconds are the SLO of a model that generates text. Remove one or the others",
        ),
    )

    ttft_milliseconds: Hot[float | None] = Field(default=None, gt=0)
    """Maximum time from the arrival of a request to its first token. By default 1000."""
    tpot_milliseconds: Hot[float | None] = Field(default=None, gt=0)
    """Maximum time per token after the first. By default 100."""
    latency_milliseconds: Hot[float | None] = Field(default=None, gt=0, examples=[30])
    """Maximum time from the arrival of a request to its answer, for models that return vectors or scores. Such a model
    needs vLLM. `engine.prefillChunkTokens` has no effect on it: online prompts take at most half of this time in a
    step."""
    objective_percent: Hot[float] = Field(default=99, ge=50, lt=100)
    """Share of online requests that must meet the SLO: 99 promises the p99. Alerts use this share. Offline work gets
    less time when it causes more than half of the misses that this share allows."""

    @property
    def milliseconds(self) -> Mapping[SloName, float]:
        """Return the limits in force by name."""
        if self.latency_milliseconds is not None:
            return {"latency": self.latency_milliseconds}
        return {
            "ttft": self.ttft_milliseconds or TTFT_MILLISECONDS,
            "tpot": self.tpot_milliseconds or TPOT_MILLISECONDS,
        }

    def seconds(self, name: SloName) -> float | None:
        """Return one limit in force in seconds; None without it."""
        milliseconds = self.milliseconds.get(name)
        return None if milliseconds is None else milliseconds / 1000


class Tenant(ApiModel):
    """A tenant that may use the deployment, and its share."""

    name: Name
    """The name that requests and jobs use."""
    weight: float = Field(default=1, gt=0, le=1000)
    """Share of service within a class and priority, relative to the other tenants with waiting work."""
    max_priority: int = Field(default=0, ge=-1000, le=1000)
    """Maximum priority. Requests and jobs with a higher priority get this one."""
    max_slots: int | None = Field(default=None, ge=1)
    """Maximum slots that the tenant's offline requests hold at a time in one worker."""
    reserved_percent: float = Field(default=0, ge=0, le=100)
    """Share of the slots of a class that this tenant gets before other tenants of the same priority, while it has work
    for them. Other tenants use idle slots of the reservation, and the tenant is not compensated later."""


class Offline(ApiModel):
    """The share and the limits of offline work."""

    rules = (
        Rule(
            "self.reservedPercent <= self.maxPercent",
            lambda offline: offline.reserved_percent <= offline.max_percent,
            "offline.reservedPercent ({reservedPercent}) is above offline.maxPercent ({maxPercent}). Lower the "
            "reservation, or raise the maximum",
        ),
        Rule(
            "!has(self.tenants) || self.tenants.map(tenant, tenant.reservedPercent).sum() <= 100.0",
            lambda offline: sum(tenant.reserved_percent for tenant in offline.tenants) <= 100,
            "offline.tenants reserve more than 100 % of the slots in total. Lower a reservedPercent",
        ),
    )

    reserved_percent: Hot[float] = Field(default=10, ge=0, le=100)
    """Share of slots, KV blocks and prompt tokens of a step that is reserved for offline work at any online load.
    Online work uses the reservation while it is idle. At a high load or under a tight SLO, the reservation makes
    online requests miss the SLO. 0 reserves nothing."""
    max_percent: Hot[float] = Field(default=100, ge=0, le=100)
    """Maximum share of all slots that offline work may hold."""
    max_interference_percent: Hot[float | None] = Field(default=None, gt=0, le=1000)
    """Maximum increase of online TTFT and TPOT (median and p99, over the last 30 s of a worker) that offline work may
    cause beyond its reservation, in percent of the latency without offline work. By default only the SLO limits it."""
    queue: Name | None = None
    """Name of the queue in Redis; by default `<namespace>/<name>`. Several deployments may share a queue. Each of them
    scales by its own online load, and by all offline work of the queue."""
    tenants: Hot[tuple[Tenant, ...]] = Field(default=(), max_length=1000, json_schema_extra=keyed_by("name"))
    """Known tenants. An empty list admits every tenant with equal weight. Otherwise unknown tenants are refused."""
    batch_window_milliseconds: Hot[float] = Field(default=0, ge=0, le=1000)
    """Time that an idle engine waits after the first arrival to start with a larger batch, online requests first. It
    never delays a first token past its deadline. 0 starts at once, which suits models that generate: new requests join
    at every step. A model that returns vectors computes fewer and larger steps with a window of a few milliseconds."""
    max_attempts: Hot[int] = Field(default=5, ge=1, le=100)
    """Attempts before an item becomes a dead letter. An item that a worker returns to the queue spends no attempt."""
    lease_seconds: Hot[float] = Field(default=30, ge=1, le=3600)
    """Time after which the items of an unresponsive worker return to the queue."""
    results_days: Hot[float] = Field(default=7, gt=0)
    """Days that the results of a completed job are kept."""
    abandoned_days: Hot[float] = Field(default=30, gt=0)
    """Days after which a job that is paused, or whose submission has not ended, expires if nothing in it changes. So
    does a job whose items name a model that no worker has served for this time."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse_twice("offline.tenants", [tenant.name for tenant in self.tenants], "tenant")
        return self


MOST_SHARED = 2
"""Most requests that wait in a queue that tenants share, in multiples of `limits.maxQueuedRequests`."""


class Limits(ApiModel):
    """Limits above which a worker refuses requests."""

    max_queued_requests: Hot[int] = Field(default=256, ge=0)
    """Maximum online requests that wait for a slot. Above it, HTTP answers 429 with a Retry-After header. With API
    keys, a tenant is refused only if its own requests fill its share of the queue, by weight among the tenants that
    wait, or if twice this number waits."""
    max_queue_milliseconds: Hot[float | None] = Field(default=None, gt=0)
    """Maximum time that a new online request is expected to wait for a slot while all slots are taken. Above it, HTTP
    answers 429 with a Retry-After header. With a value below `slo.ttftMilliseconds`, accepted requests keep their TTFT
    in an overload. With API keys, the requests of other tenants count as far as they get a slot before the new one, by
    weight. A model that returns vectors or scores holds a slot for a moment only. For it, this limits the time that a
    call is expected to wait for the calls before it, at most twice the time that the last calls waited. By default
    only `limits.maxQueuedRequests` limits the queue."""
    max_body_kibibytes: Hot[int] = Field(default=4096, ge=1)
    """Maximum size of an HTTP body and of a line of a job."""

    def most_requests(self, slots: int) -> int:
        """Return the most requests that a worker holds: those in its slots, and a waiting queue for each class.

        With API keys, a queue has up to twice its limit of requests.
        """
        return slots + 2 * MOST_SHARED * self.max_queued_requests


class Cost(ApiModel):
    """The price of the hardware, for the cost metrics."""

    dollars_per_gpu_hour: Hot[float] = Field(default=0, ge=0)
    """Price of a GPU for an hour, or of a worker without GPUs. With 0 the cost metrics stay at zero."""
