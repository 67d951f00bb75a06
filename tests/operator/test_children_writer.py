"""Which failures of a write end the writes of a plan."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from ballast_api.metadata import Metadata
from ballast_operator.children_writer import ChildrenWriter
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterUnavailable, Forbidden, Invalid
from ballast_operator.kinds import INFERENCE_DEPLOYMENT, POD, RAY_CLUSTER, SERVICE, Key
from ballast_operator.plan import ChildrenPlan, Delete, Resize
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
