"""The resource: one model served to online requests and offline jobs by worker pods that the operator keeps.

Sections `engine, slots, slo, offline, limits, cost` are the worker's own (`sections.py`); the rest says how many pods
there are and how they stand in the cluster.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ballast_api.base import ApiModel
from ballast_api.errors import InvalidConfig
from ballast_api.names import API_VERSION, KIND, MOST_NAME_CHARACTERS
from ballast_api.pods import Json, PodTemplate, SecretKey, SecretName
from ballast_api.rules import Rule
from ballast_api.sections import Cost, Engine, Limits, Model, Offline, Slo
from ballast_api.status import Status
from ballast_api.worker_config import Slots

URI = r"^(hf|s3|pvc|file)://.+$"
RESOURCE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


class ServedModel(Model):
    """What is served, and how a pod gets it."""

    rules = (
        Rule(
            f"self.uri.matches('{URI}')",
            lambda model: re.fullmatch(URI, model.uri) is not None,
            "model.uri must begin with hf://, s3://, pvc:// or file://, e.g. hf://Qwen/Qwen3-8B, "
            "s3://bucket/prefix, pvc://claim/path or file:///directory/in/the/image",
        ),
        Rule(
            "!has(self.cachePath) || self.uri.matches('^(hf|s3)://')",
            lambda model: model.cache_path is None or re.match("(hf|s3)://", model.uri) is not None,
            "model.cachePath keeps what was fetched from hf:// or s3://, and this model.uri is read in place: remove "
            "cachePath",
        ),
        Rule(
            "!has(self.credentialsSecret) || self.uri.matches('^(hf|s3)://')",
            lambda model: model.credentials_secret is None or re.match("(hf|s3)://", model.uri) is not None,
            "model.credentialsSecret opens hf:// and s3://, and this model.uri is read in place: remove "
            "credentialsSecret",
        ),
    )

    uri: str = Field(min_length=1, max_length=2048, examples=["hf://Qwen/Qwen3-8B"])
    """`hf://owner/name`, `s3://bucket/prefix`, `pvc://claim/path`, or `file:///directory` that the image or a volume
    of the template holds."""
    revision: str = Field(default="", max_length=253)
    """Names this version of the weights, on `hf://` a branch, tag or commit; a generated prefix is only continued under
    the same revision."""
    credentials_secret: SecretName | None = None
    """Secret whose keys become environment variables of the fetch, e.g. `HF_TOKEN`, `AWS_ACCESS_KEY_ID`,
    `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`."""
    cache_path: str | None = Field(default=None, max_length=1024, pattern=r"^/[^:]*$")
    """Directory of the node that keeps fetched models for all its pods; the user of the image (65532 in Ballast's own)
    must be able to write to it. By default every pod fetches its own."""


class Gpu(ApiModel):
    """The device of each worker. A change rolls the pods."""

    rules = (
        Rule(
            "self.count <= 1",
            lambda gpu: gpu.count <= 1,
            "gpu.count ({count}): the engine serves one device per worker; several GPUs in one worker need the vLLM "
            "backend, which comes later. Set it to 1 and raise replicas, or take a model that fits one device",
        ),
        Rule(
            "!(has(self.resourceName) && has(self.resourceClaimTemplate))",
            lambda gpu: gpu.resource_name is None or gpu.resource_claim_template is None,
            "gpu.resourceName and gpu.resourceClaimTemplate are two ways to ask for the same device: keep one",
        ),
        Rule(
            "self.count > 0 || !(has(self.resourceName) || has(self.resourceClaimTemplate))",
            lambda gpu: gpu.count > 0 or (gpu.resource_name is None and gpu.resource_claim_template is None),
            "gpu.count is 0, which means a worker on the CPU: remove gpu.resourceName and gpu.resourceClaimTemplate, "
            "or set the count to 1",
        ),
    )

    count: int = Field(default=1, ge=0, le=16)
    """GPUs of a worker; 0 runs it on the CPU."""
    resource_name: str | None = Field(
        default=None, max_length=253, examples=["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]
    )
    """Extended resource to ask for; by default `nvidia.com/gpu`."""
    resource_claim_template: str | None = Field(default=None, min_length=1, max_length=253)
    """A ResourceClaimTemplate (dynamic resource allocation) in place of the extended resource."""


class Scaling(ApiModel):
    """Replicas from measured need; without this section people, an HPA or KEDA set `spec.replicas`. Hot."""

    rules = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
            "scaling.minReplicas ({minReplicas}) is above scaling.maxReplicas ({maxReplicas}): lower the one or raise "
            "the other",
        ),
        Rule(
            "!has(self.offlineMaxReplicas) || self.offlineMaxReplicas <= self.maxReplicas",
            lambda scaling: (
                scaling.offline_max_replicas is None or scaling.offline_max_replicas <= scaling.max_replicas
            ),
            "scaling.offlineMaxReplicas is above scaling.maxReplicas ({maxReplicas}), which bounds all replicas: lower "
            "the one or raise the other",
        ),
    )

    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """Never fewer; 0 scales to zero when there was no work for `idleSeconds`: offline work wakes it, an online request
    to no worker is refused by the Service."""
    max_replicas: int = Field(ge=1, le=10_000)
    """Never more."""
    headroom_percent: float = Field(default=20, ge=0, le=500)
    """Online load may grow by this before a replica is missing."""
    offline_max_replicas: int | None = Field(default=None, ge=0, le=10_000)
    """Replicas up to which waiting offline work alone may raise them; by default offline work adds replicas only for
    deadlines at risk."""
    scale_up_seconds: int = Field(default=30, ge=0, le=3600)
    """The need must have lasted this long before replicas are added."""
    scale_down_seconds: int = Field(default=300, ge=0, le=86_400)
    """Replicas leave only when none of them was needed for this long."""
    idle_seconds: int = Field(default=600, ge=0, le=86_400)
    """With `minReplicas: 0`: time without any work before the last replica leaves."""


class Rollout(ApiModel):
    """How pods are replaced. A change of `drainSeconds` or `startupSeconds` rolls the pods."""

    rules = (
        Rule(
            "self.maxSurge + self.maxUnavailable > 0",
            lambda rollout: rollout.max_surge + rollout.max_unavailable > 0,
            "rollout.maxSurge and rollout.maxUnavailable are both 0, so no pod could ever be replaced: raise one, "
            "maxUnavailable where no spare GPU exists",
        ),
    )

    max_surge: int = Field(default=1, ge=0, le=100)
    """Pods above `replicas` while a new version comes up; each needs a GPU."""
    max_unavailable: int = Field(default=0, ge=0, le=100)
    """Pods that may be missing meanwhile."""
    drain_seconds: int = Field(default=30, ge=0, le=3600)
    """How long a leaving worker's online requests may finish; offline items go back to the queue at once."""
    startup_seconds: int = Field(default=600, ge=10, le=86_400)
    """A worker that is not ready after this long (fetching and loading the model) is restarted, and the rollout counts
    as stuck."""


class Disruption(ApiModel):
    """What node drains and evictions may take."""

    max_unavailable: int = Field(default=1, ge=0, le=10_000)
    """Workers that may be evicted at a time (PodDisruptionBudget); 0 forbids voluntary evictions."""


class RedisRef(ApiModel):
    """The Secret that leads to Redis or Valkey. A change rolls the pods."""

    secret_name: SecretName
    """In the resource's namespace."""
    url_key: SecretKey = "url"
    """Key of the Secret that holds `redis://`, `rediss://` with host, port, user and database."""
    password_key: SecretKey | None = None
    """Key of the Secret that holds the password, where the URL does not."""


class ApiKeysRef(ApiModel):
    """The Secret with the API keys that clients must show. A change of the reference rolls the pods."""

    secret_name: SecretName
    """In the resource's namespace."""
    key: SecretKey = "keys.yaml"
    """Key of the Secret that holds YAML mapping from API key to tenant."""


class Monitoring(ApiModel):
    """What is made for Prometheus, where the prometheus-operator's kinds exist."""

    service_monitor: bool = True
    """Make a ServiceMonitor."""
    prometheus_rule: bool = True
    """Make a PrometheusRule with the alerts of this resource."""
    scrape_seconds: int = Field(default=15, ge=1, le=3600)
    """How often the ServiceMonitor scrapes."""
    labels: dict[str, str] = Field(default={})
    """Added to both, for a Prometheus that selects by label (e.g. `release: kube-prometheus-stack`)."""


class Network(ApiModel):
    """Who may connect to the workers."""

    policy: bool = True
    """Make a NetworkPolicy that admits port 8000 alone."""
    ingress_from: tuple[Json, ...] = Field(default=(), max_length=64)
    """NetworkPolicy peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may connect; empty: all."""

    rules = (
        Rule(
            "self.policy || !has(self.ingressFrom) || size(self.ingressFrom) == 0",
            lambda network: network.policy or not network.ingress_from,
            "network.ingressFrom has no effect without the policy: set network.policy to true or remove the peers",
        ),
    )


class Spec(ApiModel):
    """What is wanted."""

    rules = (
        Rule(
            "!(self.engine.device == 'cpu' && self.gpu.count > 0)",
            lambda spec: not (spec.engine.device == "cpu" and spec.gpu.count > 0),
            "engine.device is cpu and gpu.count ({gpu.count}) would hold a GPU idle: set gpu.count to 0, or "
            "engine.device to auto",
        ),
        Rule(
            "!(self.engine.device.startsWith('cuda') && self.gpu.count == 0)",
            lambda spec: not (spec.engine.device.startswith("cuda") and spec.gpu.count == 0),
            "engine.device ({engine.device}) needs a GPU and gpu.count is 0: set gpu.count to 1, or engine.device to "
            "auto",
        ),
    )

    model: ServedModel
    engine: Engine = Engine()
    gpu: Gpu = Gpu()
    slots: Slots | None = None
    """Places in the running batch of each worker; by default what memory allows, at most 64 on CPU and 256 on a
    GPU."""
    slo: Slo = Slo()
    offline: Offline = Offline()
    limits: Limits = Limits()
    cost: Cost = Cost()
    replicas: int = Field(default=1, ge=0, le=10_000)
    """Worker pods. With `scaling` the operator writes it through the scale subresource: leave it out there."""
    scaling: Scaling | None = None
    rollout: Rollout = Rollout()
    disruption: Disruption = Disruption()
    redis: RedisRef | None = None
    """By default the Redis that the operator was installed with; where it has none, workers serve online requests
    only."""
    api_keys: ApiKeysRef | None = None
    """By default any client may connect, and names its tenant itself."""
    monitoring: Monitoring = Monitoring()
    network: Network = Network()
    template: PodTemplate = PodTemplate()

    @property
    def served_name(self) -> str:
        """The name clients ask for."""
        last = self.model.uri.rstrip("/").rsplit("/", 1)[-1]
        return self.model.served_name or last.partition("@")[0]


class Metadata(ApiModel):
    """What Ballast reads of an object's metadata; the rest is kept."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None
    labels: dict[str, str] = Field(default={})
    annotations: dict[str, str] = Field(default={})


class InferenceDeployment(ApiModel):
    """One model, served to online requests and offline jobs on the same GPUs."""

    model_config = ConfigDict(title=KIND)

    rules: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"size(self.metadata.name) <= {MOST_NAME_CHARACTERS} && self.metadata.name.matches('{RESOURCE_NAME}')",
            lambda resource: (
                len(resource.metadata.name) <= MOST_NAME_CHARACTERS
                and re.fullmatch(RESOURCE_NAME, resource.metadata.name) is not None
            ),
            f"metadata.name must have at most {MOST_NAME_CHARACTERS} characters of a-z, 0-9 and -, and begin with a "
            "letter: it becomes the name of a Service and of pods. Take another name",
        ),
    )

    api_version: Literal["ballast.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]  # Literal takes no constant
    kind: Literal["InferenceDeployment"] = KIND  # type: ignore[assignment]  # the same
    metadata: Metadata
    spec: Spec
    status: Status = Status()

    @classmethod
    def read(cls, manifest: Any, source: str) -> Self:
        """Take an object as the API server or a file gives it.

        Raises:
            InvalidConfig: says every field that is wrong, what was found there and what was wanted.
        """
        try:
            return cls.model_validate(manifest)
        except ValidationError as error:
            raise InvalidConfig(source, InvalidConfig.sentences(error)) from error

    @property
    def queue_name(self) -> str:
        """The queue in Redis that its workers serve."""
        return self.spec.offline.queue or f"{self.metadata.namespace}/{self.metadata.name}"
