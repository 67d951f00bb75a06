"""Which failures of a write end the writes of a plan."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import pytest
from reconciled import CONTEXT, GUEST, Bench

from ballast_api.metadata import Metadata
from ballast_api.names import SPEC_HASH
from ballast_operator.children_writer import ChildrenWriter
from ballast_operator.cluster import Cluster
from ballast_operator.context import GcsValkey
from ballast_operator.errors import ClusterUnavailable, Conflict, Forbidden, Invalid
from ballast_operator.kinds import (
    DEPLOYMENT,
    INFERENCE_DEPLOYMENT,
    NETWORK_POLICY,
    POD,
    RAY_CLUSTER,
    RAY_SERVICE,
    SERVICE,
    SERVICE_MONITOR,
    STATEFUL_SET,
    Body,
    Key,
    Kind,
)
from ballast_operator.plan import Apply, ChildrenPlan, Delete, Resize
from ballast_operator.resource_memory import ResourceMemory

PLAN = ChildrenPlan(
    resize=(Resize(Key(RAY_CLUSTER, "ns", "llm"), owner="u", replicas=1, leaving=(), because="load"),),
    delete=(Delete(Key(SERVICE, "ns", "llm"), "u", because="gone"), Delete(Key(POD, "ns", "llm"), "u", because="gone")),
)


class FailingCluster:
    """Refuses a size, and fails each deletion."""

    def __init__(self, failure: Exception) -> None:
        self.failure, self.num_deletions = failure, 0

    async def resize(self, *_: object, owner: str) -> bool:
        raise Invalid("resize", 422, "another size")

    async def delete(self, *_: object) -> None:
        self.num_deletions += 1
        raise self.failure


@pytest.mark.parametrize(
    ("failure", "is_raised", "deletions"),
    [(ClusterUnavailable("no answer"), True, 1), (Forbidden("delete", 403, "no right"), False, 2)],
    ids=["of the API server", "of one write"],
)
def test_a_failure_after_a_problem_is_counted_and_ends_the_plan_if_the_api_server_is_away(
    failure: Exception, is_raised: bool, deletions: int
) -> None:
    cluster, memory = FailingCluster(failure), ResourceMemory("u")
    writer = ChildrenWriter(cast(Cluster, cluster), cast(Any, None), post=lambda *_: None)
    key = Key(INFERENCE_DEPLOYMENT, "ns", "llm")
    try:
        problem, first = asyncio.run(writer.write(key, Metadata(name="llm"), PLAN, memory))
    except ClusterUnavailable:
        problem = first = None

    assert (problem is None, first is None) == (is_raised, is_raised)
    assert cluster.num_deletions == deletions
    assert memory.failures.total() == (0 if is_raised else 2)


@pytest.mark.parametrize(
    ("runtime", "kind", "name", "pods"),
    [
        ({}, NETWORK_POLICY, "g", DEPLOYMENT),
        ({"ray": {}}, NETWORK_POLICY, "g", RAY_SERVICE),
        ({"ray": {}}, NETWORK_POLICY, "g-ballast-ray", RAY_SERVICE),
        ({"ray": {}}, SERVICE, "g-ballast-gcs", RAY_SERVICE),
    ],
    ids=["workers", "workers on Ray", "head of Ray", "state of the head"],
)
def test_no_pod_starts_without_its_policy_or_with_a_server_of_another_owner(
    runtime: dict[str, Any], kind: Kind, name: str, pods: Kind
) -> None:
    """A resource `g-ballast-ray` takes the name of the policy of the head: whoever reaches it can run code there."""
    bench, taken = Bench(), Key(kind, GUEST.namespace, name)

    def reconcile(replicas: int = 1, **network: Any) -> set[Kind]:
        """Return the kinds of the children that the operator writes after the pods change."""
        bench.cluster.applied = set()
        template = {"image": "worker:1", "annotations": {"a": f"{len(network)}"}}
        spec = {"runtime": runtime, "template": template, "network": network, "replicas": replicas}
        bench.put(GUEST.namespace, GUEST.name, **spec)
        bench.start()
        kinds = frozenset({RAY_SERVICE.name, SERVICE_MONITOR.name})
        bench.reconciler.context = replace(CONTEXT, kinds=kinds, gcs=GcsValkey(image="valkey:1"))
        with suppress(ClusterUnavailable):
            bench.reconcile()
        return {key.kind for key in bench.cluster.applied}

    bench.cluster.others[taken] = {"metadata": {"name": name, "uid": "theirs"}}
    written = reconcile()
    assert (bool({DEPLOYMENT, STATEFUL_SET, RAY_SERVICE} & written), SERVICE_MONITOR in written) == (False, True)
    assert (bench.cluster.degraded, name in bench.cluster.message) == ("NameTaken", True)
    assert (DEPLOYMENT in reconcile(replicas=0)) == (not runtime), "it loses its pods"
    bench.cluster.others = {}
    assert {pods, kind} <= reconcile()
    bench.cluster.broken = NETWORK_POLICY
    assert pods in reconcile(metricsFrom=[{"podSelector": {}}]), "the policy of before still protects the pods"


@pytest.mark.parametrize(("leaving", "sizes"), [((), []), (("p",), [1])], ids=["grows", "shrinks"])
def test_no_ray_cluster_grows_without_its_policy(leaving: tuple[str, ...], sizes: list[int]) -> None:
    done: list[int] = []

    class Taken:
        async def apply(self, *_: object, **__: object) -> None:
            raise Conflict("apply", 409, "it exists")

        async def metadata(self, key: Key) -> Body:
            return {"metadata": {"name": key.name, "uid": "theirs"}}

        async def resize(self, _: Key, replicas: int, *__: object, owner: str) -> bool:
            done.append(replicas)
            return bool(owner)

    policy = Key(NETWORK_POLICY, "ns", "llm-ballast-ray")
    manifest = {"metadata": {"name": policy.name, "annotations": {SPEC_HASH: "h"}}}
    plan = ChildrenPlan(
        apply=(Apply(policy, manifest, uid=None, because="new"),), resize=(replace(PLAN.resize[0], leaving=leaving),)
    )
    writer = ChildrenWriter(cast(Cluster, Taken()), cast(Any, None), post=lambda *_: None)
    key = Key(INFERENCE_DEPLOYMENT, "ns", "llm")
    problem, _ = asyncio.run(writer.write(key, Metadata(name="llm"), plan, ResourceMemory("u")))

    assert (problem and problem.reason, done) == ("NameTaken", sizes)
