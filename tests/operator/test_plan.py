"""From what is wanted and what is there to what must be written."""

from __future__ import annotations

import base64
import copy
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest
import resources
from hypothesis import given, settings
from hypothesis import strategies as st
from queue_objects import make_status

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import CONFIG_HASH, config_map
from ballast_api.worker_config import WorkerConfig
from ballast_operator.blockers import blocked
from ballast_operator.children.config import REDIS_HASH, VERSION, config_texts, version_of
from ballast_operator.children.redis_users import redis_users, secrets_hash
from ballast_operator.context import OperatorContext, UserKeys
from ballast_operator.deletion_costs import DELETION_COST
from ballast_operator.drift import drift
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import BUDGET, CONFIG_MAP, DEPLOYMENT, NETWORK_POLICY, SECRET, SERVICE, Body, Key, Kind
from ballast_operator.own_secrets import own_secrets
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot, Tolerated, shape
from ballast_operator.poll_result import PollResult
from ballast_operator.sharing import Sharing
from ballast_queue.status import ClassLoad, WorkerStatus

CONTEXT = OperatorContext(image="worker:1", kinds=frozenset({"ServiceMonitor", "PrometheusRule"}))
OWN_REDIS = OperatorContext(
    image="worker:1",
    redis={"url": "cmVkaXM6Ly94", "password": "eA=="},
    redis_key=Key(SECRET, "ballast", "redis"),
    user_keys=UserKeys("first"),
    refuses_users=False,
)


SERVICE_KEY = Key(SERVICE, "ns", "llm")
CONFIG_KEY = Key(CONFIG_MAP, "ns", config_map("llm"))


