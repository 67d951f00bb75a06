"""The resource: one model, which the operator serves to online requests and offline jobs with worker pods.

The sections `engine`, `slots`, `slo`, `offline`, `limits` and `cost` belong to the worker (`sections.py`). The others
describe the number of pods, and their place in the cluster.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ballast_api.base import STORED, ApiModel, keyed_by
from ballast_api.errors import InvalidConfig
from ballast_api.names import API_VERSION, KIND, MOST_NAME_CHARACTERS, MOST_RAY_CHARACTERS, SUBMITTER_SUFFIX
from ballast_api.pods import GPUS, MIG, Json, PodTemplate, SecretKey, SecretName, is_gpu
from ballast_api.ray import ServingRuntime
from ballast_api.rules import Rule
from ballast_api.sections import (
    LOCATION,
    LOCATIONS,
    Backend,
    Cost,
    EngineSettings,
    Limits,
    Model,
    Name,
    Offline,
    Slo,
    backend_rules,
    is_location,
)
from ballast_api.status import Status
from ballast_api.worker_config import Slots

FETCHED = "^(hf|s3)://"
STARTUP_SECONDS = {"native": 600, "vllm": 1800}
"""Default of `rollout.startupSeconds` by backend."""
UNREADY_SECONDS = 5
"""Default of `rollout.unreadySeconds`: the time until Services of Kubernetes and most routers send no more requests."""
RAY_UNREADY_SECONDS = 10
"""The same on Ray. Serve ends a replica in a pod that stays, and Services learn of it only from the next probe."""
RESOURCE_NAME = r"^[a-z]([-a-z0-9]*[a-z0-9])?$"
ClaimName = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]


class SharedClaim(ApiModel):
    """A PersistentVolumeClaim for all pods of the resource. It must exist in the resource's namespace."""

    claim_name: ClaimName
    """Name of the claim. Pods on several nodes need a claim with access mode ReadWriteMany. Several resources may use
    the same claim. It keeps each version that was fetched, in a directory of its own: delete those that no pod uses."""


class ModelCache(ApiModel):
    """A volume for the files that a pod fetches. Set one of the two fields."""

    rules = (
        Rule(
            "has(self.persistentVolumeClaim) != has(self.volumeClaimTemplate)",
            lambda cache: (cache.persistent_volume_claim is None) != (cache.volume_claim_template is None),
            "model.cache needs either persistentVolumeClaim (one claim for all pods) or volumeClaimTemplate (a claim "
            "for each pod). Set one of them",
        ),
    )

    persistent_volume_claim: SharedClaim | None = None
    volume_claim_template: Json | None = None
    """Template of a claim that Kubernetes makes for each pod and deletes with the pod, as in an ephemeral volume, e.g.
    `{spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 100Gi}}}}`."""


def default_served_name(uri: str) -> str:
    """Return the served name of a model whose resource sets none. A revision on `hf://` may contain slashes."""
    place = uri.partition("@")[0] if uri.startswith("hf://") else uri
    return place.rstrip("/").rsplit("/", 1)[-1].partition("@")[0]


def _revision_in(uri: str) -> str:
    """Return the revision that follows `@` in a URI, as `ballast fetch` reads it."""
    return uri.partition("@")[2].rstrip("/") if uri.startswith("hf://") else ""


SERVED_NAME = (
    "[has(self.servedName) ? self.servedName : "
    "(self.uri.startsWith('hf://') ? self.uri.split('@')[0] : self.uri).find('[^/]+/*$').split('@')[0].split('/')[0]]"
)
"""CEL expression over a `ServedModel`: a list with its served name."""


