"""The objects that the operator knows, whatever the order in which it learns of them."""

from __future__ import annotations

from typing import Any

import pytest

from ballast_api.names import INSTANCE_LABEL, NAME_LABEL, RAY_HEAD_LABEL, WORKER
from ballast_operator.cache import Cache
from ballast_operator.kinds import CONFIG_MAP, INFERENCE_DEPLOYMENT, POD, Key, Kind

KIND = INFERENCE_DEPLOYMENT


def make_body(name: str, version: int, *, uid: str = "1", owner: str = "llm") -> dict[str, Any]:
    labels = {INSTANCE_LABEL: owner, NAME_LABEL: WORKER}
    metadata = {"name": name, "namespace": "ns", "uid": uid, "resourceVersion": str(version), "labels": labels}
    return {"metadata": metadata, "spec": {"version": version}}


def known(cache: Cache, kind: Kind) -> dict[str, Any]:
    owner = Key(KIND, "ns", "llm")
    body = cache.resources[owner] if kind == KIND else next(iter(cache.children(owner).values()))
    return dict(body["spec"])


@pytest.mark.parametrize("kind", [KIND, CONFIG_MAP], ids=["resource", "child"])
def test_the_answer_to_a_write_does_not_replace_a_newer_event(kind: Kind) -> None:
    """A status was written, then the spec changed, and the event of the change came before the answer to the write."""
    cache = Cache()
    changed = cache.put(kind, make_body("llm", 10))
    answered = cache.put(kind, make_body("llm", 9))

    assert changed == (Key(KIND, "ns", "llm"),)
    assert answered == ()
    assert known(cache, kind) == {"version": 10}


@pytest.mark.parametrize("kind", [KIND, CONFIG_MAP], ids=["resource", "child"])
def test_an_object_that_was_created_again_replaces_the_old_one(kind: Kind) -> None:
    cache = Cache()
    cache.put(kind, make_body("llm", 10))
    cache.put(kind, make_body("llm", 9, uid="2"))

    assert known(cache, kind) == {"version": 9}


@pytest.mark.parametrize("kind", [KIND, CONFIG_MAP], ids=["resource", "child"])
def test_the_deletion_of_an_object_does_not_remove_a_new_one_of_the_same_name(kind: Kind) -> None:
    """The new object was seen first."""
    cache = Cache()
    cache.put(kind, make_body("llm", 10))
    cache.put(kind, make_body("llm", 12, uid="2"))

    assert cache.drop(kind, make_body("llm", 11)) == Key(KIND, "ns", "llm")
    assert known(cache, kind) == {"version": 12}
    cache.drop(kind, make_body("llm", 13, uid="2"))
    assert cache.uids(kind) == {}


@pytest.mark.parametrize("kind", [KIND, CONFIG_MAP], ids=["resource", "child"])
def test_an_audit_finds_a_deletion_that_another_object_of_the_same_name_hides(kind: Kind) -> None:
    """No event showed the deletion, and the event of the new object may be late."""
    cache = Cache()
    cache.put(kind, make_body("llm", 10))
    before = cache.uids(kind)

    assert cache.forget_missing(kind, before, before) == []
    assert cache.forget_missing(kind, before, dict.fromkeys(before, "2")) == [Key(KIND, "ns", "llm")]
    assert cache.uids(kind) == {}


@pytest.mark.parametrize("kind", [POD, CONFIG_MAP], ids=["pod", "child"])
def test_each_change_of_the_objects_of_a_resource_is_a_new_revision(kind: Kind) -> None:
    """The last plan of a resource stays valid while the revision is the same."""
    cache, owner = Cache(), Key(KIND, "ns", "llm")
    revisions = [cache.revision(owner)]
    for version in (10, 11, 11):
        cache.put(kind, make_body("a", version))
        revisions.append(cache.revision(owner))
    cache.drop(kind, make_body("a", 12))
    created, changed, unchanged, deleted = *revisions[1:], cache.revision(owner)

    assert revisions[0] < created < changed == unchanged < deleted


