"""Pods that run keep their user in Redis: while a change replaces them, and while nothing may change them."""

from __future__ import annotations

import asyncio
import itertools
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from reconciled import CONTEXT, GUEST, MODEL, VERSIONS, Bench

from ballast_api.names import redis_secret, selector
from ballast_operator.context import UserKeys
from ballast_operator.errors import ClusterUnavailable
from ballast_operator.kinds import CONFIG_MAP, DEPLOYMENT, INFERENCE_DEPLOYMENT, POD, SECRET, Key
from ballast_operator.secret_checks import KUBELET_SECONDS

FIRST, SECOND, HOST = "~ballast:{guest/one}:*", "~ballast:{guest/two}:*", "~ballast:{host/h}:*"
UIDS = itertools.count()


def make_bench(queue: str = "guest/one", **spec: Any) -> Bench:
    """Return a bench whose guest serves a queue with one pod of the newest template."""
    bench = Bench()
    bench.put("host", "h", queueAccess={"namespaces": ["guest"]})
    change(bench, queue, **spec)
    bench.roll(1)
    bench.reconcile()
    return bench


def change(bench: Bench, queue: str, /, **spec: Any) -> None:
    bench.put("guest", "g", model=MODEL | {"servedName": "m"}, offline={"queue": queue}, **spec)
    bench.reconcile()


def drain(bench: Bench) -> dict[str, Any]:
    """Add a pod of the guest that is being deleted."""
    metadata = {
        "namespace": "guest",
        "name": "g-1",
        "uid": f"pod-{next(UIDS)}",
        "resourceVersion": str(next(VERSIONS)),
        "labels": selector("g"),
        "deletionTimestamp": "2026-01-01T00:00:00Z",
    }
    pod = {"metadata": metadata, "status": {"phase": "Running"}, "spec": {}}
    bench.cache.put(POD, pod)
    return pod


def test_pods_keep_the_right_on_their_queue_until_the_last_of_them_has_returned_its_items() -> None:
    bench = make_bench()
    assert bench.patterns() == [FIRST]

    change(bench, "guest/two")
    assert bench.patterns() == [SECOND, FIRST]
    bench.reconcile()
    bench.roll(0)
    bench.reconcile()
    assert bench.patterns() == [SECOND, FIRST], "no pod was replaced yet"
    pod = drain(bench)
    bench.roll(1)
    bench.reconcile()
    assert bench.patterns() == [SECOND, FIRST], "the last one drains"
    bench.cache.drop(POD, pod)
    bench.reconcile()
    assert bench.patterns() == [SECOND]
    status = bench.cache.resources[GUEST]["status"]
    assert (status["queue"], status["formerQueues"]) == ("guest/two", [])


def test_pods_keep_the_right_on_their_queue_while_their_successors_cannot_be_written() -> None:
    bench = make_bench()
    for broken in (CONFIG_MAP, DEPLOYMENT):
        bench.cluster.broken = broken
        for _ in range(3):
            with pytest.raises(ClusterUnavailable):
                change(bench, "guest/two")
        assert bench.patterns() == [SECOND, FIRST]


def test_the_settings_of_a_deleted_resource_leave_its_queue_with_its_last_pod() -> None:
    """A worker reads them for as long as it runs."""
    bench = make_bench()
    pod = drain(bench)
    bench.cache.drop(INFERENCE_DEPLOYMENT, bench.cache.resources[GUEST])
    bench.reconcile()
    assert bench.poller.left == []

    bench.cache.drop(POD, pod)
    bench.reconcile()
    assert bench.poller.left == [GUEST]


def test_a_secret_that_an_audit_finds_missing_is_written_again() -> None:
    """Nothing else of the resource has changed since the last plan."""
    bench, secret = make_bench(), Key(SECRET, "guest", redis_secret("g"))
    for _ in range(2):
        bench.reconcile()
        bench.cluster.applied.clear()
    assert asyncio.run(bench.reconciler.audit_secrets()) == [GUEST]
    bench.reconcile()

    assert bench.cluster.applied == {secret}