class ServedModel(Model):
    """The model, and how a pod gets it. A change of this section rolls the pods."""

    rules = (
        Rule(
            f"self.uri.matches('{LOCATION}')",
            lambda model: is_location(model.uri),
            f"model.uri must be {LOCATIONS}",
        ),
        Rule(
            "!has(self.revision) || self.revision == '' || !self.uri.startsWith('hf://') || "
            "self.uri.find('@.*[^/]') in ['', '@' + self.revision]",
            lambda model: not model.revision or _revision_in(model.uri) in {"", model.revision},
            "model.revision and the part of model.uri after @ name two revisions. Remove one of them",
        ),
        Rule(
            f"!has(self.adapters) || {SERVED_NAME}.all(name, self.adapters.all(each, each.name != name))",
            lambda model: (
                (model.served_name or default_served_name(model.uri)) not in {each.name for each in model.adapters}
            ),
            "model.adapters contains an adapter with the name of the model. Use another name, or set model.servedName",
        ),
        Rule(
            f"!has(self.aliases) || {SERVED_NAME}.all(name, self.aliases.all(alias, alias != name)) && "
            "(!has(self.adapters) || self.adapters.all(each, self.aliases.all(alias, alias != each.name)))",
            lambda model: {
                model.served_name or default_served_name(model.uri),
                *(each.name for each in model.adapters),
            }.isdisjoint(model.aliases),
            "model.aliases contains the name of the model or of an adapter, which clients use already. Remove it from "
            "the list",
        ),
        Rule(
            "!(has(self.cachePath) && has(self.cache))",
            lambda model: model.cache_path is None or model.cache is None,
            "model.cachePath and model.cache both name a place for fetched files. Remove one of them",
        ),
        Rule(
            "!has(self.sizeLimitGibibytes) || !(has(self.cachePath) || has(self.cache))",
            lambda model: model.size_limit_gibibytes is None or (model.cache_path is None and model.cache is None),
            "model.sizeLimitGibibytes limits the emptyDir that holds fetched files. model.cachePath and model.cache "
            "replace this emptyDir. Remove sizeLimitGibibytes",
        ),
    )

    uri: str = Field(min_length=1, max_length=2048, examples=["hf://Qwen/Qwen3-8B"])
    """`hf://owner/name`, `s3://bucket/prefix`, `pvc://claim/path`, or `file:///directory`. With `pvc://`, the whole
    claim is mounted read-only at `/models`, so `template.volumes` must not name it. With `file://`, the image or a
    volume of the template contains the directory."""
    revision: str = Field(default="", max_length=253)
    """Version of the weights: on `hf://` a branch, tag or commit, elsewhere any name. A partly generated answer is
    continued only under the same revision, and, unless it is a commit of 40 hexadecimal digits, only with the same
    files."""
    credentials_secret: SecretName | None = None
    """Secret whose keys become environment variables of the containers that fetch the model, its adapters and its draft
    model, e.g. `HF_TOKEN`, `AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL`."""
    cache_path: str | None = Field(default=None, max_length=1024, pattern=r"^/[^:]*$")
    """Directory of the node that keeps fetched models for all pods of a namespace on the node. In it, each namespace
    has a directory of its own, which the kubelet creates with the same mode. The user of the image (65532 in Ballast's
    own) needs write access to it, e.g. by mode 1777. Namespaces with Pod Security level baseline or restricted forbid
    `cachePath`: use `cache` there. The directory keeps each version that was fetched, in a directory of its own: delete
    those that no pod uses. Without `cachePath` and `cache`, each pod fetches the model to an emptyDir. A fetch to the
    disk of the node leaves 15 % of it free, below which the kubelet evicts pods by default. The variable
    `BALLAST_KEEP_FREE_PERCENT` in `template.env` changes the share."""
    cache: ModelCache | None = None
    size_limit_gibibytes: int | None = Field(default=None, ge=1, le=1_048_576)
    """Size limit of the emptyDir that holds fetched files. Kubernetes evicts a pod that exceeds it. By default only
    the disk of the node limits the size."""


