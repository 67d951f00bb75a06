"""The configuration file of a worker: under `ballast up`, in a pod, and in tests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import Field

from ballast_api.base import ApiModel
from ballast_api.hot import Hot
from ballast_api.rules import Rule
from ballast_api.sections import Backend, Cost, EngineSettings, Limits, Model, Name, Offline, Slo, backend_rules
from ballast_api.yaml_file import YamlFile


class Runtime(ApiModel):
    """Where this worker runs. The operator or `ballast up` writes this section, not users."""

    rules = (
        Rule(
            "!(has(self.redisUrl) && has(self.redisUrlFile))",
            lambda runtime: runtime.redis_url is None or runtime.redis_url_file is None,
            "runtime.redisUrl and runtime.redisUrlFile both name the address of Redis. Remove one",
        ),
        Rule(
            "has(self.tlsCertFile) == has(self.tlsKeyFile)",
            lambda runtime: (runtime.tls_cert_file is None) == (runtime.tls_key_file is None),
            "runtime.tlsCertFile and runtime.tlsKeyFile belong together. Set both, or remove both",
        ),
        Rule(
            "self.tensorParallel % self.nodes == 0",
            lambda runtime: runtime.tensor_parallel % runtime.nodes == 0,
            "runtime.tensorParallel must be a multiple of runtime.nodes, because each node has as many GPUs",
        ),
    )

    host: str = "127.0.0.1"
    """Address of the HTTP server. `0.0.0.0` stands for all addresses of both families if the variable `POD_IP` is an
    IPv6 address."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the HTTP server. 0 uses a free port, and prints it."""
    metrics_port: int | None = Field(default=None, ge=0, le=65535)
    """Port of a second HTTP server, with the metrics and the status that name tenants. Only Prometheus and the owner of
    the deployment need to reach it. By default no port shows them. 0 uses a free port, and prints it."""
    redis_url: str | None = None
    """Address of Redis: `redis://`, `rediss://` or `unix://`. Without Redis the worker serves only online requests."""
    redis_url_file: Path | None = None
    """File with the address of Redis, e.g. from a Secret, instead of `redisUrl`. The worker applies a change of the
    file without a restart."""
    redis_password_file: Path | None = None
    """File with the password of Redis, so that no URL contains it. The worker applies a change of the file without a
    restart."""
    redis_ca_file: Path | None = None
    """File with the certificates (PEM) of authorities that the worker trusts at a `rediss://` address, besides those of
    the system. The worker applies a change of the file without a restart."""
    namespace: Name = "local"
    """Namespace of the resource that this worker belongs to."""
    name: Name = "ballast"
    """Name of that resource. The default name of the queue is `<namespace>/<name>`."""
    worker_id: Name | None = None
    """Name of the worker, unique in its queue; by default host name and process id."""
    tensor_parallel: int = Field(default=1, ge=1, le=256)
    """GPUs that share the model. The operator sets `gpu.count`. Above 1 it needs vLLM."""
    nodes: int = Field(default=1, ge=1, le=16)
    """Nodes over which these GPUs are spread, each with as many. Above 1 the worker must be a replica of Ray Serve."""
    generation: Hot[int] = Field(default=0, ge=0)
    """Generation of the resource that this configuration belongs to."""
    created: Hot[float] = Field(default=0, ge=0)
    """Creation time of that resource in Unix seconds. If resources that share a queue have different queue settings,
    those of the resource that the queue is named after are in force, else those of the oldest."""
    tls_cert_file: Path | None = None
    """File with the certificate chain (PEM). With it and `tlsKeyFile`, both HTTP servers serve HTTPS only. The worker
    applies a change of the files without a restart."""
    tls_key_file: Path | None = None
    """File with the private key (PEM) of the certificate."""
    api_keys_file: Path | None = None
    """File with a YAML mapping from API key to tenant. If it is set, a request without a known key gets status 401."""
    unready_seconds: Hot[float] = Field(default=0, ge=0)
    """Time after SIGTERM in which `/ready` fails while the worker still accepts new requests, so that Services and load
    balancers stop sending requests before the worker refuses them. The operator sets it to `rollout.unreadySeconds`."""
    drain_seconds: Hot[float] = Field(default=30, ge=0)
    """Time that online requests have to finish after the unready time."""


Slots = Annotated[int, Field(ge=1, le=4096)]
USES_VLLM = "(has(self.engine.backend) && self.engine.backend == 'vllm')"


class WorkerConfig(YamlFile):
    """The whole configuration of a worker."""

    rules = (
        *backend_rules(USES_VLLM),
        Rule(
            f"{USES_VLLM} || self.runtime.tensorParallel == 1",
            lambda config: config.backend == "vllm" or config.runtime.tensor_parallel == 1,
            "runtime.tensorParallel ({runtime.tensorParallel}) is above 1, and the native engine runs this model. Set "
            "engine.backend to vllm, or remove the field",
        ),
    )

    model: Model
    engine: EngineSettings = EngineSettings()
    slots: Slots | None = None
    """Slots of the worker: requests that run at a time. By default what memory allows, at most 64, and vLLM's own
    default with vLLM."""
    slo: Slo = Slo()
    offline: Offline = Offline()
    limits: Limits = Limits()
    cost: Cost = Cost()
    runtime: Runtime = Runtime()

    @property
    def backend(self) -> Backend:
        """The engine that runs the model. A worker does not know the GPUs of its resource: the operator sets it."""
        return self.engine.backend or "native"

    @property
    def queue_name(self) -> str:
        """The queue that this worker serves."""
        return self.offline.queue or f"{self.runtime.namespace}/{self.runtime.name}"

    def dump(self) -> str:
        """Return YAML from which `parse` returns an equal value."""
        data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return yaml.safe_dump(data, sort_keys=False)


def content_hash(text: str) -> str:
    """Return the hash of a configuration file, with which a worker reports the file that it has in force."""
    return hashlib.sha256(text.encode()).hexdigest()