def make_resource(generation: int = 1, **spec: Any) -> InferenceDeployment:
    about = {"uid": "u-1", "generation": generation, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return resources.make_resource(about=about, **spec)


def after(done: ChildrenPlan, before: ClusterSnapshot) -> ClusterSnapshot:
    """What the cluster shows once the plan was carried out."""
    children = dict(before.children)
    for step in done.apply:
        if step.key.kind != SECRET:
            body = copy.deepcopy(step.manifest)
            body["metadata"]["uid"] = "c-1"
            children[step.key] = body
    for gone in done.delete:
        del children[gone.key]
    told = {each.key.name: each.annotations for each in (*done.annotate, *done.costs)}
    pods = []
    for pod in before.pods:
        new = copy.deepcopy(pod)
        new["metadata"]["annotations"] |= told.get(pod["metadata"]["name"], {})
        pods.append(new)
    return ClusterSnapshot(before.uid, children, tuple(pods), before.tolerated)


def make_pod(name: str, version: str, *, created: str = "2026-01-01T00:00:00Z", ip: str = "", **more: str) -> Body:
    metadata = {"name": name, "namespace": "ns", "annotations": {VERSION: version} | more, "creationTimestamp": created}
    return {"metadata": metadata, "status": {"phase": "Running", "podIP": ip}}


EMPTY = ClusterSnapshot("u-1")
specs = st.fixed_dictionaries(
    {},
    optional={
        "replicas": st.integers(0, 5),
        "slots": st.integers(1, 64),
        "slo": st.fixed_dictionaries({"ttftMilliseconds": st.integers(1, 5000)}),
        "offline": st.fixed_dictionaries(
            {"reservedPercent": st.integers(0, 100), "queue": st.sampled_from(["a", "b"])}
        ),
        "gpu": st.sampled_from([{"count": 0}, {"count": 1}, {"resourceClaimTemplate": "gpu"}]),
        "model": st.sampled_from([{"uri": u} for u in ("file:///m", "hf://a/b", "s3://a/b", "pvc://c/d")]),
        "redis": st.just({"secretName": "redis", "passwordKey": "password"}),
        "apiKeys": st.just({"secretName": "keys"}),
        "network": st.sampled_from([{"policy": False}, {"policy": True}]),
        "monitoring": st.fixed_dictionaries({"serviceMonitor": st.booleans(), "prometheusRule": st.booleans()}),
        "template": st.just({"resources": {"limits": {"memory": "1024Mi"}}, "tolerations": [{"operator": "Exists"}]}),
    },
)


@settings(max_examples=50)
@given(st.lists(specs, min_size=1, max_size=4), st.sampled_from([CONTEXT, OWN_REDIS]), st.data())
def test_a_plan_of_what_a_plan_produced_is_empty(
    wanted: list[Any], context: OperatorContext, data: st.DataObject
) -> None:
    """Through changes of the spec, with pods of several versions running."""
    snapshot = EMPTY
    for generation, spec in enumerate(wanted, 1):
        resource = make_resource(generation, **spec)
        done = plan(resource, snapshot, context)
        snapshot = after(done, snapshot)
        pods = list(snapshot.pods)
        if data.draw(st.booleans()):
            pods.append(make_pod(f"p-{generation}", done.version))
        snapshot = ClusterSnapshot(snapshot.uid, snapshot.children, tuple(pods))
        again = plan(resource, snapshot, context)
        assert again.because == ()
        assert again.files.keys() >= {done.version}


@pytest.mark.parametrize(("peers", "port"), [([], "http"), ([{"podSelector": {}}], "metrics")])
def test_the_service_monitor_scrapes_the_port_that_the_policy_opens_for_it(peers: list[Any], port: str) -> None:
    wanted = plan(make_resource(1, network={"metricsFrom": peers}), EMPTY, CONTEXT)
    monitor = next(step.manifest for step in wanted.apply if step.key.kind.name == "ServiceMonitor")
    offered = next(step.manifest for step in wanted.apply if step.key.kind.name == "Service")

    assert [endpoint["port"] for endpoint in monitor["spec"]["endpoints"]] == [port]
    assert port in [each["name"] for each in offered["spec"]["ports"]]


def test_each_running_version_keeps_its_file_which_follows_the_hot_part() -> None:
    """Also while the last pod of it drains: its container may restart."""

    def files(done: ChildrenPlan) -> dict[str, WorkerConfig]:
        data = next(step.manifest["data"] for step in done.apply if step.key.kind.name == "ConfigMap")
        return {name: WorkerConfig.parse(text, name) for name, text in data.items()}

    first = plan(make_resource(1, slots=4), EMPTY, CONTEXT)
    old = make_pod("old", first.version)
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    there = after(first, ClusterSnapshot("u-1", pods=(old,)))
    second = plan(make_resource(2, slots=8, slo={"ttftMilliseconds": 7}), there, CONTEXT)
    there = after(second, there)
    third = plan(make_resource(3, slots=8, slo={"ttftMilliseconds": 8}), there, CONTEXT)
    there = replace(after(third, there), pods=())
    fourth = plan(make_resource(4, slots=8, slo={"ttftMilliseconds": 9}), there, CONTEXT)
    there = replace(after(fourth, there), pods=(make_pod("old", fourth.version),))
    patient = {"slots": 8, "slo": {"ttftMilliseconds": 5}, "rollout": {"unreadySeconds": 60}}
    fifth = files(plan(make_resource(5, **patient), there, CONTEXT))

    both = {f"worker-{first.version}.yaml": 4, f"worker-{second.version}.yaml": 8}
    for done, milliseconds in ((second, 7), (third, 8)):
        assert {name: config.slots for name, config in files(done).items()} == both
        assert {config.slo.ttft_milliseconds for config in files(done).values()} == {milliseconds}
    assert files(fourth).keys() == {f"worker-{second.version}.yaml"}, "no pod reads the other one"
    assert {config.slo.ttft_milliseconds for config in fifth.values()} == {5}
    kept = fifth.pop(f"worker-{second.version}.yaml")
    assert kept.runtime.unready_seconds == 5, "its pods have a grace period for this time"
    assert [config.runtime.unready_seconds for config in fifth.values()] == [60]


def test_a_change_that_no_worker_reads_leaves_the_files_alone() -> None:
    first = plan(make_resource(1), EMPTY, CONTEXT)
    second = plan(make_resource(2, replicas=4), after(first, EMPTY), CONTEXT)

    assert [step.key.kind.name for step in second.apply] == ["Deployment"]


def test_a_label_of_the_spec_reaches_a_child_that_exists() -> None:
    there = after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY)
    for labels in ({"release": "prometheus"}, {}):
        done = plan(make_resource(1, monitoring={"labels": labels}), there, CONTEXT)
        there = after(done, there)

        assert done.because == ("Updated ServiceMonitor llm", "Updated PrometheusRule llm")


