"""Values shared by all reconciliations: the default image, the optional kinds, the operator's Redis Secret. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.wildcard import ANY
from ballast_operator.kinds import Body, Key
from ballast_operator.permitted import PodRules


@dataclass(frozen=True, slots=True)
class UserKeys:
    """The keys from which the passwords of users in Redis are computed."""

    present: str = field(default="", repr=False)
    previous: str = field(default="", repr=False)
    """Empty unless the key was replaced a short time ago."""
    is_first: bool = False
    """Whether no key came before. Somebody who deletes the Secret of the keys ends all former passwords."""


IMAGE_USER: Body = {"runAsNonRoot": True, "runAsUser": 999, "runAsGroup": 1000, "fsGroup": 1000}
VALKEY_SECURITY: Body = IMAGE_USER | {"seccompProfile": {"type": "RuntimeDefault"}}
"""Security context of a pod with the image of Valkey, whose own user is root."""


@dataclass(frozen=True, slots=True)
class GcsValkey:
    """The Valkey that the operator runs for the head of each Ray cluster."""

    image: str = ""
    """Its image; empty if the operator runs none."""
    storage: str = ""
    """Size of its volume; without one, the state is lost with its pod."""
    storage_class: str = ""
    security: Body = field(default_factory=lambda: VALKEY_SECURITY)
    """Security context of its pod."""


@dataclass(frozen=True, slots=True)
class OperatorContext:
    """Settings and cluster state that apply to every resource."""

    image: str
    """Image of native workers whose resource names none."""
    vllm_image: str = ""
    """The same for workers with vLLM; empty if the operator knows none."""
    ray_image: str = ""
    """Image of native workers on Ray; empty if the operator knows none."""
    ray_vllm_image: str = ""
    """The same for workers with vLLM on Ray."""
    gcs: GcsValkey = GcsValkey()
    kinds: frozenset[str] = frozenset()
    """Names of the optional kinds that the cluster has."""
    redis: Mapping[str, str] | None = None
    """Data of the operator's own Redis Secret, in base64; None if the Secret does not exist."""
    redis_key: Key | None = None
    """Key of that Secret; None if the operator has no Redis of its own."""
    rules: PodRules = field(default_factory=PodRules)
    """What the pods of resources may use."""
    runbooks: str | None = None
    """Base URL of the runbook pages that alerts link to."""
    release: str = ""
    """Name of this release in Redis."""
    user_keys: UserKeys = UserKeys()
    refuses_users: bool | None = None
    """Whether the operator's own Redis refuses the creation of users; None if this is not known yet."""
    shared_queues: tuple[str, ...] = ()
    """Patterns of queues that every namespace may use."""
    any_host: str = ANY
    """The address on which a server in a pod listens, in the first address family of the cluster."""

    def image_of(self, resource: InferenceDeployment) -> str:
        """Return the default image of the resource's backend, with Ray if it runs there; empty if it is unknown."""
        images = {"native": (self.image, self.ray_image), "vllm": (self.vllm_image, self.ray_vllm_image)}
        return images[resource.spec.backend][resource.spec.runtime.ray is not None]

    @property
    def lacks_redis(self) -> bool:
        """Return whether the operator's own Secret is missing or incomplete. That is not the same as "no Redis"."""
        return self.redis_key is not None and "url" not in self.redis_keys

    @property
    def redis_keys(self) -> frozenset[str]:
        """Return the keys of the operator's own Secret."""
        return frozenset(self.redis or ())