def test_a_secret_that_no_config_map_records_is_written_again_only_if_it_has_changed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, secret = Bench(), Key(SECRET, "guest", redis_secret("g"))
    apply, written = bench.cluster.apply, list[Any]()

    async def remember(key: Key, manifest: Any, *, uid: str | None) -> Any:
        answer = await apply(key, manifest, uid=uid)
        if key == secret:
            written.append(answer)
        return answer

    async def metadata(key: Key) -> Any:
        return written[-1] if key == secret and written else None

    monkeypatch.setattr(bench.cluster, "apply", remember)
    monkeypatch.setattr(bench.cluster, "metadata", metadata)
    bench.cluster.broken = CONFIG_MAP
    bench.put("guest", "g")
    for num_written in (1, 1, 2, 2):
        if num_written > len(written) > 0:
            somebody_changes = {"metadata": written[-1]["metadata"] | {"resourceVersion": str(next(VERSIONS))}}
            written[-1] = written[-1] | somebody_changes
        with suppress(ClusterUnavailable):
            bench.reconcile()
        assert len(written) == num_written


def test_an_operator_that_starts_during_a_rollout_knows_the_queue_of_the_old_pods() -> None:
    bench = make_bench()
    change(bench, "guest/two")
    bench.roll(0)
    bench.start()
    bench.reconcile()
    assert bench.patterns() == [SECOND, FIRST]

    bench.roll(1)
    bench.reconcile()
    assert bench.patterns() == [SECOND]


def test_pods_keep_their_user_until_pods_with_another_redis_replace_them() -> None:
    bench = make_bench()
    change(bench, "guest/one", redis={"secretName": "labeled"})
    assert bench.patterns() == [FIRST]
    bench.roll(0)
    bench.reconcile()
    assert bench.patterns() == [FIRST]

    bench.roll(1)
    bench.reconcile()
    assert bench.reconciler.users.users[GUEST] == ()


def test_an_operator_that_starts_during_a_change_of_redis_leaves_the_users_as_redis_has_them() -> None:
    bench = make_bench()
    change(bench, "guest/one", redis={"secretName": "labeled"})
    bench.roll(0)
    bench.start()
    bench.reconcile()
    assert GUEST not in bench.reconciler.users.users, "it is not known whether the pods use this Redis"

    bench.roll(1)
    bench.reconcile()
    assert bench.reconciler.users.users[GUEST] == ()


def test_old_pods_lose_a_queue_of_another_namespace_with_its_grant() -> None:
    bench = make_bench("host/h")
    change(bench, "guest/two")
    assert bench.patterns() == [SECOND, HOST]

    bench.put("host", "h")
    bench.reconcile()
    assert bench.patterns() == [SECOND]


def test_a_change_gives_no_right_on_a_queue_that_the_resource_never_served() -> None:
    bench = Bench()
    change(bench, "victim/q")
    assert bench.cluster.degraded == "QueueNotAllowed"
    assert "queueAccess.namespaces: [guest]" in bench.cluster.message
    change(bench, "guest/two")
    assert bench.patterns() == [SECOND]


HELD: dict[str, dict[str, Any]] = {
    "an account that is not permitted": {"template": {"serviceAccountName": "x"}},
    "a Secret without the label": {"apiKeys": {"secretName": "x"}},
    "no image": {"engine": {"backend": "vllm"}},
    "another model in its queue": {"offline": {"queue": "guest/taken"}},
    "an invalid spec": {"slots": "many"},
}


@pytest.mark.parametrize("held", HELD.values(), ids=list(HELD))
def test_pods_of_a_resource_on_hold_keep_their_user_after_operator_and_redis_restarted(held: dict[str, Any]) -> None:
    bench = make_bench()
    older = {"creationTimestamp": "2025-01-01T00:00:00Z"}
    bench.put("guest", "older", older, model=MODEL | {"servedName": "other"}, offline={"queue": "guest/taken"})
    spec = {"model": MODEL | {"servedName": "m"}, "offline": {"queue": "guest/one"}} | held
    bench.put("guest", "g", **spec)
    bench.start()
    bench.reconcile()
    assert bench.cluster.degraded not in {"", "Healthy"}
    assert bench.patterns() == [FIRST]
    assert all(user.keeps_passwords for user in bench.reconciler.users.users[GUEST])

    assert bench.reconciler.users.on_hold == {GUEST}
    bench.start()
    bench.reconciler.context = replace(CONTEXT, user_keys=UserKeys("b" * 64, is_first=True))
    bench.reconcile()
    assert not any(user.keeps_passwords for user in bench.reconciler.users.users[GUEST]), "somebody ended all of them"
    bench.reconciler.context = CONTEXT

    change(bench, "guest/one")
    assert not any(user.keeps_passwords for user in bench.reconciler.users.users[GUEST])
    assert not bench.reconciler.users.on_hold