def test_each_child_has_the_resource_as_its_controller() -> None:
    """Kubernetes deletes it after the resource, and no other controller adopts it."""
    owners = [step.manifest["metadata"]["ownerReferences"] for step in plan(make_resource(), EMPTY, OWN_REDIS).apply]
    wanted = {"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "name": "llm", "uid": "u-1"}

    assert owners == [[wanted | {"controller": True, "blockOwnerDeletion": False}]] * len(owners)


def test_a_running_pod_is_told_of_a_hot_change_and_a_new_pod_is_not() -> None:
    first = plan(make_resource(1), EMPTY, CONTEXT)
    pods = (make_pod("one", first.version), make_pod("other", "elsewhere"))
    there = after(first, ClusterSnapshot("u-1", pods=pods))
    assert plan(make_resource(1), there, CONTEXT).annotate == ()

    second = plan(make_resource(2, slo={"ttftMilliseconds": 7}), there, CONTEXT)

    assert [(each.key.name, each.annotations) for each in second.annotate] == [
        ("one", {CONFIG_HASH: second.files[second.version]})
    ]
    assert [step.key.kind.name for step in second.apply if step.key.kind.name != "PrometheusRule"] == ["ConfigMap"]


def test_before_replicas_leave_the_least_loaded_is_marked() -> None:
    first = plan(make_resource(1, replicas=3), EMPTY, CONTEXT)
    pods = tuple(make_pod(f"p{i}", first.version, ip=f"10.0.0.{i}") for i in range(4))
    pods[3]["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
    there = after(first, ClusterSnapshot("u-1", pods=pods))
    workers = tuple(make_worker(f"10.0.0.{i}", running=i, parked=i, waiting=i) for i in range(2))
    load = PollResult(0, workers=workers)
    assert plan(make_resource(1, replicas=3), there, CONTEXT, load).costs == ()

    found = plan(make_resource(2, replicas=2), there, CONTEXT, load)

    assert {each.key.name: each.annotations[DELETION_COST] for each in found.costs} == {
        "p0": "0",
        "p1": "3000",
        "p2": "-1",
        "p3": str(2**31 - 1),
    }


def make_worker(ip: str, **online: int) -> WorkerStatus:
    return make_status(ip, address=f"http://{ip}:8000", online=ClassLoad(**online))


def test_the_operators_own_secret_is_copied_until_its_hash_is_known() -> None:
    first = plan(make_resource(1), EMPTY, OWN_REDIS)
    there = after(first, EMPTY)
    rotated = replace(OWN_REDIS, user_keys=UserKeys("second", "first"))
    kinds = [step.key.kind.name for step in plan(make_resource(1), there, rotated).apply]

    assert first.apply[0].key.kind.name == "Secret"
    assert first.apply[0].manifest["metadata"]["name"] == "llm-ballast-redis"
    assert kinds == ["Secret", "ConfigMap"]


def test_running_pods_are_told_of_a_rotated_secret_once_and_new_ones_are_not() -> None:
    first = plan(make_resource(1), EMPTY, OWN_REDIS)
    there = after(first, ClusterSnapshot("u-1", pods=(make_pod("one", first.version),)))
    rotated = replace(OWN_REDIS, user_keys=UserKeys("second", "first"))
    assert plan(make_resource(1), there, OWN_REDIS).annotate == ()

    second = plan(make_resource(1), there, rotated)
    there = after(second, there)
    there = replace(there, pods=(*there.pods, make_pod("new", first.version)))

    assert [(each.key.name, each.annotations[REDIS_HASH]) for each in second.annotate] == [
        ("one", secrets_hash(make_resource(1), rotated))
    ]
    assert plan(make_resource(1), there, rotated).because == ()


def test_what_belongs_to_a_deleted_namesake_or_is_being_deleted_is_left() -> None:
    old = after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY)
    assert plan(make_resource(1), ClusterSnapshot("u-2", old.children), CONTEXT).because == ()
    going = copy.deepcopy(dict(old.children))
    for body in going.values():
        body["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    assert plan(make_resource(1, slots=3), ClusterSnapshot("u-1", going), CONTEXT).because == ()


def test_a_policy_of_the_resource_protects_its_pods_until_it_is_gone() -> None:
    """One of a deleted namesake may do so in another way, and a Deployment that only loses pods needs none."""
    there = copy.deepcopy(dict(after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY).children))
    policy = there[Key(NETWORK_POLICY, "ns", "llm")]
    policy["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"

    def steps(replicas: int) -> list[tuple[Kind, str]]:
        done = plan(make_resource(1, replicas=replicas), ClusterSnapshot("u-1", there), CONTEXT)
        return [(step.key.kind, text) for step in done.apply for text in done.held]

    ((kind, held),) = steps(2)
    assert (kind, "and the pods" in held) == (DEPLOYMENT, False)
    policy["metadata"]["ownerReferences"][0]["uid"] = "u-0"
    assert steps(2) == []
    ((kind, held),) = steps(0)
    assert (kind, "and the pods" in held) == (DEPLOYMENT, True)


def test_a_child_of_a_kind_that_discovery_does_not_show_now_stays() -> None:
    """The kind exists, because the child does. Its group may be unavailable, such as for a moment at the start."""
    made = after(plan(make_resource(), EMPTY, CONTEXT), EMPTY)

    assert plan(make_resource(), made, replace(CONTEXT, kinds=frozenset())).because == ()


def test_another_budget_that_the_resource_owns_stays_because_the_operator_may_delete_none() -> None:
    resource = make_resource()
    there = after(plan(resource, ClusterSnapshot("u-1"), CONTEXT), ClusterSnapshot("u-1"))
    made = there.children[Key(BUDGET, "ns", "llm")]
    theirs = copy.deepcopy(made) | {"metadata": made["metadata"] | {"name": "theirs", "uid": "t"}}
    more = replace(there, children={**there.children, Key(BUDGET, "ns", "theirs"): theirs})

    assert plan(resource, more, CONTEXT).because == ()


@pytest.mark.parametrize("field", ["namespaceSelector", "ipBlock"])
def test_a_peer_that_another_writer_widened_is_restored(field: str) -> None:
    """An empty selector of namespaces admits the pods of every namespace."""
    peer = {"podSelector": {"matchLabels": {"app": "gateway"}}}
    resource = make_resource(network={"ingressFrom": [peer]})
    there = after(plan(resource, ClusterSnapshot("u-1"), CONTEXT), ClusterSnapshot("u-1"))
    (found,) = there.children[Key(NETWORK_POLICY, "ns", "llm")]["spec"]["ingress"][0]["from"]
    found[field] = {} if field == "namespaceSelector" else {"cidr": "0.0.0.0/0"}

    (step,) = plan(resource, there, CONTEXT).apply
    assert step.because.endswith(f"changed spec.ingress[0].from[0].{field}")
    assert step.patch is not None
    assert step.patch["spec"]["ingress"][0]["from"] == [peer]


def test_an_object_of_another_owner_is_never_changed_nor_deleted() -> None:
    theirs = copy.deepcopy(dict(after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY).children))
    for body in theirs.values():
        body["metadata"]["ownerReferences"][0] |= {"kind": "Database", "uid": "u-9"}
    found = plan(make_resource(1, network={"policy": False}), ClusterSnapshot("u-1", theirs), CONTEXT)

    assert found.delete == ()
    assert {step.uid for step in found.apply} == {None}, "create, or nothing"


def test_an_object_that_another_owner_shares_with_a_deleted_namesake_is_not_waited_for() -> None:
    """Kubernetes does not delete it. The attempt to create it finds that its name is taken."""
    left = copy.deepcopy(dict(after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY).children))
    owners = left[SERVICE_KEY]["metadata"]["ownerReferences"]
    owners.append(owners[0] | {"kind": "Database", "name": "db", "uid": "u-9"})
    assert plan(make_resource(1), ClusterSnapshot("u-2", left), CONTEXT).apply == (), "the ConfigMap is waited for"

    policy, pods = Key(NETWORK_POLICY, "ns", "llm"), Key(DEPLOYMENT, "ns", "llm")
    del left[CONFIG_KEY], left[pods]
    applied = [step.key for step in plan(make_resource(1), ClusterSnapshot("u-2", left), CONTEXT).apply]
    assert applied == [CONFIG_KEY, SERVICE_KEY], "no pod starts before the policy is there"
    del left[policy]
    applied = [step.key for step in plan(make_resource(1), ClusterSnapshot("u-2", left), CONTEXT).apply]
    assert applied == [CONFIG_KEY, policy, SERVICE_KEY, pods]


