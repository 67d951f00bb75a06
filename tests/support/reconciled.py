"""A reconciler of resources in two namespaces, without an API server and without Redis."""

from __future__ import annotations

import asyncio
import base64
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, cast

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_operator import inference_deployment
from ballast_operator.cache import Cache
from ballast_operator.conditions.given import ConditionValue
from ballast_operator.context import OperatorContext, UserKeys
from ballast_operator.errors import ClusterUnavailable, Conflict
from ballast_operator.kinds import DEPLOYMENT, INFERENCE_DEPLOYMENT, SECRET, Body, Key, Kind
from ballast_operator.metrics import Metrics
from ballast_operator.plan import ChildrenPlan
from ballast_operator.poll_result import FormerQueue, PollResult, QueueSource
from ballast_operator.process import Operator
from ballast_operator.reconcile import Reconciler
from ballast_operator.settings import OperatorSettings

CONTEXT = OperatorContext(
    image="worker:1",
    redis={"url": base64.b64encode(b"redis://redis:6379").decode(), "password": ""},
    redis_key=Key(SECRET, "ballast", "redis"),
    release="r",
    user_keys=UserKeys("a" * 64),
    refuses_users=False,
)
GUEST = Key(INFERENCE_DEPLOYMENT, "guest", "g")
MODEL = {"uri": "file:///m"}
VERSIONS = itertools.count(1)


@dataclass
class FakeCluster:
    """Accepts every write. A written object has a new generation, and the status of the one before."""

    cache: Cache
    degraded: str = ""
    message: str = ""
    applied: set[Key] = field(default_factory=set)
    others: dict[Key, Body] = field(default_factory=dict)
    """Objects of other owners. The cache does not show them."""
    broken: Kind | None = None
    """No object of this kind can be written."""

    async def apply_status(self, key: Key, manifest: Body) -> Body:
        for condition in manifest["status"].get("conditions", ()):
            if condition["type"] == "Degraded":
                self.degraded, self.message = condition["reason"], condition["message"]
        found = self.cache.resources[key]
        metadata = found["metadata"] | {"resourceVersion": str(next(VERSIONS))}
        return found | {"metadata": metadata, "status": manifest["status"]}

    async def apply(self, key: Key, manifest: Body, *, uid: str | None) -> Body:
        if key in self.others:
            raise Conflict("apply", 409, "it exists")
        if key.kind == self.broken:
            raise ClusterUnavailable("the API server answered 500", is_about_one=True)
        self.applied.add(key)
        before = self.cache.children(GUEST).get(key, {"metadata": {"generation": 0}})
        about = {
            "uid": key.name,
            "resourceVersion": str(next(VERSIONS)),
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "generation": before["metadata"]["generation"] + 1,
        }
        return manifest | {"metadata": manifest["metadata"] | about, "status": before.get("status", {})}

    async def metadata(self, key: Key) -> Body | None:
        return self.others.get(key)

    async def find(self, key: Key) -> Body | None:
        return self.others.get(key)

    def post_event(self, _: Body) -> None:
        pass


class FakeGrants:
    """Only the Secret `labeled` has the label. The Secret `unavailable` cannot be read."""

    least_seconds = 1.0

    async def refusal(self, _: str, names: Iterable[str]) -> ConditionValue | None:
        if "unavailable" in names:
            raise ClusterUnavailable("no answer")
        is_refused = any(name != "labeled" for name in names)
        return ConditionValue("True", ConditionReason.SECRET_NOT_ALLOWED, "no label") if is_refused else None


class FakePoller:
    """Finds every former queue finished."""

    def __init__(self) -> None:
        self.left: list[Key] = []
        """The resources whose settings are removed from their queues."""

    def last(self, _: Key, source: QueueSource) -> PollResult:
        return PollResult(0.0, former=tuple(FormerQueue(name, 0, is_served=False) for name in source.former))

    def forget(self, _: Key) -> None:
        pass

    def leave(self, key: Key) -> None:
        self.left.append(key)


class FakeReleases:
    own = "r"

    async def may_claim(self, _: str) -> bool:
        return True

    def is_former(self, holder: str) -> bool:
        return not holder


UNPLANNABLE: dict[str, Any] = {"model": {"uri": "file:///models/[no-children", "servedName": "m"}}
"""A part of a spec from which `plan` computes no children, as if the schema had missed a wrong value."""


def plan(resource: InferenceDeployment, *given: Any) -> ChildrenPlan:
    if resource.spec.model.uri == UNPLANNABLE["model"]["uri"]:
        raise ValueError(resource.spec.model.uri)
    return inference_deployment.plan(resource, *given)


def make_reconciler(cache: Cache, cluster: Any, *, poller: Any, grants: Any, context: OperatorContext) -> Reconciler:
    """Return the reconciler of an operator that starts: it knows only what the cluster knows."""
    return Reconciler(
        cluster,
        cache,
        poller=poller,
        grants=grants,
        releases=cast(Any, FakeReleases()),
        context=context,
        users_changed=lambda: None,
    )


def make_operator(cluster: object, *, metrics: Metrics | None = None, **settings: Any) -> Operator:
    """Return an operator that calls this cluster."""
    read = OperatorSettings(namespace="ballast", worker_image="worker:1", **settings)
    return Operator(read, cast(Any, cluster), metrics or Metrics(), asyncio.Event())


@dataclass
class Bench:
    """A reconciler, and the resources of two namespaces."""

    cache: Cache = field(default_factory=Cache)

    def __post_init__(self) -> None:
        self.cluster = FakeCluster(self.cache)
        self.start()

    def start(self) -> None:
        """Start the operator again."""
        self.poller = FakePoller()
        self.reconciler = make_reconciler(
            self.cache, self.cluster, poller=self.poller, grants=FakeGrants(), context=CONTEXT
        )

    def put(self, namespace: str, name: str, about: dict[str, Any] | None = None, /, **spec: Any) -> None:
        key = Key(INFERENCE_DEPLOYMENT, namespace, name)
        version = next(VERSIONS)
        metadata = {
            "namespace": namespace,
            "name": name,
            "uid": f"{namespace}-{name}",
            "generation": version,
            "resourceVersion": str(version),
            "creationTimestamp": "2026-01-01T00:00:00Z",
        }
        status = (self.cache.resources.get(key) or {}).get("status") or {"operator": "r"}
        body = {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "InferenceDeployment",
            "metadata": metadata | (about or {}),
            "spec": {"model": MODEL, "gpu": {"count": 0}} | spec,
            "status": status,
        }
        self.cache.put(INFERENCE_DEPLOYMENT, body)

    def roll(self, updated: int, *, of: int = 1) -> None:
        """Report that this many of all pods of the guest have the newest template."""
        key = Key(DEPLOYMENT, GUEST.namespace, GUEST.name)
        found = self.cache.children(GUEST)[key]
        counts = {"replicas": of, "updatedReplicas": updated, "observedGeneration": found["metadata"]["generation"]}
        metadata = found["metadata"] | {"resourceVersion": str(next(VERSIONS))}
        self.cache.put(DEPLOYMENT, found | {"metadata": metadata, "status": counts})

    def reconcile(self) -> float | None:
        return asyncio.run(self.reconciler.reconcile(GUEST))

    def patterns(self) -> list[str]:
        """Return the keys that the users of the guest may use."""
        return [rule for user in self.reconciler.users.users.get(GUEST, ()) for rule in user.rules if rule[0] == "~"]
