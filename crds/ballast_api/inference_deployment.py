"""The resource: one model, which the operator serves to online requests and offline jobs with worker pods.

The sections `engine`, `slots`, `slo`, `offline`, `limits` and `cost` belong to the worker (`sections.py`). The others
describe the model, the pods, their place in the cluster, and who connects to them. This module has the rules that need
several sections.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError

from ballast_api.base import STORED, ApiModel
from ballast_api.connections import ApiKeysRef, Monitoring, Network, QueueAccess, RedisRef
from ballast_api.errors import InvalidConfig
from ballast_api.metadata import Metadata
from ballast_api.names import API_VERSION, KIND, MOST_NAME_CHARACTERS, MOST_RAY_CHARACTERS
from ballast_api.pods import GPUS, MIG, PodTemplate, is_gpu
from ballast_api.ray import ServingRuntime
from ballast_api.replicas import (
    RAY_UNREADY_SECONDS,
    STARTUP_SECONDS,
    UNREADY_SECONDS,
    Disruption,
    GpuRequest,
    Rollout,
    Scaling,
)
from ballast_api.rules import Rule
from ballast_api.sections import Backend, Cost, EngineSettings, Limits, Offline, Slo, backend_rules
from ballast_api.served_model import ServedModel, name_of
from ballast_api.status import Status
from ballast_api.worker_config import Slots

FETCHED = "^(hf|s3)://"
RESOURCE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"


def _is_declared(tenant: str | None, offline: Offline) -> bool:
    names = [known.name for known in offline.tenants]
    return tenant in names if names else tenant is None


FETCHES = (
    f"self.model.uri.matches('{FETCHED}') || "
    f"has(self.model.adapters) && self.model.adapters.exists(each, each.uri.matches('{FETCHED}')) || "
    "has(self.engine.speculative) && has(self.engine.speculative.draftUri) && "
    f"self.engine.speculative.draftUri.matches('{FETCHED}')"
)
"""CEL condition of a `Spec`, with the same value as `has_fetched_files`."""
USES_VLLM = "has(self.engine.backend) ? self.engine.backend == 'vllm' : self.gpu.count > 0"
"""CEL condition of a `Spec`, with the same value as `backend == "vllm"`."""


def _no_gpu(place: str) -> str:
    """Return the CEL condition of a `Spec` that requests or limits of the template name no GPU."""
    names = f"self.template.resources.{place}"
    known = f"{list(GPUS)}.exists(name, name in {names})"
    named = f"has(self.gpu.resourceName) && self.gpu.resourceName in {names}"
    return f"(!has({names}) || !({known} || {named} || {names}.exists(name, name.startsWith('{MIG}'))))"


def _is_named(uri: str) -> str:
    """Return the CEL condition of a `Spec` that a volume of the template is the claim of a location."""
    return f"({uri}.startsWith('pvc://') && [{uri}.split('/')[2]].exists(claim, {NAMED}))"


NAMED = (
    "self.template.volumes.exists(volume, has(volume.persistentVolumeClaim) && "
    "volume.persistentVolumeClaim.claimName == claim)"
)
MOUNTED = (
    "(has(self.model.cache) && has(self.model.cache.persistentVolumeClaim) && "
    f"[self.model.cache.persistentVolumeClaim.claimName].exists(claim, {NAMED})) || "
    f"{_is_named('self.model.uri')} || "
    f"(has(self.model.adapters) && self.model.adapters.exists(each, {_is_named('each.uri')})) || "
    "(has(self.engine.speculative) && has(self.engine.speculative.draftUri) && "
    f"{_is_named('self.engine.speculative.draftUri')})"
)
"""CEL condition of a `Spec` that a volume of the template is one of `Spec.claims`."""


class Spec(ApiModel):
    """The desired state."""

    rules = (
        Rule(
            "!(has(self.model.credentialsSecret) || has(self.model.cachePath) || has(self.model.cache) || "
            f"has(self.model.sizeLimitGibibytes)) || {FETCHES}",
            lambda spec: (
                spec.has_fetched_files
                or all(
                    value is None
                    for value in (
                        spec.model.credentials_secret,
                        spec.model.cache_path,
                        spec.model.cache,
                        spec.model.size_limit_gibibytes,
                    )
                )
            ),
            "model.credentialsSecret, model.cachePath, model.cache and model.sizeLimitGibibytes apply to files that "
            "are fetched from hf:// or s3://. The model, its adapters and its draft model are read in place. Remove "
            "them",
        ),
        Rule(
            "!has(self.engine.backend) || self.engine.backend != 'native' || self.gpu.count == 0",
            lambda spec: spec.engine.backend != "native" or spec.gpu.count == 0,
            "gpu.count ({gpu.count}) is above 0, and the native engine runs on CPUs. Leave engine.backend out or set "
            "it to vllm, or set gpu.count to 0",
        ),
        *backend_rules(USES_VLLM),
        Rule(
            f"!has(self.slo.latencyMilliseconds) || ({USES_VLLM})",
            lambda spec: spec.slo.latency_milliseconds is None or spec.backend == "vllm",
            "slo.latencyMilliseconds needs vLLM, and the native engine, which only generates text, runs this model. "
            "Set engine.backend to vllm, or remove the field",
        ),
        Rule(
            "!has(self.redis) || !has(self.queueAccess) || !has(self.queueAccess.submitters) || "
            "size(self.queueAccess.submitters) == 0",
            lambda spec: spec.redis is None or not spec.queue_access.submitters,
            "queueAccess.submitters need the Redis of the operator, and spec.redis names another. Remove one of them, "
            "and create users in your own Redis yourself",
        ),
        Rule(
            "!has(self.queueAccess) || !has(self.queueAccess.submitters) || "
            "self.queueAccess.submitters.all(each, has(each.tenant) ? "
            "has(self.offline) && has(self.offline.tenants) && "
            "self.offline.tenants.exists(known, known.name == each.tenant) : "
            "!has(self.offline) || !has(self.offline.tenants) || size(self.offline.tenants) == 0)",
            lambda spec: all(_is_declared(each.tenant, spec.offline) for each in spec.queue_access.submitters),
            "queueAccess.submitters must each set a tenant of offline.tenants, or none if no tenants are declared",
        ),
        Rule(
            "!has(self.runtime) || !has(self.runtime.ray) || !has(self.network) || !has(self.network.tlsSecret)",
            lambda spec: spec.runtime.ray is None or spec.network.tls_secret is None,
            "network.tlsSecret is not supported with runtime.ray. Remove one of them",
        ),
        Rule(
            "!has(self.runtime) || !has(self.runtime.ray) || !has(self.runtime.ray.nodes) || "
            f"self.runtime.ray.nodes == 1 || (!has(self.scaling) && ({USES_VLLM}))",
            lambda spec: (
                spec.runtime.ray is None
                or spec.runtime.ray.nodes == 1
                or (spec.scaling is None and spec.backend == "vllm")
            ),
            "runtime.ray.nodes above 1 needs vLLM, and does not support the section scaling. Set engine.backend to "
            "vllm, or remove the section or the field",
        ),
        Rule(
            f"!has(self.template) || !has(self.template.resources) || ({_no_gpu('requests')} && {_no_gpu('limits')})",
            lambda spec: (
                not any(map(spec.is_gpu, (*spec.template.resources.requests, *spec.template.resources.limits)))
            ),
            "template.resources names a GPU, and gpu.count requests the GPUs of a worker. Remove it from requests and "
            "limits, and set gpu.count, with gpu.resourceName if it is not nvidia.com/gpu",
            stored=("template.resources",),
        ),
        Rule(
            f"!has(self.template) || !has(self.template.volumes) || !({MOUNTED})",
            lambda spec: (
                not any(
                    volume.persistent_volume_claim is not None
                    and volume.persistent_volume_claim.claim_name in spec.claims
                    for volume in spec.template.volumes
                )
            ),
            "template.volumes has a claim that Ballast mounts for the model, an adapter, the draft model or the cache, "
            "and a pod with two volumes of one claim may not start. Remove the volume: the whole claim of model.uri is "
            "below /models, the other claims are below /claims/NAME, and the cache is below /cache",
            stored=("template.volumes", "model"),
        ),
    )

    model: ServedModel
    engine: EngineSettings = EngineSettings()
    gpu: GpuRequest = GpuRequest()
    slots: Slots | None = None
    """Slots of each worker: requests that run at a time. By default what memory allows, at most 64, and vLLM's own
    default with vLLM. A change rolls the pods."""
    slo: Slo = Slo()
    offline: Offline = Offline()
    limits: Limits = Limits()
    cost: Cost = Cost()
    replicas: int = Field(default=1, ge=0, le=10_000)
    """Number of worker pods. With `scaling`, the operator writes this field through the scale subresource: leave it
    out. Scaling begins with the worker pods that are there, up to `maxReplicas`, if they are more."""
    scaling: Scaling | None = None
    rollout: Rollout = Rollout()
    disruption: Disruption = Disruption()
    redis: RedisRef | None = None
    """The Secret with the address of Redis or Valkey; by default the Redis that the operator was installed with.
    Without Redis, workers serve only online requests."""
    queue_access: QueueAccess = QueueAccess()
    api_keys: ApiKeysRef | None = None
    """The Secret with the API keys of clients. By default any client may connect and choose its tenant."""
    monitoring: Monitoring = Monitoring()
    network: Network = Network()
    runtime: ServingRuntime = ServingRuntime()
    template: PodTemplate = PodTemplate()

    @property
    def backend(self) -> Backend:
        """The engine that runs the model."""
        return self.engine.backend or ("vllm" if self.gpu.count > 0 else "native")

    @property
    def has_fetched_files(self) -> bool:
        """Whether a pod fetches the model, an adapter or the draft model."""
        return any(re.match(FETCHED, uri) for uri in self._uris)

    @property
    def claims(self) -> frozenset[str]:
        """The claims that Ballast mounts."""
        cache = self.model.cache
        shared = None if cache is None else cache.persistent_volume_claim
        found = {uri.split("/")[2] for uri in self._uris if uri.startswith("pvc://")}
        return frozenset(found if shared is None else {*found, shared.claim_name})

    @property
    def _uris(self) -> tuple[str, ...]:
        """The locations of the model, its adapters and its draft model."""
        speculative = self.engine.speculative
        draft = None if speculative is None else speculative.draft_uri
        return (self.model.uri, draft or "", *(adapter.uri for adapter in self.model.adapters))

    def is_gpu(self, name: str) -> bool:
        """Return whether a resource of a container is a GPU."""
        return is_gpu(name) or name == self.gpu.resource_name

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        return name_of(self.model)

    @property
    def startup_seconds(self) -> int:
        """The time that a worker has to load the model."""
        return self.rollout.startup_seconds or STARTUP_SECONDS[self.backend]

    @property
    def unready_seconds(self) -> int:
        """The time that a terminating worker still accepts online requests."""
        usual = UNREADY_SECONDS if self.runtime.ray is None else RAY_UNREADY_SECONDS
        return usual if self.rollout.unready_seconds is None else self.rollout.unready_seconds


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
            "letter, because it becomes the name of a Service and of pods. Use another name",
        ),
        Rule(
            f"size(self.metadata.name) <= {MOST_RAY_CHARACTERS} || !has(self.spec.runtime) || "
            "!has(self.spec.runtime.ray)",
            lambda resource: len(resource.metadata.name) <= MOST_RAY_CHARACTERS or resource.spec.runtime.ray is None,
            f"metadata.name must have at most {MOST_RAY_CHARACTERS} characters with runtime.ray, because KubeRay adds "
            "to it. Use another name",
        ),
    )

    api_version: Literal["ballast.dev/v1alpha1"] = API_VERSION  # type: ignore[assignment]  # Literal takes no constant
    kind: Literal["InferenceDeployment"] = KIND  # type: ignore[assignment]  # the same
    metadata: Metadata
    spec: Spec
    status: Status = Status()

    @classmethod
    def read(cls, manifest: Any, source: str, *, is_stored: bool = False) -> Self:
        """Parse an object from the API server or from a file.

        Args:
            manifest: The object.
            source: What the message names as its place.
            is_stored: The API server has admitted the object, maybe by the rules of an older version.

        Raises:
            InvalidConfig: The message names each wrong field, what was found there, and what was expected.
        """
        try:
            return cls.model_validate(manifest, context={STORED: is_stored})
        except ValidationError as error:
            raise InvalidConfig(source, InvalidConfig.sentences(error)) from error

    @property
    def queue_name(self) -> str:
        """The queue in Redis that the workers serve."""
        return self.spec.offline.queue or f"{self.metadata.namespace}/{self.metadata.name}"
