"""A resource that may not use its queue has no user in Redis, and does not count as a user of the queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from reconciled import CONTEXT, MODEL, UNPLANNABLE, Bench, make_operator

from ballast_api.names import selector
from ballast_operator.errors import ClusterUnavailable
from ballast_operator.inference_deployment import read
from ballast_operator.kinds import DEPLOYMENT, INFERENCE_DEPLOYMENT, SECRET, SERVICE, Body, Key
from ballast_operator.permitted import PodRules
from ballast_operator.queue_rules import queue_conflict
from ballast_operator.reconcile import LEFT_OVER_AGAIN_SECONDS
from ballast_operator.sharing import Sharing


class RecordingPoller:
    """Records which queues count as used, and in which namespaces queues may be removed."""

    used: AbstractSet[str] | None = None
    namespaces: Sequence[str] = ()

    async def update_queues(
        self, _: object, used: AbstractSet[str], *, release: str, namespaces: Sequence[str]
    ) -> list[str]:
        self.used, self.namespaces = used, namespaces
        return []


QUEUE = {"offline": {"queue": "host/h"}}
NAMED = {"model": MODEL | {"servedName": "m"}}
AFTERWARDS: dict[str, dict[str, Any]] = {
    "nothing else": QUEUE,
    "an account that is not permitted": QUEUE | {"template": {"serviceAccountName": "x"}},
    "a Secret without the label": QUEUE | {"apiKeys": {"secretName": "x"}},
    "a Secret that cannot be read": QUEUE | {"apiKeys": {"secretName": "unavailable"}},
    "no image": QUEUE | {"engine": {"backend": "vllm"}},
    "an invalid spec": QUEUE | {"slots": "many"},
    "a volume that cannot be read": QUEUE | {"template": {"volumes": [{"name": "v", "secret": "my name"}]}},
    "a spec without children": QUEUE | UNPLANNABLE,
    "another queue, and a Secret without the label": {"apiKeys": {"secretName": "x"}},
    "another queue, and a Secret that cannot be read": {"apiKeys": {"secretName": "unavailable"}},
    "another queue, and an invalid spec": {"slots": "many"},
    "a Redis of its own without the label": {"redis": {"secretName": "x"}},
}


@pytest.mark.parametrize("afterwards", AFTERWARDS.values(), ids=list(AFTERWARDS))
def test_a_resource_loses_its_user_with_the_grant_whatever_else_is_wrong(afterwards: dict[str, Any]) -> None:
    bench = Bench()
    bench.put("host", "h", queueAccess={"namespaces": ["guest"]})
    bench.put("guest", "g", **NAMED, **QUEUE)
    bench.reconcile()
    assert "~ballast:{host/h}:*" in bench.patterns()
    bench.put("guest", "g", **(NAMED | afterwards))
    with suppress(ClusterUnavailable):
        bench.reconcile()
    assert "~ballast:{host/h}:*" in bench.patterns(), "the grant still holds"

    bench.put("host", "h")
    again: float | None = 1.0
    with suppress(ClusterUnavailable):
        again = bench.reconcile()
    assert bench.patterns() == []
    assert again is not None, "a grant that returns is noticed"


def test_a_resource_that_a_finalizer_keeps_loses_its_user_with_the_grant() -> None:
    bench = Bench()
    bench.put("host", "h", queueAccess={"namespaces": ["guest"]})
    bench.put("guest", "g", **NAMED, **QUEUE)
    bench.reconcile()
    bench.put("guest", "g", {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]}, **NAMED, **QUEUE)
    assert bench.reconcile() is not None
    assert bench.patterns()

    bench.put("host", "h")
    bench.reconcile()
    assert bench.patterns() == []


def test_a_grant_ends_when_the_deletion_of_its_resource_begins() -> None:
    """A finalizer may keep the resource for long."""
    bench, access = Bench(), {"queueAccess": {"namespaces": ["guest"]}}
    bench.put("host", "h", **access)
    bench.put("guest", "g", **NAMED, **QUEUE)
    bench.reconcile()
    assert bench.patterns()

    bench.put("host", "h", {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]}, **access)
    bench.reconcile()
    assert bench.patterns() == []
    assert bench.cluster.degraded == "QueueNotAllowed"


def test_only_a_resource_in_the_operators_own_redis_needs_a_user_there() -> None:
    bench, found = Bench(), []
    bench.reconciler.context = replace(CONTEXT, refuses_users=True)
    for spec in ({}, {"redis": {"secretName": "labeled"}}):
        bench.put("guest", "g", **spec)
        bench.reconcile()
        found.append(bench.cluster.degraded)

    assert found == ["NoRedisUser", "Healthy"]


def test_the_younger_of_two_models_on_one_queue_is_refused_until_the_older_one_leaves_it() -> None:
    bench = Bench()
    older = {"creationTimestamp": "2025-01-01T00:00:00Z"}
    bench.put("guest", "older", older, model=MODEL | {"servedName": "other"}, offline={"queue": "guest/shared"})
    bench.put("guest", "g", offline={"queue": "guest/shared"})
    bench.reconcile()
    assert bench.cluster.degraded == "QueueConflict"
    assert "guest/older, which serves the model other, and this one serves" in bench.cluster.message

    bench.put("guest", "older", older, model=MODEL | {"servedName": "other"})
    bench.reconcile()
    assert bench.cluster.degraded == "Healthy"


RESOURCE = st.tuples(*map(st.sampled_from, [("a", "b", "c"), ("m", "n"), ("", "s"), (False, True)]))


@given(st.lists(RESOURCE, max_size=7))
def test_the_resources_of_a_queue_are_looked_at_once_for_all(of: list[tuple[str, str, str, bool]]) -> None:
    class Counting(Sharing):
        num_looks = 0

        def __iter__(self) -> Iterator[Body]:
            self.num_looks += 1
            return super().__iter__()

    def make(number: int, namespace: str, served: str, secret: str, is_leaving: bool) -> Body:
        spec: Body = {"model": MODEL | {"servedName": served}, "offline": {"queue": "a/q"}, "replicas": 1}
        about: Body = {"name": f"r{number}", "namespace": namespace, "uid": f"u{number}", "resourceVersion": "1"}
        about |= {"creationTimestamp": f"2026-01-01T00:00:0{9 - number}Z", "generation": 1}
        spec |= {"redis": {"secretName": secret}} if secret else {}
        spec |= {"queueAccess": {"namespaces": ["b"]}} if number == 0 else {}
        return {"metadata": about | ({"deletionTimestamp": "2026-01-02T00:00:00Z"} if is_leaving else {}), "spec": spec}

    bodies = [make(number, *each) for number, each in enumerate(of)]
    others = Counting(bodies)
    allowed = {"a"} | ({"b"} if of and of[0][0] == "a" and not of[0][3] else set())
    for number, (body, (namespace, served, secret, _)) in enumerate(zip(bodies, of, strict=True)):
        is_refused = any(
            each[0] in allowed and each[1] != served and not each[3]
            for each in of[number + 1 :]
            if (each[2] == secret == "") or (each[2] == secret and each[0] == namespace)
        )
        found = queue_conflict(read(body), CONTEXT, others)
        assert (found is not None) == is_refused
    assert others.num_looks <= 2


def test_an_older_resource_that_may_not_use_a_queue_does_not_hold_up_its_owner() -> None:
    bench = Bench()
    older = {"creationTimestamp": "2025-01-01T00:00:00Z"}
    bench.put("host", "h", older, model=MODEL | {"servedName": "other"}, offline={"queue": "guest/g"})
    bench.put("guest", "g")
    bench.reconcile()

    assert bench.cluster.degraded == "Healthy"


def test_a_taken_name_of_a_submitters_secret_holds_up_nothing_else() -> None:
    bench = Bench()
    taken, free = (Key(SECRET, "guest", f"{each}-ballast-submitter") for each in ("taken", "free"))
    bench.cluster.others[taken] = {"metadata": {}}
    bench.put("guest", "g", queueAccess={"submitters": [{"secretName": key.name} for key in (taken, free)]})
    bench.reconcile()
    assert bench.cluster.degraded == "NameTaken"
    assert {free, Key(DEPLOYMENT, "guest", "g")} <= bench.cluster.applied

    bench.put("guest", "g")
    assert bench.reconcile() is None, "no Secret is left to write"
    assert bench.cluster.degraded == "Healthy"


def test_the_secret_of_a_deleted_resource_of_the_same_name_is_waited_for() -> None:
    bench = Bench()
    owner = {"kind": "InferenceDeployment", "name": "g", "uid": "before"}
    bench.cluster.others[Key(SECRET, "guest", "g-ballast-redis")] = {"metadata": {"ownerReferences": [owner]}}
    bench.put("guest", "g")

    assert bench.reconcile() == LEFT_OVER_AGAIN_SECONDS
    assert bench.cluster.degraded == "Healthy"
    deleting = {"namespace": "guest", "name": "g", "uid": "d", "resourceVersion": "1", "labels": selector("g")}
    deleting |= {"deletionTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": [{"uid": "guest-g"}]}
    bench.cache.put(SERVICE, {"metadata": deleting, "spec": {}})
    assert bench.reconcile() == LEFT_OVER_AGAIN_SECONDS
    assert bench.cluster.degraded == "NotApplied"
    bench.cache.drop(SERVICE, {"metadata": deleting})
    assert bench.cluster.applied == set(), "no pod may mount the Secret"
    bench.cluster.others.clear()
    assert bench.reconcile() is None
    assert Key(DEPLOYMENT, "guest", "g") in bench.cluster.applied


def update_queues(bench: Bench, *, missing: tuple[str, ...] = (), unreadable: tuple[str, ...] = ()) -> RecordingPoller:
    """Let an operator with the resources of a bench remove unused queues."""
    operator = make_operator(bench.cluster, watch_namespaces="guest,host")
    for body in bench.cache.resources.values():
        operator.cache.put(INFERENCE_DEPLOYMENT, body)
    poller = RecordingPoller()
    audit = operator.audit
    audit.streams, audit.poller = cast(Any, SimpleNamespace(missing=missing)), cast(Any, poller)
    operator.watchable.unreadable = unreadable

    async def update() -> None:
        operator.context.use(CONTEXT)
        await audit.update_queues()

    asyncio.run(update())
    return poller


def test_a_queue_counts_as_used_only_by_resources_that_may_use_it() -> None:
    bench = Bench()
    bench.put("host", "h", queueAccess={"namespaces": ["guest"]})
    bench.put("guest", "g", **NAMED, **QUEUE)
    bench.put("guest", "thief", offline={"queue": "victim/standalone"})
    poller = update_queues(bench)

    assert poller.used == {"host/h"}
    assert poller.namespaces == ("guest", "host"), "what other namespaces use is not known"


@pytest.mark.parametrize("unknown", [{"missing": ("InferenceDeployment",)}, {"unreadable": ("guest",)}])
def test_no_queue_is_removed_while_a_resource_may_be_unknown(unknown: dict[str, tuple[str, ...]]) -> None:
    assert update_queues(Bench(), **unknown).used is None


def test_a_spec_from_which_no_children_can_be_computed_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.put("guest", "g", **UNPLANNABLE)
    for _ in range(3):
        assert bench.reconcile() is not None
    assert bench.cluster.degraded == "InvalidSpec"
    assert "cannot compute the children" in bench.cluster.message
    assert "[" not in bench.cluster.message
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1

    bench.put("guest", "g", model={"uri": "file:///m"})
    bench.reconcile()
    assert bench.cluster.degraded == "Healthy"


@pytest.mark.parametrize(
    "uri", ["hf://org/model_", "s3://bucket/my model", "file:///models/llama_", f"file:///{254 * 'a'}"]
)
def test_a_location_from_which_no_name_can_be_derived_needs_a_served_name(uri: str) -> None:
    bench = Bench()
    bench.put("guest", "g", model={"uri": uri})
    bench.reconcile()
    assert bench.cluster.degraded == "InvalidSpec"
    assert "Set model.servedName" in bench.cluster.message

    bench.put("guest", "g", model={"uri": uri, "servedName": "m"})
    bench.reconcile()
    assert bench.cluster.degraded == "Healthy"


@pytest.mark.parametrize(
    "volume", [{"secret": "my name"}, {"secret": 5}, {"secret": ["name"]}, {"hostPath": "/x"}, {"hostPath": 5}]
)
def test_a_volume_of_a_wrong_type_is_reported(volume: dict[str, Any]) -> None:
    bench = Bench()
    bench.reconciler.context = replace(CONTEXT, rules=PodRules(volumes=()))
    bench.put("guest", "g", template={"volumes": [{"name": "v"} | volume]})
    bench.reconcile()
    assert bench.cluster.degraded == "NotPermitted"