class GpuRequest(ApiModel):
    """The GPUs of each worker. A change of this section rolls the pods."""

    rules = (
        Rule(
            "!(has(self.resourceName) && has(self.resourceClaimTemplate))",
            lambda gpu: gpu.resource_name is None or gpu.resource_claim_template is None,
            "gpu.resourceName and gpu.resourceClaimTemplate both request the device. Remove one of them",
        ),
        Rule(
            "self.count > 0 || !(has(self.resourceName) || has(self.resourceClaimTemplate))",
            lambda gpu: gpu.count > 0 or (gpu.resource_name is None and gpu.resource_claim_template is None),
            "gpu.count is 0, which means a worker on the CPU. Remove gpu.resourceName and gpu.resourceClaimTemplate, "
            "or set the count to 1",
        ),
        Rule(
            f"self.count <= 1 || !has(self.resourceName) || !self.resourceName.startsWith('{MIG}')",
            lambda gpu: gpu.count <= 1 or not (gpu.resource_name or "").startswith(MIG),
            "gpu.count ({count}) is above 1, but MIG slices cannot share a model: a process uses only one of them. Set "
            "the count to 1 and name a larger slice, or request whole GPUs",
        ),
    )

    count: int = Field(default=1, ge=0, le=16)
    """GPUs of each worker, which runs vLLM. 0 runs the worker on CPUs. Above 1, the GPUs share the model by tensor
    parallelism, which no other field sets."""
    resource_name: str | None = Field(
        default=None, max_length=253, examples=["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]
    )
    """Extended resource to request; by default `nvidia.com/gpu`."""
    resource_claim_template: str | None = Field(default=None, min_length=1, max_length=253)
    """ResourceClaimTemplate (dynamic resource allocation) to use instead of an extended resource."""


class Scaling(ApiModel):
    """Replicas by measured load. Without this section, people, an HPA or KEDA set `spec.replicas`."""

    rules = (
        Rule(
            "self.minReplicas <= self.maxReplicas",
            lambda scaling: scaling.min_replicas <= scaling.max_replicas,
            "scaling.minReplicas ({minReplicas}) is above scaling.maxReplicas ({maxReplicas}). Lower the minimum, or "
            "raise the maximum",
        ),
        Rule(
            "!has(self.offlineMaxReplicas) || self.offlineMaxReplicas <= self.maxReplicas",
            lambda scaling: (
                scaling.offline_max_replicas is None or scaling.offline_max_replicas <= scaling.max_replicas
            ),
            "scaling.offlineMaxReplicas is above scaling.maxReplicas ({maxReplicas}), which limits all replicas. Lower "
            "offlineMaxReplicas, or raise maxReplicas",
        ),
    )

    min_replicas: int = Field(default=1, ge=0, le=10_000)
    """Minimum of replicas. 0 scales to zero after `idleSeconds` without work. Offline work then starts a replica again.
    Online requests do not: the Service refuses them while no worker runs."""
    max_replicas: int = Field(ge=1, le=10_000)
    """Maximum of replicas."""
    headroom_percent: float = Field(default=20, ge=0, le=500)
    """Growth of the online load that the replicas can serve without a new one."""
    offline_max_replicas: int | None = Field(default=None, ge=0, le=10_000)
    """Maximum of replicas that waiting offline work alone may cause. By default offline work adds replicas only for
    deadlines at risk."""
    scale_up_seconds: int = Field(default=30, ge=0, le=3600)
    """Time that the need must last before replicas are added."""
    scale_down_seconds: int = Field(default=300, ge=0, le=86_400)
    """Time that replicas must be unneeded before they are removed."""
    idle_seconds: int = Field(default=600, ge=0, le=86_400)
    """With `minReplicas: 0`: time without work before the last replica is removed."""


class Rollout(ApiModel):
    """How pods are replaced. A change of `unreadySeconds`, `drainSeconds` or `startupSeconds` rolls the pods."""

    rules = (
        Rule(
            "self.maxSurge + self.maxUnavailable > 0",
            lambda rollout: rollout.max_surge + rollout.max_unavailable > 0,
            "rollout.maxSurge and rollout.maxUnavailable are both 0, so no pod can be replaced. Raise one of them: "
            "maxUnavailable if the cluster has no free GPU",
        ),
    )

    max_surge: int = Field(default=1, ge=0, le=100)
    """Maximum pods above `replicas` during a rollout. Each of them needs a GPU."""
    max_unavailable: int = Field(default=0, ge=0, le=100)
    """Maximum pods below `replicas` during a rollout."""
    unready_seconds: int | None = Field(default=None, ge=0, le=600)
    """Time that a terminating worker still accepts online requests, while load balancers learn that it leaves. Raise it
    for load balancers outside of the cluster that send requests to the pods themselves. By default 5, and 10 on Ray."""
    drain_seconds: int = Field(default=30, ge=0, le=3600)
    """Time that the online requests of a terminating worker have to finish. Offline items return to the queue at
    once."""
    startup_seconds: int | None = Field(default=None, ge=10, le=86_400)
    """Time that a worker has to load the model after it was fetched. After it, Kubernetes restarts the worker. A
    rollout without progress for this time counts as stuck, and fetching is no progress. By default 600, and 1800 with
    vLLM, which compiles the model."""


class Disruption(ApiModel):
    """Limits for node drains and evictions."""

    max_unavailable: int = Field(default=1, ge=0, le=10_000)
    """Maximum workers that may be evicted at a time (PodDisruptionBudget). 0 forbids voluntary evictions."""


class RedisRef(ApiModel):
    """The Secret with the address of Redis or Valkey. A change of this section rolls the pods, a change of the
    Secret does not.
    """

    secret_name: SecretName
    """In the resource's namespace."""
    url_key: SecretKey = "url"
    """Key of the Secret that holds the URL: `redis://` or `rediss://` with host, port, user and database."""
    password_key: SecretKey | None = None
    """Key of the Secret that holds the password, if the URL does not contain it."""
    ca_key: SecretKey | None = None
    """Key of the Secret that holds the certificates (PEM) of authorities that workers and operator trust at a
    `rediss://` address, besides those of the image."""


class Submitter(ApiModel):
    """A user in Redis that may only add to an inbox of the queue."""

    rules = (
        Rule(
            f"self.secretName.endsWith('{SUBMITTER_SUFFIX}')",
            lambda submitter: submitter.secret_name.endswith(SUBMITTER_SUFFIX),
            f"secretName must end with {SUBMITTER_SUFFIX}, so that a resource takes no name of another Secret",
        ),
    )

    secret_name: SecretName
    """The Secret that the operator creates in the resource's namespace, with `url` and `password` of the user. Its name
    ends with `-ballast-submitter`, so that no condition shows whether another Secret exists."""
    tenant: Name | None = None
    """The tenant for which the user submits. It must be set if, and only if, `offline.tenants` declares tenants."""


class QueueAccess(ApiModel):
    """Who may use the queue besides the workers of this resource. It needs the Redis of the operator."""

    namespaces: tuple[SecretName, ...] = Field(default=(), max_length=64)
    """Other namespaces whose resources may name this queue in `offline.queue`. They can do everything in the queue. The
    grant counts only for a queue whose name begins with the namespace of this resource."""
    submitters: tuple[Submitter, ...] = Field(default=(), max_length=32, json_schema_extra=keyed_by("secretName"))
    """Users in Redis that the operator creates for programs that add items. See `submit from any language`."""


class ApiKeysRef(ApiModel):
    """The Secret with the API keys of clients. A change of this section rolls the pods, a change of the Secret does
    not.
    """

    secret_name: SecretName
    """In the resource's namespace."""
    key: SecretKey = "keys.yaml"
    """Key of the Secret that holds a YAML mapping from API key to tenant."""


class Monitoring(ApiModel):
    """Objects for Prometheus. The operator makes them if the kinds of the prometheus-operator exist."""

    service_monitor: bool = True
    """Make a ServiceMonitor."""
    prometheus_rule: bool = True
    """Make a PrometheusRule with the alerts of this resource."""
    scrape_seconds: int = Field(default=15, ge=1, le=60)
    """Scrape interval of the ServiceMonitor. With more than 60 s, alerts over 2 and 5 minutes would lack samples."""
    labels: dict[str, str] = Field(default={})
    """Labels to add to both objects, for a Prometheus that selects by label (e.g. `release: kube-prometheus-stack`)."""


class Network(ApiModel):
    """How clients connect to the workers, and which."""

    tls_secret: SecretName | None = None
    """Secret of type `kubernetes.io/tls` in the resource's namespace. With it, workers serve HTTPS only, on all ports.
    Its key `ca.crt` has the certificate of the authority: a ServiceMonitor without it does not scrape. A change of
    this field rolls the pods, a change of the Secret does not."""

    policy: bool = True
    """Make a NetworkPolicy that admits only port 8000, and port 8001 for the peers of `metricsFrom`."""
    ingress_from: tuple[Json, ...] = Field(default=(), max_length=64)
    """NetworkPolicy peers (`podSelector`, `namespaceSelector`, `ipBlock`) that may connect; by default all."""
    metrics_from: tuple[Json, ...] = Field(default=(), max_length=64)
    """NetworkPolicy peers that may scrape the metrics with tenants, e.g. Prometheus. With a peer, workers serve all
    metrics on port 8001, and the ServiceMonitor scrapes this port. By default no port shows tenants, and the
    ServiceMonitor scrapes port 8000. A change between none and some peers rolls the pods."""

    rules = (
        Rule(
            "self.policy || !has(self.ingressFrom) || size(self.ingressFrom) == 0",
            lambda network: network.policy or not network.ingress_from,
            "network.ingressFrom has no effect without the policy. Set network.policy to true, or remove the peers",
        ),
        Rule(
            "self.policy || !has(self.metricsFrom) || size(self.metricsFrom) == 0",
            lambda network: network.policy or not network.metrics_from,
            "network.metricsFrom needs the policy, which admits only these peers. Set network.policy to true, or "
            "remove the peers",
        ),
    )


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
            stored=("template.resources", "gpu.resourceName"),
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
            stored=(
                "template.volumes",
                "model.uri",
                "model.cache.persistentVolumeClaim",
                "model.adapters",
                "engine.speculative.draftUri",
            ),
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
        speculative = self.engine.speculative
        draft = None if speculative is None else speculative.draft_uri
        uris = (self.model.uri, draft or "", *(adapter.uri for adapter in self.model.adapters))
        return any(re.match(FETCHED, uri) for uri in uris)

    @property
    def claims(self) -> frozenset[str]:
        """The claims that Ballast mounts."""
        speculative, cache = self.engine.speculative, self.model.cache
        draft = None if speculative is None else speculative.draft_uri
        uris = (self.model.uri, draft or "", *(adapter.uri for adapter in self.model.adapters))
        shared = None if cache is None else cache.persistent_volume_claim
        found = {uri.split("/")[2] for uri in uris if uri.startswith("pvc://")}
        return frozenset(found if shared is None else {*found, shared.claim_name})

    def is_gpu(self, name: str) -> bool:
        """Return whether a resource of a container is a GPU."""
        return is_gpu(name) or name == self.gpu.resource_name

    @property
    def served_name(self) -> str:
        """The model name that clients use."""
        return self.model.served_name or default_served_name(self.model.uri)

    @property
    def startup_seconds(self) -> int:
        """The time that a worker has to load the model."""
        return self.rollout.startup_seconds or STARTUP_SECONDS[self.backend]

    @property
    def unready_seconds(self) -> int:
        """The time that a terminating worker still accepts online requests."""
        usual = UNREADY_SECONDS if self.runtime.ray is None else RAY_UNREADY_SECONDS
        return usual if self.rollout.unready_seconds is None else self.rollout.unready_seconds


class Metadata(ApiModel):
    """The metadata that Ballast reads. Other fields are kept."""

    model_config = ConfigDict(alias_generator=to_camel, extra="allow")

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 0
    creation_timestamp: str | None = None
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