def test_a_path_that_the_cluster_always_changes_is_tolerated_and_others_are_not() -> None:
    there = dict(after(plan(make_resource(1), EMPTY, CONTEXT), EMPTY).children)
    changed = copy.deepcopy(there[SERVICE_KEY])
    changed["spec"]["type"] = "NodePort"
    there[SERVICE_KEY] = changed
    (written,) = (step.manifest for step in plan(make_resource(1), EMPTY, CONTEXT).apply if step.key == SERVICE_KEY)
    blind = ClusterSnapshot("u-1", there, tolerated={SERVICE_KEY: Tolerated(shape(written), frozenset({"spec.type"}))})

    assert plan(make_resource(1), ClusterSnapshot("u-1", there), CONTEXT).because == (
        "Restored Service llm, of which another writer changed spec.type",
    )
    assert plan(make_resource(1), blind, CONTEXT).because == ()


def test_a_file_that_cannot_be_read_any_more_is_left_out() -> None:
    config = WorkerConfig.parse("model: {uri: /m}", "test")

    assert set(config_texts(config, {"0d": "nonsense: ["}, frozenset({"0d"}))) == {version_of(config)}


def test_files_that_no_resource_has_any_more_take_no_memory() -> None:
    config = WorkerConfig.parse("model: {uri: /m}", "test")
    tracemalloc.start()
    for number in range(12):
        config_texts(config, {"0d": f"]{number}" + 1_000_000 * "x"}, frozenset())
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert used < 6_000_000


