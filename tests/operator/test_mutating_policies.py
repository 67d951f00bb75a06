"""A policy of the cluster, such as one of Kyverno, that adds a field to a child at each write."""

from __future__ import annotations

import asyncio
import copy
import time
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from resources import make_resource

from ballast_operator.cache import Cache
from ballast_operator.children.pods import deployment
from ballast_operator.children_writer import MOST_RESTORES, RESTORE_AGAIN_SECONDS, ChildrenWriter
from ballast_operator.kinds import DEPLOYMENT, INFERENCE_DEPLOYMENT, Body, Key, key_of
from ballast_operator.plan import Apply, ChildrenPlan, ClusterSnapshot, changes
from ballast_operator.poll_result import Problem
from ballast_operator.resource_memory import ResourceMemory

LLM = Key(INFERENCE_DEPLOYMENT, "ns", "llm")


@dataclass
class Policed:
    """A cluster with one Deployment, whose pods get an annotation at each write."""

    stored: Body = field(default_factory=dict)
    repairs: int = 0

    def admit(self, content: Body) -> Body:
        body = copy.deepcopy(content)
        body["spec"]["template"]["metadata"]["annotations"]["policy.example/team"] = "ml"
        version = str(int(self.stored.get("metadata", {}).get("resourceVersion", "0")) + 1)
        body["metadata"] |= {"uid": "d", "resourceVersion": version}
        self.stored = body
        return copy.deepcopy(body)

    async def apply(self, _: Key, manifest: Body, *, uid: str | None) -> Body:
        del uid
        return self.admit(manifest)

    async def overwrite(self, _: Key, manifest: Body, *, uid: str | None) -> Body:
        del uid
        self.repairs += 1
        return self.admit(self.stored | {"spec": manifest["spec"] | {"template": self.stored["spec"]["template"]}})


class Bench:
    def __init__(self) -> None:
        self.cluster, self.memory = Policed(), ResourceMemory("u")
        self.cache = Cache()
        cluster = cast(Any, self.cluster)
        self.writer = ChildrenWriter(cluster, self.cache, lambda *_: None)

    def write(self, **spec: Any) -> Problem | None:
        """Reconcile until nothing is to be written. Return the first problem."""
        resource = make_resource(**spec)
        found = None
        for _ in range(MOST_RESTORES):
            body = deployment(resource, "v", image="worker:1", own_keys=frozenset())
            snapshot = ClusterSnapshot("u", self.cache.children(LLM), (), self.memory.tolerated)
            steps = changes([(DEPLOYMENT, body)], snapshot)
            if not steps:
                return found
            problem, _ = asyncio.run(self.writer.write(LLM, resource.metadata, ChildrenPlan(apply=steps), self.memory))
            found = found or problem
        raise AssertionError("the operator writes again and again")


def test_an_autoscaler_beside_a_policy_is_no_contest() -> None:
    bench = Bench()
    problems = [bench.write(replicas=number) for number in range(1, 3 * MOST_RESTORES)]

    assert problems == [None] * len(problems)
    assert bench.cluster.repairs == 1, "a repair finds out what the policy adds, whatever the replicas are"


def test_another_writer_is_reported_until_it_has_changed_nothing_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, resource, now = Bench(), make_resource(), time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now)
    body = deployment(resource, "v", image="worker:1", own_keys=frozenset())
    repair = Apply(key_of(DEPLOYMENT, body), body, uid="d", because="Restored Deployment llm", is_repair=True)

    def write(*steps: Apply) -> Problem | None:
        plan = ChildrenPlan(apply=steps)
        return asyncio.run(bench.writer.write(LLM, resource.metadata, plan, bench.memory))[0]

    *early, contest = [write(repair) for _ in range(MOST_RESTORES + 1)]
    assert early == [None] * MOST_RESTORES
    assert contest is not None
    assert write() == contest
    now += RESTORE_AGAIN_SECONDS
    assert write() is None


def test_a_policy_is_found_out_again_after_another_change_and_takes_no_memory_for_each() -> None:
    bench = Bench()
    problems = [bench.write(rollout={"drainSeconds": number}) for number in range(1, 3 * MOST_RESTORES)]

    assert problems == [None] * len(problems)
    assert bench.cluster.repairs == len(problems)
    assert len(bench.memory.tolerated) == len(bench.memory.restored) == 1
