"""What the operator keeps of objects whose size and number others choose. It counts what is kept, not the memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from hypothesis import given
from hypothesis import strategies as st
from operated import Cluster, running, until
from reconciled import GUEST, MODEL, VERSIONS, Bench

from ballast_api.names import child_labels
from ballast_api.nested_json import decoded
from ballast_operator import content
from ballast_operator.cache import Cache
from ballast_operator.content import CHILD_MEBIBYTES, MEBIBYTE, MOST_LEVELS, items_of, trimmed, weight
from ballast_operator.kinds import CONFIG_MAP, INFERENCE_DEPLOYMENT, SECRET, Body, Key
from ballast_operator.queue_rules import own_queue

MANY = 60_000
AFFINITY = {"podAffinity": {"x": [{}] * MANY}}
"""240 KiB of JSON, and five MiB in memory."""
TENANTS = [{"name": f"t{number}", "weight": 1, "maxPriority": 1, "maxSlots": 1, "reservedPercent": 0.1}
           for number in range(1000)]  # fmt: skip


def make_resource(spec: Body, metadata: Body | None = None) -> Body:
    about = {"name": "llm", "namespace": "ns", "uid": "u", "resourceVersion": "1"}
    whole = {"model": MODEL, "replicas": 3} | spec
    return {"metadata": about | (metadata or {}), "spec": whole, "status": {"operator": "r"}}


def size_of(value: Any) -> int:
    return weight(value, 2**40)


@pytest.mark.parametrize(
    ("spec", "metadata", "left_out"),
    [
        ({"template": {"affinity": AFFINITY}}, {}, ["spec.template"]),
        ({"network": {"ingressFrom": [{"podSelector": {"x": ["é" * 400_000]}}]}}, {}, ["spec.network"]),
        ({"offline": {"queue": "ns/q", "tenants": TENANTS * 4}}, {}, ["spec.offline"]),
        ({}, {"labels": {f"l{number}": "" for number in range(MANY)}}, ["metadata"]),
        ({}, {"ownerReferences": [{"uid": str(number)} for number in range(MANY)]}, ["metadata"]),
        ({f"s{number}": {"x": [{}] * 6000} for number in range(3)}, {}, ["spec.s2"]),
        ({"offline": {"queue": "ns/q", "tenants": TENANTS}}, {}, None),
    ],
    ids=["nested", "wide text", "tenants", "labels", "owners", "several", "as large as usual"],
)
def test_a_resource_is_kept_within_the_limit(spec: Body, metadata: Body, left_out: list[str] | None) -> None:
    found = trimmed(INFERENCE_DEPLOYMENT, make_resource(spec, metadata))

    assert size_of(found) <= MEBIBYTE
    assert found.get(content.LEFT_OUT) == left_out
    assert trimmed(INFERENCE_DEPLOYMENT, found) == found
    assert (found["spec"]["model"], found["spec"]["replicas"], found["status"]) == (MODEL, 3, {"operator": "r"})
    assert own_queue(found) == ("ns/q" if "offline" in spec else "ns/llm")


def nested(levels: int, begin: str, end: str) -> str:
    """Return JSON as text, since Python cannot write it either."""
    return begin * levels + "1" + end * levels


@pytest.mark.parametrize("levels", [97, 98, 600, 1200, 9900])
@pytest.mark.parametrize(("begin", "end"), [("[", "]"), ('{"a\\"[":', "}")], ids=["lists", "objects"])
def test_an_object_of_a_list_is_read_however_deep_it_is(levels: int, begin: str, end: str) -> None:
    """The API server stores 10,000 levels, also in the records of field managers."""
    deep = nested(levels, begin, end)
    about = f'{{"name":"llm","namespace":"ns","uid":"u","resourceVersion":"1","managedFields":[{{"fieldsV1":{deep}}}]}}'
    attack = f'{{"metadata":{about},"spec":{{"replicas":3,"x":{deep}}},"status":{{}}}}'
    text = f'{{"items":[{attack}, {{"metadata":{{"name":"other"}}}}],"metadata":{{}}}}'

    (found, other), rest = items_of(text, lambda body: trimmed(INFERENCE_DEPLOYMENT, body))

    assert found.get(content.LEFT_OUT) == (None if levels <= 97 else ["spec.x"])
    assert (found["spec"]["replicas"], other["metadata"]["name"], rest) == (3, "other", {"metadata": {}})
    assert trimmed(INFERENCE_DEPLOYMENT, found) == found
    assert decoded(f'\n {{"type":"ADDED","object":{attack}}}')["object"]["spec"]["replicas"] == 3


def test_a_deep_object_that_does_not_end_is_malformed() -> None:
    with pytest.raises(ValueError, match="Expecting the end of a list or object"):
        decoded("[" * 9900)


@pytest.mark.envtest
def test_deep_objects_of_an_account_with_few_rights_hold_up_no_resource_of_others(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    """A watch shows them, then a list, and then an audit."""
    lists, objects = nested(9900, "[", "]"), nested(9900, '{"f:a":', "}").replace("1", "{}")
    affinity = f'{{"x":{lists},"y":{objects}}}'
    spec = f'{{"model":{{"uri":"file:///m"}},"gpu":{{"count":0}},"template":{{"affinity":{affinity}}}}}'
    resource = f'"apiVersion":"ballast.dev/v1alpha1","kind":"InferenceDeployment","spec":{spec}'
    managed = f'"managedFields":[{{"manager":"m","operation":"Update","apiVersion":"v1","fieldsV1":{objects}}}]'
    labels = json.dumps(child_labels("deep"))

    def create(kind: str, metadata: str, rest: str) -> None:
        text = f'{{"metadata":{{"name":"deep",{metadata}}},{rest}}}'
        headers = {"Content-Type": "application/json"}
        cluster.plane.http.post(cluster.path(kind), content=text, headers=headers).raise_for_status()

    def message() -> str:
        path = '{.status.conditions[?(@.type=="Degraded")].message}'
        arguments = ("-n", cluster.namespace, "-o", f"jsonpath={path}")
        return cluster.plane.kubectl("get", "infd", "deep", *arguments).stdout

    with running(controllers.kubeconfig, tmp_path) as operator:
        create("configmaps", f'"labels":{labels},{managed}', '"data":{}')
        create("inferencedeployments", '"labels":{}', resource)
        until(lambda: "Shorten spec.template" in message(), said="the condition of the deep resource")
        cluster.make("first")
        until(lambda: cluster.get("deployments", "first"), said="a resource after a watch")
        operator.stop()
        operator.start()
        cluster.make("second")
        until(lambda: cluster.get("deployments", "second"), said="a resource after a list")
        listed = ('verb="list"', 'kind="InferenceDeployment"', 'code="200"')
        until(lambda: any(all(x in name for x in listed) for name in operator.metrics()), said="an audit", seconds=60)
        assert operator.process is not None
        assert operator.process.poll() is None


VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(), lambda inner: st.lists(inner)
                      | st.dictionaries(st.text(), inner), max_leaves=8)  # fmt: skip


@given(st.lists(st.dictionaries(st.text(), VALUES)), st.dictionaries(st.text(), VALUES), st.booleans(), st.booleans())
def test_a_list_is_decoded_whatever_its_order_and_spaces(
    items: list[Body], rest: Body, is_first: bool, is_wide: bool
) -> None:
    rest.pop("items", None)
    page = {"items": items} | rest if is_first else rest | {"items": items}

    assert items_of(json.dumps(page, indent=1 if is_wide else None), dict) == (items, rest)


def test_an_object_of_a_list_is_trimmed_before_the_next_one_is_decoded() -> None:
    seen: list[Body] = []

    with pytest.raises(ValueError, match="Expecting value"):
        items_of('{"items":[{"a":1},malformed', lambda body: seen.append(body) or body)
    assert seen == [{"a": 1}]


@pytest.mark.parametrize(
    ("affinity", "limit"),
    [
        (AFFINITY, "takes more than 1 MiB of the operator's memory"),
        ({"x": json.loads("[" * 500 + "]" * 500)}, "more than 100 lists and objects are inside each other"),
    ],
    ids=["large", "deep"],
)
def test_a_resource_that_is_too_large_keeps_its_children_until_it_is_shorter(affinity: Body, limit: str) -> None:
    bench = Bench()
    bench.put(GUEST.namespace, GUEST.name, replicas=2)
    bench.reconcile()
    before, bench.cluster.applied = dict(bench.cache.children(GUEST)), set()
    bench.put(GUEST.namespace, GUEST.name, replicas=2, template={"affinity": affinity})
    bench.reconcile()

    assert bench.cluster.degraded == "InvalidSpec"
    assert ("Shorten spec.template." in bench.cluster.message, limit in bench.cluster.message) == (True, True)
    assert (bench.cluster.applied, bench.cache.children(GUEST)) == (set(), before)
    allowed = json.loads("[" * (MOST_LEVELS - 4) + "]" * (MOST_LEVELS - 4))
    bench.put(GUEST.namespace, GUEST.name, replicas=3, template={"affinity": {"x": allowed}})
    bench.reconcile()
    assert bench.cluster.degraded == "Healthy"
    assert bench.cluster.applied


def test_a_large_resource_does_not_hold_up_others_of_its_queue() -> None:
    bench = Bench()
    adapters = [{"name": f"a{number}", "uri": "x" * 2000} for number in range(2000)]
    for name in ("a", GUEST.name):
        model = MODEL | ({"adapters": adapters} if name == "a" else {})
        bench.put(GUEST.namespace, name, model=model, offline={"queue": f"{GUEST.namespace}/q"})
    bench.reconcile()

    assert bench.cluster.applied


def put_config_map(cache: Cache, name: str, owner: str, data: Body) -> Key:
    about = {"name": name, "namespace": GUEST.namespace, "uid": name, "resourceVersion": str(next(VERSIONS))}
    owners = [{"apiVersion": "ballast.dev/v1alpha1", "kind": "InferenceDeployment", "name": GUEST.name, "uid": owner}]
    labels = child_labels(GUEST.name)
    cache.put(CONFIG_MAP, {"metadata": about | {"labels": labels, "ownerReferences": owners}, "data": data})
    return Key(CONFIG_MAP, GUEST.namespace, name)


@pytest.mark.parametrize("exists", [False, True], ids=["of no resource", "of a resource"])
def test_of_objects_that_no_resource_owns_only_the_metadata_is_kept(exists: bool) -> None:
    """Whoever may create ConfigMaps can give them the labels of a child, before and after the resource exists."""
    bench = Bench()
    if exists:
        bench.put(GUEST.namespace, GUEST.name)
    for number in range(40):
        put_config_map(bench.cache, f"c{number}", "another", {"x": "y" * MEBIBYTE})
    bench.reconcile()
    found = [body for key, body in bench.cache.children(GUEST).items() if key.name.startswith("c")]

    assert len(found) == 40
    assert size_of(found) < MEBIBYTE
    assert bench.cache.uids(CONFIG_MAP).items() >= {
        (Key(CONFIG_MAP, GUEST.namespace, f"c{number}"), f"c{number}") for number in range(40)
    }


def test_a_child_is_read_again_if_its_resource_comes_later() -> None:
    """An API server that starts may deny that the kind of the resource exists."""
    bench = Bench()
    bench.put(GUEST.namespace, GUEST.name)
    bench.reconcile()
    before, bench.cluster.applied = dict(bench.cache.children(GUEST)), set()
    bench.cluster.others = before
    resource = bench.cache.resources[GUEST]
    bench.cache.drop(INFERENCE_DEPLOYMENT, resource)
    bench.reconcile()
    assert not any("spec" in body for body in bench.cache.children(GUEST).values())
    bench.cache.put(INFERENCE_DEPLOYMENT, resource)
    bench.reconcile()

    assert (bench.cluster.applied, bench.cache.children(GUEST)) == (set(), before)


def test_a_child_that_another_writer_made_too_large_is_named() -> None:
    bench = Bench()
    bench.put(GUEST.namespace, GUEST.name)
    bench.reconcile()
    (key,) = (key for key in bench.cache.children(GUEST) if key.kind == CONFIG_MAP)
    uid = bench.cache.resources[GUEST]["metadata"]["uid"]
    bench.cache.drop(CONFIG_MAP, bench.cache.children(GUEST)[key])
    put_config_map(bench.cache, key.name, uid, {f"{number}": "" for number in range(CHILD_MEBIBYTES * MEBIBYTE // 64)})
    bench.cluster.applied.clear()
    bench.put(GUEST.namespace, GUEST.name, model=MODEL | {"uri": "file:///other"})
    bench.reconcile()

    assert size_of(bench.cache.children(GUEST)[key]) < MEBIBYTE
    assert {each.kind for each in bench.cluster.applied} <= {SECRET}, "no pod waits for a file that is not there"
    assert bench.cluster.degraded == "NotApplied"
    assert f"another writer made ConfigMap {key.name}" in bench.cluster.message