def test_workers_keep_their_former_password_until_their_secret_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The key of the passwords was replaced, and an hour later only the new one is valid."""
    bench = make_bench()
    secret = Key(SECRET, "guest", redis_secret("g"))
    bench.cluster.others[secret] = {"metadata": {"name": secret.name, "namespace": "guest", "uid": "x"}}

    def keeps() -> bool:
        bench.reconcile()
        return all(user.keeps_passwords for user in bench.reconciler.users.users[GUEST])

    assert not keeps()
    for keys in (UserKeys("b" * 64, "a" * 64), UserKeys("b" * 64)):
        bench.reconciler.context = replace(CONTEXT, user_keys=keys)
        assert keeps()
    bench.start()
    bench.reconciler.context = replace(CONTEXT, user_keys=keys)
    assert keeps()
    bench.cluster.others.clear()
    bench.start()
    bench.reconciler.context = replace(CONTEXT, user_keys=keys)
    bench.reconcile()
    bench.roll(1)
    assert keeps(), "the kubelet updates the file a moment later"
    before = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: before() + KUBELET_SECONDS)
    assert not keeps()


def test_only_a_user_whose_own_secret_is_not_written_keeps_a_former_password(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal of a submitter does not wait for it, either."""
    before, later = time.monotonic, 0.0
    monkeypatch.setattr(time, "monotonic", lambda: before() + later)
    taken = Key(SECRET, "guest", "b-ballast-submitter")
    bench = make_bench()
    bench.cluster.others[taken] = {"metadata": {"name": taken.name, "namespace": "guest", "uid": "x"}}

    def keeping(*submitters: str) -> dict[str, bool]:
        nonlocal later
        names = [{"secretName": f"{name}-ballast-submitter"} for name in submitters]
        change(bench, "guest/one", queueAccess={"submitters": names})
        later += KUBELET_SECONDS
        bench.reconcile()
        found = bench.reconciler.users
        assert not found.on_hold
        return {user.name.rpartition(":")[2]: user.keeps_passwords for user in found.users[GUEST]}

    assert keeping("a", "b") == {"guest/g": False, "a-ballast-submitter": False, taken.name: True}
    assert keeping("b") == {"guest/g": False, taken.name: True}
    bench.reconciler.context = replace(CONTEXT, user_keys=UserKeys("b" * 64, is_first=True))
    assert not any(keeping("b").values()), "somebody ended all former passwords"


def test_a_resource_that_is_created_again_has_other_passwords() -> None:
    """Whoever may read the Secrets of the former one has no right on the queue of the new one."""
    passwords = []
    for uid in ("1", "2", "1"):
        bench = Bench()
        bench.put("guest", "g", {"uid": uid})
        bench.reconcile()
        passwords += [user.passwords for user in bench.reconciler.users.users[GUEST]]

    assert passwords[0] == passwords[2] != passwords[1]


def test_submitters_of_a_resource_on_hold_keep_their_users() -> None:
    access = {"submitters": [{"secretName": "nightly-ballast-submitter"}]}
    bench = make_bench(queueAccess=access)
    assert bench.patterns() == [FIRST, "~ballast:{guest/one}:inbox"]
    bench.start()

    change(bench, "guest/one", queueAccess=access, apiKeys={"secretName": "x"})
    assert bench.patterns() == [FIRST, "~ballast:{guest/one}:inbox"]


def test_a_resource_on_hold_gets_no_user_for_a_queue_that_it_may_not_use() -> None:
    bench = make_bench("host/h")
    bench.put("host", "h")
    bench.put("guest", "g", slots="many", offline={"queue": "host/h"})
    bench.start()
    bench.reconcile()
    assert bench.patterns() == []

    bench.put("host", "h", queueAccess={"namespaces": ["guest"]})
    bench.reconcile()
    assert bench.patterns() == [HOST], "just after a start, the cache may lack the resource with the grant"


def test_a_resource_that_names_a_queue_of_others_gets_no_user_back() -> None:
    bench = make_bench()
    bench.start()
    change(bench, "victim/q")
    assert bench.cluster.degraded == "QueueNotAllowed"
    assert bench.patterns() == []


@pytest.mark.parametrize("queue", ["guest/a b", "guest/*", ""])
def test_a_status_that_somebody_edited_gives_no_rights(queue: str) -> None:
    bench = make_bench()
    bench.put("guest", "g", slots="many")
    bench.cache.resources[GUEST]["status"] |= {"queue": queue, "formerQueues": [queue]}
    bench.start()
    bench.reconcile()
    assert bench.patterns() == []


def test_a_deleted_resource_gets_no_user_again() -> None:
    """The operator that reconciled it may be another release."""
    bench = make_bench()
    bench.put("guest", "g", {"deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["x/y"]})
    bench.start()
    bench.reconcile()
    assert bench.patterns() == []
