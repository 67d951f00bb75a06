"""The operator's settings, from the environment that the chart sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, Json, JsonValue, ValidationError

from ballast_api.wildcard import ANY, listening_host
from ballast_operator.context import VALKEY_SECURITY
from ballast_operator.errors import BadSetting
from ballast_operator.permitted import VOLUME_KINDS, PodRules

PREFIX = "BALLAST_"


def listed(text: str) -> tuple[str, ...]:
    """Return the items of a list that is separated by commas."""
    return tuple(item for each in text.split(",") if (item := each.strip()))


class OperatorSettings(BaseModel):
    """Each field is the environment variable `BALLAST_<FIELD>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: str = Field(min_length=1)
    """Namespace of the operator, with its Lease and its own Redis Secret."""
    worker_image: str = Field(min_length=1)
    """Image of native workers whose resource names none."""
    vllm_worker_image: str = ""
    """Image of workers with vLLM whose resource names none. If it is empty, such a resource needs
    `template.image`."""
    ray_worker_image: str = ""
    """Image of native workers with `runtime.ray` whose resource names none, for the head as well. If it is empty, such
    a resource needs `template.image`."""
    ray_vllm_worker_image: str = ""
    """The same for workers with vLLM."""
    gcs_redis_image: str = ""
    """Image of Valkey. For each resource with `runtime.ray` that names no `gcsRedis`, the operator runs a Valkey with
    the state of Ray's head. If it is empty, it runs none, and the workers of such a resource end a minute after their
    head."""
    gcs_redis_storage: str = Field(default="", pattern="^([0-9.]+([kMGTPE]i?)?)?$")
    """Size of the volume of each such Valkey, e.g. `1Gi`. If it is empty, the state of the head is lost with the pod of
    Valkey."""
    gcs_redis_storage_class: str = ""
    """StorageClass of these volumes; by default that of the cluster."""
    gcs_redis_pod_security_context: Json[dict[str, JsonValue]] = VALKEY_SECURITY
    """Security context of the pod of each such Valkey, in JSON. The chart sets its `valkey.podSecurityContext`. The
    default has the user and groups of the image."""
    identity: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", min_length=1)
    """Name of this replica in the Lease. The default is host name and process id."""
    lease_name: str = Field(default="ballast-operator", min_length=1)
    """Name of the Lease. Replicas that share a Lease form one operator."""
    release: str = Field(default="", pattern=r"^[^\s:]*$")
    """Name of this release in the operator's own Redis: the names of its users begin with `ballast:RELEASE:`. Set it if
    several clusters use one Redis. The default is the namespace and the name of the Lease, as `NAMESPACE/NAME`. It is
    no part of the names of queues: resources with the same namespace and name in two clusters share one queue. After a
    change, the operator neither removes the users with the former name (`ACL DELUSER` does) nor the queues that were
    used under it. Resources name the Lease in `status.operator`, whatever this setting is."""
    watch_namespaces: str = ""
    """Namespaces whose resources are reconciled, separated by commas; by default all. With a list, the operator needs
    permissions in these namespaces only."""
    redis_secret: str = ""
    """Secret in the operator's namespace with `url` and `password` of the Redis for resources that name none. If it is
    empty, there is no such Redis. While the Secret is missing, those resources are `Degraded` and do not change."""
    redis_ca_secret: str = ""
    """Secret in the operator's namespace whose key `ca.crt` has the certificates of authorities that operator and
    workers trust at the address in `redis_secret`. If it is empty, `redis_secret` may have this key."""
    redis_hosts: str = ""
    """Names of the hosts to which the operator connects if the Secret of a resource names them, separated by commas;
    `*` stands for any characters. It also connects to Services with a selector in the namespace of the resource, and to
    its own Redis."""
    redis_password_days: float = Field(default=30, ge=0)
    """Days after which the passwords of the users that the operator creates in its own Redis are replaced, without a
    restart. 0 keeps them until the Secret `<lease name>-redis-users` is deleted."""
    shared_queues: str = ""
    """Names of queues that the resources of every namespace may use, separated by commas; `*` stands for any
    characters. Without it, a queue belongs to the namespace with which its name begins."""
    require_secret_label: bool = True
    """Resources may name only Secrets with the label `ballast.dev/allow: "true"`. Set it to false only while you label
    the Secrets of existing resources: an account that may create resources can then read every Secret of its
    namespace."""
    allowed_images: str = "*"
    """Images that a resource may name in `template.image`: patterns separated by commas, in which `*` stands for any
    characters. A resource without `template.image` always gets the operator's default image."""
    allowed_service_accounts: str = ""
    """ServiceAccounts that a resource may name: patterns of `NAMESPACE/NAME` separated by commas."""
    allowed_volumes: str = ",".join(VOLUME_KINDS)
    """Kinds of volumes that a resource may name, separated by commas. A location `pvc://` and `model.cache` count as
    volumes. `hostPath` needs `allowed_host_paths` instead."""
    allowed_host_paths: str = ""
    """Directories of nodes, separated by commas, that a resource may name in volumes of the kind `hostPath`, with all
    that they contain."""
    allowed_cache_paths: str = ""
    """Directories of nodes, separated by commas, that a resource may name in `model.cachePath`. Each namespace gets a
    directory of its own in them, with the same mode."""
    runbook_base_url: str = Field(default="", pattern="^(|https?://.+)$")
    """URL of the runbook pages. Alerts link to them; without it they have no `runbook_url`."""
    max_concurrent_reconciles: int = Field(default=16, ge=1, le=100)
    """Number of resources that are reconciled at the same time."""
    poll_seconds: float = Field(default=10, ge=1, le=60)
    """Interval between two polls of a resource's workers and queue in Redis."""
    unused_queue_days: float = Field(default=30, gt=0)
    """Days that a queue in the operator's own Redis is kept, with its jobs and results, after the last resource that
    used it was deleted or names another queue."""
    audit_seconds: float = Field(default=600, ge=1)
    """Interval between two comparisons of the caches with the cluster, with one list of names per kind."""
    host: str = ANY
    """Address of metrics and probes."""
    pod_ip: str = ""
    """Address of the operator's pod, which the chart sets. If it is an IPv6 address, the operator listens on all
    addresses of both families, and the dashboards of Ray on all IPv6 addresses."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port of metrics and probes. 0 selects a free port and logs it."""

    @property
    def namespaces(self) -> tuple[str, ...]:
        """The namespaces to watch; empty for all."""
        return listed(self.watch_namespaces)

    @property
    def lease(self) -> str:
        """The Lease of this release, as `namespace/name`. Other releases know this one by it."""
        return f"{self.namespace}/{self.lease_name}"

    @property
    def listening_host(self) -> str:
        """The address to listen on."""
        return listening_host(self.host, self.pod_ip)

    @property
    def pod_rules(self) -> PodRules:
        """What the pods of resources may use."""
        return PodRules(
            images=listed(self.allowed_images),
            service_accounts=listed(self.allowed_service_accounts),
            volumes=listed(self.allowed_volumes),
            host_paths=listed(self.allowed_host_paths),
            cache_paths=listed(self.allowed_cache_paths),
        )

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Read the settings from environment variables.

        Raises:
            BadSetting: a setting is missing or invalid. The message names each of them.
        """
        found = {
            name: environment[PREFIX + name.upper()]
            for name in cls.model_fields
            if PREFIX + name.upper() in environment
        }
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                name = str(problem["loc"][0])
                lines.append(f"  - {PREFIX}{name.upper()}: {problem['msg']} (found {found.get(name)!r})")
            raise BadSetting("The operator's environment is incomplete or invalid:\n" + "\n".join(lines)) from None