DRIFTS: dict[str, tuple[Any, Any, tuple[str, ...]]] = {
    "defaults": ({"a": 1}, {"a": 1, "b": 2}, ()),
    "missing": ({"a": 1}, {}, ("a",)),
    "empty and missing": ({"a": {}, "b": [], "c": None}, {}, ()),
    "a selector of everything is missing": ({"namespaceSelector": {}}, {}, ("namespaceSelector",)),
    "quantities": ({"cpu": "1000m", "memory": "1024Mi", "big": "1e3"}, {"cpu": "1", "memory": "1Gi", "big": "1k"}, ()),
    "another quantity": ({"cpu": "1"}, {"cpu": "2"}, ("cpu",)),
    "booleans are no numbers": ({"a": True}, {"a": 1}, ("a",)),
    "named things in any order": ([{"name": "a", "x": 1}], [{"name": "b"}, {"name": "a", "x": 1}], ()),
    "a named thing is gone": ({"l": [{"name": "a"}]}, {"l": [{"name": "b"}]}, ("l[a]",)),
    "a name twice": (
        {"l": [{"name": "a", "x": 1}, {"name": "a", "x": 2}]},
        {"l": [{"name": "a", "x": 1}, {"name": "a", "x": 3}]},
        ("l[1].x",),
    ),
    "plain lists as a whole": ({"l": [1, 2]}, {"l": [1]}, ("l",)),
    "deep": ({"a": {"b": [{"c": "x"}]}}, {"a": {"b": [{"c": "y", "d": 1}]}}, ("a.b[0].c",)),
}


@pytest.mark.parametrize("case", DRIFTS)
def test_drift_is_what_another_writer_changed(case: str) -> None:
    wanted, found, paths = DRIFTS[case]

    assert drift(wanted, found).changed == paths


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@given(json_values)
def test_an_object_does_not_drift_from_itself(value: Any) -> None:
    assert drift(value, copy.deepcopy(value)) == ((), ())


@pytest.mark.parametrize("refuses_users", [None, False])
@pytest.mark.parametrize(
    "url",
    [
        "redis://:top/secret@redis:6379/0",
        "redis://:top?secret@redis:6379/0",
        "redis://admin:top/secret",
        "redis://:7/secret",
        "REDISS://admin:secret@redis:6379",
        "redis+ssl://admin:secret@redis:6379",
        "admin:secret@redis:6379",
        "secret",
    ],
)
def test_a_malformed_url_of_the_operator_reaches_no_secret_of_a_resource(url: str, refuses_users: bool | None) -> None:
    data = {"url": base64.b64encode(url.encode()).decode(), "password": "eA=="}
    context = replace(OWN_REDIS, redis=data, refuses_users=refuses_users)
    resource = make_resource(gpu={"count": 0})

    assert [step.key for step in plan(resource, ClusterSnapshot("u-1"), context).apply if step.key.kind == SECRET] == []
    assert own_secrets(resource, context) == ()
    value = blocked(resource, context, Sharing())
    assert value is not None
    assert value.reason == "SecretMissing"
    assert "malformed URL" in value.message
    assert "secret" not in value.message.replace("SecretMissing", "")
    assert redis_users(resource, context) == redis_users(resource, OWN_REDIS)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("rediss://admin:top%2Fsecret@redis:6379/2?db=2", "rediss://ballast%3A%3Ans%2Fllm@redis:6379/2?db=2"),
        ("redis://[::1]:6379", "redis://ballast%3A%3Ans%2Fllm@[::1]:6379"),
        ("redis://:a@b@redis", "redis://ballast%3A%3Ans%2Fllm@redis"),
        ("unix:///run/redis.sock", "unix://ballast%3A%3Ans%2Fllm@/run/redis.sock"),
    ],
)
def test_a_secret_of_a_resource_has_its_own_user_in_the_url_of_the_operator(url: str, expected: str) -> None:
    context = replace(OWN_REDIS, redis={"url": base64.b64encode(url.encode()).decode()})
    (secret,) = (
        step.manifest
        for step in plan(make_resource(), ClusterSnapshot("u-1"), context).apply
        if step.key.kind == SECRET
    )

    assert base64.b64decode(secret["data"]["url"]).decode() == expected