def test_only_the_resources_of_a_queue_are_looked_at_for_it() -> None:
    """With all of them for each resource, a thousand resources took seven percent of a core."""
    cache = Cache()
    shared = {"offline": {"queue": "ns/shared"}}
    for version, (name, spec) in enumerate([("a", shared), ("b", shared), ("c", {}), ("b", {})], 1):
        cache.put(KIND, make_body(name, version) | {"spec": spec})

    assert [body["metadata"]["name"] for body in cache.sharing("ns/shared")] == ["a"]
    assert [body["metadata"]["name"] for body in cache.sharing("ns/b")] == ["b"]
    cache.drop(KIND, make_body("a", 9))
    assert cache.sharing("ns/shared") == ()


def test_the_grants_of_a_queue_are_collected_once_for_each_change_of_its_resources() -> None:
    cache = Cache()

    def put(name: str, version: int, *namespaces: str) -> None:
        spec = {"offline": {"queue": "ns/shared"}, "queueAccess": {"namespaces": namespaces}}
        cache.put(KIND, make_body(name, version) | {"spec": spec})

    put("a", 1, "x", "y")
    put("b", 2)
    before = cache.sharing("ns/shared")
    again = cache.sharing("ns/shared")
    put("b", 3, "z")
    after = cache.sharing("ns/shared")
    cache.drop(KIND, make_body("a", 9))

    assert before is again
    assert [{to for _, to in found.grants} for found in (before, after, cache.sharing("ns/shared"))] == [
        {"x", "y"},
        {"x", "y", "z"},
        {"z"},
    ]


def test_the_head_of_a_ray_cluster_is_no_worker_pod() -> None:
    cache, owner = Cache(), Key(KIND, "ns", "llm")
    head, worker = make_body("head", 10), make_body("worker", 10)
    head["metadata"]["labels"] = {RAY_HEAD_LABEL: "llm"}

    assert cache.put(POD, head) == cache.put(POD, worker) == (owner,)
    assert [pod["metadata"]["name"] for pod in cache.pods(owner)] == ["worker"]
    assert [pod["metadata"]["name"] for pod in cache.heads(owner)] == ["head"]
    assert len(cache.uids(POD)) == 2
    assert cache.forget_missing(POD, cache.uids(POD), {}) == [owner, owner]
    assert cache.heads(owner) == cache.pods(owner) == ()


@pytest.mark.parametrize("kind", [POD, CONFIG_MAP], ids=["pod", "child"])
def test_an_object_with_another_label_leaves_its_former_owner(kind: Kind) -> None:
    """Both are reconciled: the former owner restores its child, and no longer reports the problem of the pod."""
    cache, former, new = Cache(), Key(KIND, "ns", "llm"), Key(KIND, "ns", "other")
    cache.put(kind, make_body("a", 10))
    before = cache.revision(former)
    moved = cache.put(kind, make_body("a", 11, owner="other"))

    assert set(moved) == {former, new}
    assert cache.revision(former) > before
    assert not cache.children(former)
    assert not cache.pods(former)
    assert len(cache.children(new)) + len(cache.pods(new)) == 1
    assert len(cache.uids(kind)) == 1
    assert cache.put(kind, make_body("a", 10)) == ()


@pytest.mark.parametrize("kind", [POD, CONFIG_MAP], ids=["pod", "child"])
def test_an_object_that_loses_its_labels_leaves_its_owner(kind: Kind) -> None:
    cache, owner = Cache(), Key(KIND, "ns", "llm")
    bare = make_body("a", 11)
    bare["metadata"]["labels"] = {}
    cache.put(kind, make_body("a", 10))

    assert cache.put(kind, bare) == (owner,)
    assert cache.uids(kind) == {}
    assert cache.drop(kind, bare) is None


def test_the_deletion_of_an_object_is_reported_to_the_owner_that_the_cache_knows() -> None:
    """The event of the deletion has the last labels, which no other event showed."""
    cache, owner = Cache(), Key(KIND, "ns", "llm")
    cache.put(POD, make_body("a", 10))

    assert cache.drop(POD, make_body("a", 11, owner="other")) == owner
    assert cache.pods(owner) == ()
