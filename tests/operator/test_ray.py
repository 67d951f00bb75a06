"""A resource on Ray: its children, a change of them, and its conditions."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import resources
import yaml
from queue_objects import make_status

from ballast_api.conditions import ConditionReason as Reason
from ballast_api.conditions import ConditionType as Type
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import RAY_LABEL, child_labels, router_labels, selector
from ballast_api.replicas import UNREADY_SECONDS
from ballast_api.status import Status
from ballast_api.worker_config import WorkerConfig
from ballast_operator.blockers import blocked
from ballast_operator.children.config import VERSION
from ballast_operator.children.ray import CLUSTER_LABEL
from ballast_operator.conditions.chains import conditions
from ballast_operator.conditions.given import Given
from ballast_operator.context import GcsValkey, OperatorContext
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import (
    BUDGET,
    DEPLOYMENT,
    NETWORK_POLICY,
    RAY_SERVICE,
    RULE,
    SECRET,
    SERVICE,
    SERVICE_MONITOR,
    STATEFUL_SET,
    Body,
    Key,
    Kind,
)
from ballast_operator.named_secrets import named_secrets
from ballast_operator.own_secrets import own_secrets
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot
from ballast_operator.poll_result import UNPOLLED, PollResult, Problem
from ballast_operator.resource_status import status
from ballast_operator.sharing import Sharing
from ballast_queue.status import WorkerStatus

CONTEXT = OperatorContext(image="worker:1", kinds=frozenset({"RayService"}))
EMPTY = ClusterSnapshot("u")


def make_resource(*, on_ray: bool = True, generation: int = 1, ray: dict[str, Any] | None = None, **spec: Any):
    base = {"replicas": 2, "template": {"image": "ray:1"}}
    runtime = {"runtime": {"ray": ray or {}}} if on_ray else {}
    return resources.make_resource(about={"generation": generation}, **(base | runtime | spec))


def make_pod(name: str, *, is_ready: bool = True, on_ray: bool = True, cluster: str = "llm-1") -> Body:
    labels = {RAY_LABEL: "llm", CLUSTER_LABEL: cluster} if on_ray else {}
    annotations = {} if on_ray else {VERSION: "v"}
    metadata = {"name": name, "namespace": "ns", "labels": labels, "annotations": annotations, "creationTimestamp": ""}
    ready = {"type": "Ready", "status": "True" if is_ready else "False"}
    return {"metadata": metadata, "status": {"phase": "Running", "podIP": f"10.0.0.{name}", "conditions": [ready]}}


def applied(
    done: ChildrenPlan, before: ClusterSnapshot, *pods: Body, ray_status: Body | None = None
) -> ClusterSnapshot:
    """What the cluster shows once the plan was carried out."""
    children = {key: copy.deepcopy(body) for key, body in before.children.items()}
    children |= {step.key: copy.deepcopy(step.manifest) for step in done.apply if step.key.kind != SECRET}
    for gone in done.delete:
        del children[gone.key]
    for key, body in children.items():
        body["metadata"]["uid"] = f"uid-{key.name}"
        if key.kind == RAY_SERVICE:
            body["status"] = {"observedGeneration": 1} | (ray_status or serving(2))
    return ClusterSnapshot("u", children, tuple(pods))


def made(done: ChildrenPlan, kind: Kind, name: str = "llm") -> Body | None:
    found = [step.manifest for step in done.apply if step.key.kind == kind and step.key.name == name]
    return found[0] if found else None


def spec_of(done: ChildrenPlan) -> Body:
    found = made(done, RAY_SERVICE)
    assert found is not None
    return found["spec"]


def serve_of(done: ChildrenPlan) -> Body:
    (application,) = yaml.safe_load(spec_of(done)["serveConfigV2"])["applications"]
    return application


def group_of(done: ChildrenPlan) -> Body:
    (group,) = spec_of(done)["rayClusterConfig"]["workerGroupSpecs"]
    return group


def test_a_ray_service_takes_the_place_of_the_deployment():
    done = plan(make_resource(), EMPTY, CONTEXT)

    head = spec_of(done)["rayClusterConfig"]["headGroupSpec"]
    (container,) = group_of(done)["template"]["spec"]["containers"]
    assert made(done, DEPLOYMENT) is None
    assert made(done, SERVICE)["spec"]["selector"].items() <= group_of(done)["template"]["metadata"]["labels"].items()
    assert not made(done, SERVICE)["spec"]["selector"].items() <= head["template"]["metadata"]["labels"].items()
    assert (head["rayStartParams"]["num-cpus"], head["rayStartParams"]["num-gpus"]) == ("0", "0")
    assert spec_of(done)["rayClusterConfig"]["authOptions"] == {"mode": "token"}
    assert spec_of(done)["rayClusterConfig"]["enableInTreeAutoscaling"] is False
    assert container["readinessProbe"]["httpGet"] == {"path": "/ready", "port": "http"}
    assert "nvidia.com/gpu" in container["resources"]["limits"]
    assert serve_of(done)["deployments"][0]["num_replicas"] == group_of(done)["replicas"] == 2


def test_each_pod_of_a_worker_over_several_nodes_has_the_model_with_its_adapters_and_its_gpus():
    model = {"uri": "hf://a/b", "adapters": [{"name": "legal", "uri": "pvc://models/legal"}]}
    resource = make_resource(ray={"nodes": 2}, gpu={"count": 8}, model=model)

    done = plan(resource, EMPTY, CONTEXT)

    (deployment,) = serve_of(done)["deployments"]
    config = WorkerConfig.parse(deployment["user_config"]["config"], "test")
    assert group_of(done)["replicas"] == 4
    assert [each["name"] for each in group_of(done)["template"]["spec"]["initContainers"]] == ["fetch"]
    assert deployment["placement_group_bundles"] == [{"CPU": 1, "GPU": 8}] * 2
    assert (config.runtime.tensor_parallel, config.runtime.nodes) == (16, 2)
    assert [each.name for each in config.model.adapters] == ["legal"]
    (container,) = group_of(done)["template"]["spec"]["containers"]
    assert [each["name"] for each in container["env"] if "NCCL" in each["name"]] == ["NCCL_DEBUG"]  # RDMA stays on


def test_a_replica_that_serve_ends_accepts_requests_until_services_have_seen_a_failed_probe():
    """A pod that is deleted leaves the endpoints at once. A pod whose replica has ended stays until a probe fails."""
    done = plan(make_resource(), EMPTY, CONTEXT)

    (deployment,) = serve_of(done)["deployments"]
    runtime = WorkerConfig.parse(deployment["user_config"]["config"], "test").runtime
    pod = group_of(done)["template"]["spec"]
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["failureThreshold"] == 1
    assert runtime.unready_seconds >= probe["periodSeconds"] + UNREADY_SECONDS
    assert pod["terminationGracePeriodSeconds"] > runtime.unready_seconds + runtime.drain_seconds


@pytest.mark.parametrize(("change", "is_hot"), [({"slo": {"ttftMilliseconds": 7}}, True), ({"slots": 3}, False)])
def test_a_change_of_the_configuration_restarts_the_replicas_in_their_ray_cluster_unless_it_is_hot(
    change: dict[str, Any], is_hot: bool
):
    first = plan(make_resource(), EMPTY, CONTEXT)
    second = plan(make_resource(generation=2, **change), applied(first, EMPTY), CONTEXT)

    assert spec_of(first)["rayClusterConfig"] == spec_of(second)["rayClusterConfig"]
    assert (serve_of(first)["args"] == serve_of(second)["args"]) is is_hot
    assert serve_of(first)["deployments"] != serve_of(second)["deployments"]


def test_a_plan_of_what_a_plan_produced_is_empty():
    pods = [make_pod("1"), make_pod("2")]
    resource = make_resource(ray={"gcsRedis": {"address": "r:6379", "passwordSecret": "s"}})
    there = applied(plan(resource, EMPTY, CONTEXT), EMPTY, *pods)

    assert plan(resource, there, CONTEXT).because == ()


def serving(pods: int, *, new: str = "") -> Body:
    """The status of a RayService whose Ray cluster was asked for a number of pods."""
    active = {"rayClusterName": "llm-1", "rayClusterStatus": {"desiredWorkerReplicas": pods}}
    return {"activeServiceStatus": active, "pendingServiceStatus": {"rayClusterName": new}}


def test_a_smaller_ray_cluster_loses_a_pod_after_its_replica():
    pods = make_pod("1"), make_pod("2")
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *pods, ray_status=serving(2))
    fewer = make_resource(generation=2, replicas=1)

    first = plan(fewer, there, CONTEXT)
    there = applied(first, there, make_pod("1", is_ready=False), make_pod("2"), ray_status=serving(2))
    second = plan(fewer, there, CONTEXT)
    there = applied(second, there, make_pod("2"), ray_status=serving(1))

    assert serve_of(first)["deployments"][0]["num_replicas"] == 1
    assert first.resize == ()
    assert [(step.key.name, step.owner, step.replicas, step.leaving) for step in second.resize] == [
        ("llm-1", "uid-llm", 1, ("1",))
    ]
    assert plan(fewer, there, CONTEXT).because == ()


def test_a_larger_ray_cluster_gets_pods_at_once():
    pods = make_pod("1"), make_pod("2")
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *pods, ray_status=serving(2))

    (step,) = plan(make_resource(generation=2, replicas=4), there, CONTEXT).resize
    policy = there.children[Key(NETWORK_POLICY, "ns", "llm-ballast-ray")]
    policy["metadata"]["ownerReferences"][0]["uid"] = "of a deleted namesake"

    assert (step.replicas, step.leaving) == (4, ())
    assert plan(make_resource(generation=2, replicas=4), there, CONTEXT).resize == (), "its policy is not there"


def lost(name: str, reason: str = "DeletionByTaintManager") -> Body:
    """A pod in deletion that stays, because the kubelet of its node does not answer."""
    found = make_pod(name, is_ready=False)
    found["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    found["status"]["conditions"].append({"type": "DisruptionTarget", "status": "True", "reason": reason})
    return found


def test_only_a_pod_on_a_lost_node_is_replaced_while_it_cannot_end():
    """KubeRay counts a pod until it is gone, and makes no other pod in its place."""
    resource = make_resource()
    done = plan(resource, EMPTY, CONTEXT)
    while_lost = applied(done, EMPTY, make_pod("1"), lost("2"), ray_status=serving(2))
    replaced = applied(done, EMPTY, make_pod("1"), lost("2"), make_pod("3"), ray_status=serving(3))
    back = applied(done, EMPTY, make_pod("1"), make_pod("3"), ray_status=serving(3))
    too_many = applied(done, EMPTY, make_pod("0", is_ready=False), make_pod("1"), make_pod("3"), ray_status=serving(3))

    late = applied(done, EMPTY, make_pod("1"), make_pod("3", is_ready=False), ray_status=serving(3))
    drains = applied(done, EMPTY, make_pod("1"), lost("2", "EvictionByEvictionAPI"), ray_status=serving(2))

    steps = [plan(resource, there, CONTEXT).resize for there in (while_lost, replaced, back, too_many, late, drains)]

    # When the node is back, KubeRay replaces the pod that ended before the number is smaller. Its status follows late.
    said = [[(step.replicas, step.leaving) for step in each] for each in steps]
    assert said == [[(3, ())], [], [], [(2, ("0",))], [], []]


def test_the_newest_pod_leaves_workers_over_several_pods_when_a_lost_node_is_back():
    resource = make_resource(ray={"nodes": 2}, gpu={"count": 1}, replicas=1)
    done = plan(resource, EMPTY, CONTEXT)
    pods = [make_pod("0"), make_pod("1"), make_pod("2", is_ready=False)]
    for pod, second in zip(pods, (2, 0, 1), strict=True):
        pod["metadata"]["creationTimestamp"] = f"2026-01-01T00:00:0{second}Z"

    early = plan(resource, applied(done, EMPTY, *pods[1:], ray_status=serving(3)), CONTEXT)
    late = plan(resource, applied(done, EMPTY, *pods, ray_status=serving(3)), CONTEXT)

    assert early.resize == ()
    assert [(step.replicas, step.leaving) for step in late.resize] == [(2, ("0",))]


def test_no_pod_leaves_while_kuberay_replaces_the_ray_cluster():
    pods = [make_pod("1"), make_pod("2"), make_pod("3", is_ready=False, cluster="llm-2")]
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *pods, ray_status=serving(2, new="llm-2"))

    # Without pods that leave, the write only adds pods.
    assert all(step.leaving == () for step in plan(make_resource(generation=2, replicas=1), there, CONTEXT).resize)


@pytest.mark.parametrize("active", ["", "llm-1"], ids=["first start", "replacement"])
@pytest.mark.parametrize(
    ("pods", "asked", "expected"),
    [
        (2, None, [4]),  # KubeRay writes the number together with the state of Serve
        (2, 2, [4]),
        (4, 2, [4]),  # its number follows late, so the write compares 4 with the Ray cluster
        (6, 6, []),
    ],
)
def test_a_ray_cluster_that_starts_gets_the_pods_for_replicas_that_were_added_since(
    active: str, pods: int, asked: int | None, expected: list[int]
):
    """KubeRay leaves its number as it is, and moves to it only when Serve has all replicas."""
    there = [make_pod(str(each), is_ready=False, cluster="llm-2") for each in range(pods)]
    there += [make_pod(f"1{each}") for each in range(2) if active]
    counted = {} if asked is None else {"desiredWorkerReplicas": asked}
    status = serving(2) | {"pendingServiceStatus": {"rayClusterName": "llm-2", "rayClusterStatus": counted}}
    status["activeServiceStatus"]["rayClusterName"] = active
    before = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *there, ray_status=status)

    steps = plan(make_resource(generation=2, replicas=4), before, CONTEXT).resize

    assert [step.replicas for step in steps] == expected
    assert all((step.key.name, step.owner, step.leaving) == ("llm-2", "uid-llm", ()) for step in steps)


def test_a_pod_of_a_ray_cluster_that_starts_is_replaced_while_its_node_is_lost():
    pods = [make_pod("1", is_ready=False, cluster="llm-2"), lost("2")]
    pods[1]["metadata"]["labels"][CLUSTER_LABEL] = "llm-2"
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *pods, ray_status=serving(2, new="llm-2"))

    assert [step.replicas for step in plan(make_resource(), there, CONTEXT).resize] == [3]


@pytest.mark.parametrize("on_ray", [True, False])
def test_a_resource_that_moves_keeps_its_workers_until_the_others_serve(on_ray: bool):
    before = make_resource(on_ray=not on_ray)
    after = make_resource(on_ray=on_ray, generation=2)
    old = [make_pod("1", on_ray=not on_ray), make_pod("2", on_ray=not on_ray)]
    kind = DEPLOYMENT if on_ray else RAY_SERVICE
    there = applied(plan(before, EMPTY, CONTEXT), EMPTY, *old)

    first = plan(after, there, CONTEXT)
    there = applied(first, there, *old, make_pod("3", on_ray=on_ray), make_pod("4", on_ray=on_ray, is_ready=False))
    second = plan(after, there, CONTEXT)
    there = applied(second, there, *old, make_pod("3", on_ray=on_ray), make_pod("4", on_ray=on_ray))
    leaving = make_pod("4", on_ray=on_ray)
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    third = plan(after, applied(second, there, *old, make_pod("3", on_ray=on_ray), leaving), CONTEXT)
    fourth = plan(after, there, CONTEXT)

    plans = (first, second, third, fourth)
    deleted = [[gone.key.kind for gone in done.delete if gone.key.kind == kind] for done in plans]
    assert deleted == [[], [], [], [kind]]


@pytest.mark.parametrize("on_ray", [True, False])
def test_labels_that_the_operator_sets_win(on_ray: bool):
    """Services, budgets and routers select by them, and the operator finds children and pods by them."""
    own = child_labels("llm")
    given = dict.fromkeys(own, "mine") | {"team": "ml", "llm-d.ai/inference-serving": "false"}
    resource = make_resource(on_ray=on_ray, template={"image": "ray:1", "labels": given}, monitoring={"labels": given})
    done = plan(resource, EMPTY, replace(CONTEXT, kinds=frozenset({"RayService", "ServiceMonitor", "PrometheusRule"})))
    workers = group_of(done)["template"] if on_ray else made(done, DEPLOYMENT)["spec"]["template"]
    found = workers["metadata"]["labels"]

    assert found.items() >= (own | {"team": "ml"}).items()
    assert {name: found[name] for name in found if name.startswith("llm-d.ai/")} == router_labels("m") | {
        "llm-d.ai/inference-serving": "false"  # a resource can leave the pool of another
    }
    for step in done.apply:
        assert child_labels("llm").items() <= step.manifest["metadata"]["labels"].items(), step.key
    labeled = {step.key.kind for step in done.apply if step.manifest["metadata"]["labels"].get("team") == "ml"}
    assert labeled == {RULE, SERVICE_MONITOR}


def test_evictions_count_the_pods_that_stay():
    found = made(plan(make_resource(replicas=3), EMPTY, CONTEXT), BUDGET)

    assert "maxUnavailable" not in found["spec"]
    assert found["spec"]["minAvailable"] == 2


def test_only_the_pods_of_the_ray_cluster_reach_each_other_and_kuberay_reaches_the_dashboard():
    found = made(plan(make_resource(), EMPTY, CONTEXT), NETWORK_POLICY, "llm-ballast-ray")

    own, kuberay = found["spec"]["ingress"]
    assert own == {"from": [{"podSelector": found["spec"]["podSelector"]}]}
    assert kuberay["ports"] == [{"port": 8265, "protocol": "TCP"}]
    assert kuberay["from"][0]["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": "kuberay-operator"}


def test_the_state_of_the_head_is_in_the_redis_that_the_resource_names():
    resource = make_resource(ray={"gcsRedis": {"address": "r:6379", "passwordSecret": "s", "passwordKey": "k"}})

    options = spec_of(plan(resource, EMPTY, CONTEXT))["rayClusterConfig"]["gcsFaultToleranceOptions"]

    assert options == {
        "redisAddress": "r:6379",
        "redisPassword": {"valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
    }
    assert named_secrets(resource) == ("s",)


OWN_GCS = replace(CONTEXT, gcs=GcsValkey("valkey:1", "1Gi", "fast"))


def test_by_default_the_operator_runs_a_redis_for_the_head_alone():
    security = {"runAsNonRoot": True}
    done = plan(make_resource(), EMPTY, replace(OWN_GCS, gcs=replace(OWN_GCS.gcs, security=security)))

    options = spec_of(done)["rayClusterConfig"]["gcsFaultToleranceOptions"]
    spec, template = (made(done, STATEFUL_SET, "llm-ballast-gcs")["spec"][part] for part in ("selector", "template"))
    service, policy = made(done, SERVICE, "llm-ballast-gcs"), made(done, NETWORK_POLICY, "llm-ballast-ray")
    (secret,) = [step for step in done.apply if step.key.kind == SECRET]
    # A second Ray cluster that took over the state of the first would take its nodes and actors for its own.
    assert options.keys() == {"redisAddress", "redisPassword"}, "each Ray cluster has its own part of the Redis"
    assert options["redisAddress"] == "llm-ballast-gcs:6379"
    assert options["redisPassword"]["valueFrom"]["secretKeyRef"]["name"] == secret.key.name == "llm-ballast-gcs"
    assert secret.generates == "password"
    assert service["spec"]["selector"] == spec["matchLabels"] == template["metadata"]["labels"]
    assert policy["spec"]["podSelector"]["matchLabels"].items() <= spec["matchLabels"].items()
    assert template["spec"]["containers"][0]["image"] == "valkey:1"
    assert template["spec"]["containers"][0]["resources"]["limits"].keys() == {"cpu", "memory"}
    assert template["spec"]["securityContext"] == security
    assert done.apply.index(secret) < [step.key.kind for step in done.apply].index(STATEFUL_SET)


def test_labels_and_annotations_of_the_template_reach_head_and_redis_and_make_neither_of_them_a_worker():
    mesh, taken = {"sidecar.istio.io/inject": "false"}, {RAY_LABEL: "other", "app.kubernetes.io/component": "other"}
    routers = {"llm-d.ai/guide": "pd", "llm-d.ai/role": "decode"}
    labels = mesh | taken | routers | selector("other") | {"kueue.x-k8s.io/queue-name": "q"}
    sidecar = {"linkerd.io/inject": "disabled"}
    template = {"labels": labels, "annotations": sidecar | {"kueue.x-k8s.io/podset-required-topology": "rack"}}

    found, before = (plan(make_resource(**more), EMPTY, OWN_GCS) for more in ({"template": template}, {}))

    for read in (
        lambda done: spec_of(done)["rayClusterConfig"]["headGroupSpec"]["template"]["metadata"],
        lambda done: made(done, STATEFUL_SET, "llm-ballast-gcs")["spec"]["template"]["metadata"],
    ):
        assert read(found) == {"labels": mesh | read(before)["labels"], "annotations": sidecar}


@pytest.mark.parametrize(("storage", "volumes"), [("1Gi", ["password", "run"]), ("", ["password", "run", "data"])])
def test_the_state_of_the_head_is_on_a_volume_if_the_operator_has_storage_for_it(storage: str, volumes: list[str]):
    context = replace(CONTEXT, gcs=GcsValkey("valkey:1", storage, "fast"))
    spec = made(plan(make_resource(), EMPTY, context), STATEFUL_SET, "llm-ballast-gcs")["spec"]

    assert [each["name"] for each in spec["template"]["spec"]["volumes"]] == volumes
    claims = [each["spec"] for each in spec.get("volumeClaimTemplates", ())]
    assert [claim["resources"]["requests"]["storage"] for claim in claims] == ([storage] if storage else [])
    assert [claim["storageClassName"] for claim in claims] == (["fast"] if storage else [])


@pytest.mark.parametrize(("before", "after"), [("1Gi", "2Gi"), ("1Gi", ""), ("", "1Gi")])
def test_the_redis_of_a_head_keeps_its_volume_and_gets_every_other_change(before: str, after: str):
    """Kubernetes refuses an apply with another claim, and with it every later change."""
    old = replace(CONTEXT, gcs=GcsValkey("valkey:1", before, "fast" if before else ""))
    there = applied(plan(make_resource(), EMPTY, old), EMPTY, make_pod("1"), make_pod("2"))
    new = replace(CONTEXT, gcs=GcsValkey("valkey:2", after, "slow"))
    kept = there.child(STATEFUL_SET, make_resource().metadata, "llm-ballast-gcs")["spec"]

    spec = made(plan(make_resource(), there, new), STATEFUL_SET, "llm-ballast-gcs")["spec"]

    assert spec["template"]["spec"]["containers"][0]["image"] == "valkey:2"
    assert spec.get("volumeClaimTemplates") == kept.get("volumeClaimTemplates")
    assert spec["template"]["spec"]["volumes"] == kept["template"]["spec"]["volumes"]
    assert spec["podManagementPolicy"] == kept["podManagementPolicy"] == "Parallel"


def test_the_redis_of_the_head_stays_while_the_resource_is_on_ray():
    there = applied(plan(make_resource(), EMPTY, OWN_GCS), EMPTY, make_pod("1"), make_pod("2"))

    assert plan(make_resource(), there, OWN_GCS).because == ()
    none = plan(make_resource(replicas=0), there, OWN_GCS)
    assert [gone.key.kind for gone in none.delete] == [RAY_SERVICE]
    assert made(none, RAY_SERVICE) is None
    moving = plan(make_resource(on_ray=False), there, OWN_GCS)
    assert STATEFUL_SET not in [gone.key.kind for gone in moving.delete]
    plain = applied(moving, there, make_pod("3", on_ray=False), make_pod("4", on_ray=False))
    assert {gone.key.kind for gone in plan(make_resource(on_ray=False), plain, OWN_GCS).delete} >= {
        RAY_SERVICE,
        STATEFUL_SET,
    }


@pytest.mark.parametrize(
    ("resource", "context"),
    [(make_resource(ray={"gcsRedis": {"address": "r:6379"}}), OWN_GCS), (make_resource(), CONTEXT)],
    ids=["the resource names another", "the operator has none any more"],
)
def test_the_redis_of_the_head_stays_until_the_ray_cluster_that_uses_it_is_gone(
    resource: InferenceDeployment, context: OperatorContext
):
    pods = [make_pod("1"), make_pod("2")]
    there = applied(plan(make_resource(), EMPTY, OWN_GCS), EMPTY, *pods)
    first = plan(resource, there, context)
    begun = applied(first, there, *pods)
    begun.children[Key(RAY_SERVICE, "ns", "llm")]["metadata"]["generation"] = 2  # KubeRay has not seen it
    moving = applied(first, there, *pods, make_pod("3", cluster="llm-2"), ray_status=serving(2, new="llm-2"))
    new = serving(2)
    new["activeServiceStatus"]["rayClusterName"] = "llm-2"
    drained = applied(first, there, *pods, make_pod("3", cluster="llm-2"), ray_status=new)
    done = applied(first, there, make_pod("3", cluster="llm-2"), make_pod("4", cluster="llm-2"), ray_status=new)

    deleted = [
        [gone.key.kind for gone in each.delete]
        for each in (first, *(plan(resource, snapshot, context) for snapshot in (begun, moving, drained, done)))
    ]
    assert made(first, RAY_SERVICE) is not None
    assert deleted == [[], [], [], [], [STATEFUL_SET]]


def test_the_policy_of_the_head_stays_until_the_pods_of_ray_are_gone():
    """Whoever reaches the ports of Ray can run code in these pods."""
    old, new = [make_pod("1"), make_pod("2")], [make_pod("3", on_ray=False), make_pod("4", on_ray=False)]
    plain = make_resource(on_ray=False, generation=2)
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, *old)
    first = plan(plain, there, CONTEXT)
    there = applied(first, there, *old, *new)
    second = plan(plain, there, CONTEXT)
    there = applied(second, there, *old, *new)
    third = plan(plain, there, CONTEXT)
    fourth = plan(plain, replace(there, pods=tuple(new)), CONTEXT)

    deleted = [[gone.key.name for gone in done.delete] for done in (first, second, third, fourth)]
    assert deleted == [[], ["llm"], [], ["llm-ballast-ray"]]


def test_the_policy_of_the_head_goes_at_once_without_policies():
    there = applied(plan(make_resource(), EMPTY, CONTEXT), EMPTY, make_pod("1"), make_pod("2"))
    open_to_all = make_resource(network={"policy": False})

    assert {gone.key.kind for gone in plan(open_to_all, there, CONTEXT).delete} == {NETWORK_POLICY}


def test_a_lost_secret_of_the_head_is_made_again():
    there = applied(plan(make_resource(), EMPTY, OWN_GCS), EMPTY, make_pod("1"), make_pod("2"))
    (secret,) = own_secrets(make_resource(), OWN_GCS)

    (step,) = plan(make_resource(), replace(there, lost=frozenset({secret})), OWN_GCS).apply
    assert (step.key, step.generates) == (secret, "password")


@pytest.mark.parametrize(("backend", "value"), [("native", "rayWorker"), ("vllm", "rayVllmWorker")])
def test_the_backend_selects_the_image_with_ray(backend: str, value: str):
    gpu = {"count": 1 if backend == "vllm" else 0}
    resource = make_resource(engine={"backend": backend}, gpu=gpu, template={})
    images = replace(CONTEXT, ray_image="ray-native:1", ray_vllm_image="ray-vllm:1")
    cluster = spec_of(plan(resource, EMPTY, images))["rayClusterConfig"]
    pods = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]

    assert {pod["template"]["spec"]["containers"][0]["image"] for pod in pods} == {f"ray-{backend}:1"}
    refused = blocked(resource, CONTEXT, Sharing())
    assert refused is not None
    assert refused.reason == Reason.IMAGE_PULL
    assert f"image.{value} of the chart" in refused.message


def test_without_kuberay_the_children_do_not_change():
    found = blocked(make_resource(), OperatorContext(image="worker:1"), Sharing())

    assert found is not None
    assert (found.status, found.reason) == ("True", Reason.NO_KUBERAY)
    assert "Install KubeRay" in found.message


def make_worker(pod: str, config_hash: str) -> WorkerStatus:
    return make_status(pod, address=f"http://10.0.0.{pod}:8000", config_hash=config_hash)


def given(
    *pods: Body,
    ray_status: Body | None = None,
    hashes: str = "",
    heads: Sequence[Body] | None = None,
    problem: Problem | None = None,
    unchanged: float = 0.0,
    storage: int | None = None,
    **spec: Any,
):
    """The conditions; `hashes` has a letter for each pod: n for the new configuration, o for another.

    `storage` is the number of ready pods of the operator's own Redis for the head.
    """
    resource = make_resource(**spec)
    done = plan(resource, EMPTY, CONTEXT if storage is None else OWN_GCS)
    status = {"activeServiceStatus": {"rayClusterName": "llm-1"}, "observedGeneration": 1} | (ray_status or {})
    found = (make_head(),) if heads is None else tuple(heads)
    snapshot = replace(applied(done, EMPTY, *pods, ray_status=status), heads=found)
    if storage is not None:
        snapshot.child(STATEFUL_SET, resource.metadata, "llm-ballast-gcs")["status"] = {"readyReplicas": storage}
    new = done.files[done.version]
    names = [pod["metadata"]["name"] for pod in pods]
    workers = tuple(make_worker(name, new if each == "n" else "old") for name, each in zip(names, hashes, strict=False))
    poll = PollResult(100.0, workers=workers if problem is None else (), problem=problem)
    return conditions(Given(resource, snapshot, done, poll, 100.0, unchanged=unchanged))


def test_the_pods_of_ray_decide_whether_the_resource_is_ready():
    starting = given(make_pod("1", is_ready=False))
    rolling = given(make_pod("1"), make_pod("2"), hashes="no")
    complete = given(make_pod("1"), make_pod("2"), hashes="nn")

    assert [each[Type.READY].status for each in (starting, rolling, complete)] == ["False", "True", "True"]
    assert rolling[Type.PROGRESSING][:2] == ("True", Reason.ROLLING_OUT)
    assert complete[Type.PROGRESSING][:2] == ("False", Reason.COMPLETE)
    assert rolling[Type.CONFIG_APPLIED].status == "False"
    assert complete[Type.CONFIG_APPLIED].status == "True"


OUTAGE = Problem(Reason.REDIS_UNREACHABLE, "cannot use Redis")
"""Without Redis, no worker reports its version."""


def test_workers_that_are_ready_roll_nothing_out_while_no_report_shows_their_version():
    ready = given(make_pod("1"), make_pod("2"), problem=OUTAGE)[Type.PROGRESSING]
    starting = given(make_pod("1"), make_pod("2", is_ready=False), problem=OUTAGE)[Type.PROGRESSING]
    replaced = {"activeServiceStatus": {"rayClusterName": "llm-1"}, "pendingServiceStatus": {"rayClusterName": "llm-2"}}
    moving = given(make_pod("1"), make_pod("2"), problem=OUTAGE, ray_status=replaced)[Type.PROGRESSING]

    assert ready[:2] == ("Unknown", Reason.REDIS_UNREACHABLE)
    assert ready.message.startswith("2 workers are ready; no report shows")
    assert (starting.status, starting.message) == ("True", "1 of 2 workers are ready")
    assert moving[:2] == ("True", Reason.ROLLING_OUT)


def test_the_number_of_workers_of_the_newest_version_stays_while_no_worker_reports_its_version():
    resource = make_resource().model_copy(update={"status": Status(updated_replicas=2)})
    done = plan(resource, EMPTY, CONTEXT)
    snapshot = applied(done, EMPTY, make_pod("1"), make_pod("2"), ray_status={"observedGeneration": 1})
    found = Given(resource, snapshot, done, PollResult(100.0, problem=OUTAGE), 100.0)

    assert status(found, (), None).updated_replicas == 2


def test_a_resource_on_ray_without_replicas_is_complete_when_its_pods_are_gone():
    resource = make_resource(replicas=0)
    done = plan(resource, EMPTY, CONTEXT)
    before = Given(resource, replace(EMPTY, pods=(make_pod("1"),)), done, UNPOLLED, 100.0)
    after = replace(before, snapshot=EMPTY)

    assert conditions(before)[Type.PROGRESSING].status == "True"
    assert conditions(after)[Type.PROGRESSING][:2] == ("False", Reason.COMPLETE)
    assert conditions(after)[Type.READY].reason == Reason.SCALED_TO_ZERO


@pytest.mark.parametrize(("hashes", "said"), [("nn", ("True", "all 2")), ("no", ("False", "1 of 2"))])
def test_of_a_worker_over_several_pods_only_one_reports_its_settings(hashes: str, said: tuple[str, str]):
    pods = [make_pod(name, is_ready=name in "12") for name in "1234"]
    found = given(*pods, hashes=hashes, ray={"nodes": 2}, gpu={"count": 1})[Type.CONFIG_APPLIED]

    assert (found.status, found.message.partition(" workers use")[0]) == said


def test_a_new_ray_cluster_is_named_with_what_it_costs():
    status = {"pendingServiceStatus": {"rayClusterName": "llm-2"}}
    found = given(make_pod("1"), make_pod("2"), make_pod("3", cluster="llm-2"), hashes="ooo", ray_status=status)

    assert "KubeRay starts the Ray cluster llm-2 beside llm-1" in found[Type.PROGRESSING].message
    assert "GPUs of all workers a second time" in found[Type.PROGRESSING].message


FIRST_LINE = "The deployment failed to start 6 times in a row. See controller logs for details. Error:"


def quoting(error: str) -> str:
    """A message of Serve. It quotes a traceback, whose end quotes that of the replica."""
    frames = "".join(f'  File "replica.py", line {line}, in initialize\n    await self.call()\n' for line in range(40))
    replica = f'Traceback (most recent call last):\n  File "settings.py", line 5, in directory_of\n    raise\n{error}'
    return (
        f"{FIRST_LINE}\n\x1b[36mray::ServeReplica:ballast:worker()\x1b[39m (pid=431)\n{frames}RuntimeError: {replica}\n"
    )


SENTENCES = {
    "a sentence": ("a replica failed to start: no model", "a replica failed to start: no model"),
    "a traceback": (quoting("NotServed: no model"), f"{FIRST_LINE} NotServed: no model"),
    "an error of several lines": (
        quoting("Invalid: 1 field:\n  - slots: 0\n"),
        f"{FIRST_LINE} Invalid: 1 field: - slots: 0",
    ),
    "a traceback without its end": (f'{FIRST_LINE}\n  File "replica.py", line 1\n    await', FIRST_LINE),
    "nothing": ("", "no reason"),
}


@pytest.mark.parametrize(("message", "said"), SENTENCES.values(), ids=SENTENCES)
def test_the_sentence_of_ray_is_in_the_condition(message: str, said: str):
    deployments = {"worker": {"status": "UNHEALTHY", "message": message}}
    application = {"status": "DEPLOY_FAILED", "message": "", "serveDeploymentStatuses": deployments}
    status = {"pendingServiceStatus": {"applicationStatuses": {"ballast": application}}}

    found = given(make_pod("1", is_ready=False), ray_status=status)[Type.DEGRADED]

    assert (found.status, found.reason) == ("True", Reason.RAY_FAILED)
    assert found.message == f"Ray Serve reports DEPLOY_FAILED: {said}"


@pytest.mark.parametrize(("storage", "is_named"), [({}, True), ({"gcsRedis": {"address": "r:6379"}}, False)])
def test_a_head_without_storage_is_named(storage: dict[str, Any], is_named: bool):
    found = given(make_pod("1"), make_pod("2"), hashes="nn", ray=storage)[Type.DEGRADED]

    assert found.status == "False"
    assert ("no Redis keeps the state of Ray's head" in found.message) is is_named


def make_head(*, is_ready: bool = True, cluster: str = "llm-1") -> Body:
    return make_pod("head", is_ready=is_ready, cluster=cluster)


def make_failing(name: str) -> Body:
    pod = make_pod(name, is_ready=False)
    ended = {"lastState": {"terminated": {"exitCode": 1}}, "restartCount": 3}
    pod["status"]["containerStatuses"] = [ended]
    return pod


@pytest.mark.parametrize(
    ("heads", "pods", "reason"),
    [
        ([make_head()], [make_pod("1")], Reason.HEALTHY),
        ([make_head(is_ready=False)], [make_pod("1")], Reason.RAY_HEAD_DOWN),
        ([make_head(cluster="llm-0")], [make_pod("1")], Reason.RAY_HEAD_DOWN),
        ([], [make_pod("1")], Reason.RAY_HEAD_DOWN),
        ([], [make_pod("1", is_ready=False)], Reason.RAY_HEAD_DOWN),
        ([], [make_failing("1")], Reason.RAY_HEAD_DOWN),
        ([make_failing("head")], [make_pod("1")], Reason.RAY_HEAD_DOWN),
    ],
)
def test_a_head_that_is_away_is_named_until_it_is_back(heads: list[Body], pods: list[Body], reason: Reason):
    found = given(*pods, heads=heads)[Type.DEGRADED]

    assert found.reason == reason
    assert ("no worker serves" in found.message) is (reason is Reason.RAY_HEAD_DOWN and pods != [make_pod("1")])
    assert ("(exit code 1" in found.message) is (make_failing("head") in heads)


def test_a_head_that_starts_is_a_problem_only_if_its_pod_has_one():
    found = [
        given(make_pod("1", is_ready=False), heads=[head], ray_status={"activeServiceStatus": {}})[Type.DEGRADED]
        for head in (make_head(is_ready=False), make_failing("head"))
    ]

    assert [each.reason for each in found] == [Reason.HEALTHY, Reason.CRASHING]
    assert found[1].message == "pod head: exit code 1, 3 restarts"


@pytest.mark.parametrize("worker", [make_pod("1"), make_pod("1", is_ready=False)], ids=["serving", "ended"])
@pytest.mark.parametrize(("ready", "reason"), [(1, Reason.HEALTHY), (0, Reason.RAY_STORAGE_DOWN)])
def test_a_redis_of_the_head_that_is_away_is_named(ready: int, reason: Reason, worker: Body):
    found = given(worker, storage=ready)[Type.DEGRADED]

    assert found.reason == reason
    assert ("serves on for ten minutes" in found.message) is (ready == 0 and worker == make_pod("1"))


def refused(cluster: str, message: str) -> Body:
    """Return a part of a RayService's status whose Ray cluster lacks a pod."""
    entry = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreateWorkerPod", "message": message}
    return {"rayClusterName": cluster, "rayClusterStatus": {"conditions": [entry]}}


QUOTA = "FailedCreateWorkerPod\npods is forbidden: exceeded quota: team"
FIRST = {"activeServiceStatus": {}, "pendingServiceStatus": {"rayClusterName": "llm-2"}}
BESIDE = {"pendingServiceStatus": {"rayClusterName": "llm-2"}}
STUCK: dict[str, tuple[dict[str, Any], Reason, str]] = {
    "a quota refuses a worker": (
        {"ray_status": {"activeServiceStatus": refused("llm-1", QUOTA)}}, Reason.QUOTA,
        "KubeRay reports FailedCreateWorkerPod pods is forbidden: exceeded quota: team",
    ),
    "a policy refuses a worker of a new Ray cluster": (
        {"ray_status": {"pendingServiceStatus": refused("llm-2", "violates PodSecurity")}}, Reason.INVALID_POD,
        "KubeRay reports violates PodSecurity",
    ),
    "the first head is refused": (
        {"ray_status": FIRST, "heads": []}, Reason.RAY_FAILED, "See kubectl describe raycluster llm-2 -n ns",
    ),
    "a new head beside a Ray cluster that serves is refused": (
        {"ray_status": BESIDE}, Reason.RAY_FAILED, "no head for the Ray cluster llm-2",
    ),
    "KubeRay does nothing": (
        {"ray_status": {"activeServiceStatus": {}}, "heads": []}, Reason.RAY_FAILED, "describe rayservice llm -n ns",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", STUCK)
def test_pods_that_kuberay_cannot_make_are_named_after_a_while(case: str):
    status, reason, words = STUCK[case]
    pods = (make_pod("1"),) if "activeServiceStatus" not in status["ray_status"] else ()
    early, late = (given(*pods, unchanged=seconds, **status)[Type.DEGRADED] for seconds in (60.0, 150.0))

    assert (early.reason, late.reason) == (Reason.HEALTHY, reason)
    assert words in late.message


def test_a_redis_of_the_head_that_never_runs_is_named_before_a_ray_cluster_serves():
    found = given(storage=0, ray_status=FIRST, heads=[make_failing("head")], unchanged=150.0)[Type.DEGRADED]

    assert found.reason == Reason.RAY_FAILED
    assert "See kubectl describe statefulset llm-ballast-gcs -n ns" in found.message


def test_a_rollout_on_ray_without_progress_is_stuck_after_its_startup_seconds_unless_ray_finds_no_place():
    pods = make_pod("1"), make_pod("2", is_ready=False)
    spec = {"hashes": "n", "rollout": {"startupSeconds": 600}}
    early, late = (given(*pods, unchanged=seconds, **spec) for seconds in (500.0, 700.0))
    message = "Deployment 'worker' has 1 replicas that have taken more than 30s to be scheduled."
    application = {"status": "DEPLOYING", "serveDeploymentStatuses": {"worker": {"message": message}}}
    status = {"activeServiceStatus": {"rayClusterName": "llm-1", "applicationStatuses": {"ballast": application}}}
    unplaced = [given(*pods, unchanged=seconds, ray_status=status, **spec) for seconds in (0.0, 700.0)]

    said = [(each[Type.PROGRESSING].reason, each[Type.DEGRADED].reason) for each in (early, late, *unplaced)]
    assert said == [
        (Reason.ROLLING_OUT, Reason.HEALTHY),
        (Reason.ROLLOUT_STUCK, Reason.ROLLOUT_STUCK),
        (Reason.RAY_REPLICAS_PENDING, Reason.HEALTHY),
        (Reason.RAY_REPLICAS_PENDING, Reason.HEALTHY),
    ]
    assert all(message in each[Type.PROGRESSING].message for each in unplaced)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("workerGroupSpecs", 0, "template", "spec", "containers", 1), {"name": "theirs", "image": "theirs:1"}),
        (("workerGroupSpecs", 0, "template", "spec", "hostNetwork"), True),
        (("headGroupSpec", "template", "spec", "serviceAccountName"), "theirs"),
        (("workerGroupSpecs", 1), {"groupName": "theirs", "replicas": 9}),
    ],
)
def test_what_another_writer_adds_to_a_ray_service_is_removed(path: tuple[str | int, ...], value: Any):
    resource = make_resource()
    there = applied(plan(resource, EMPTY, CONTEXT), EMPTY, make_pod("1"), make_pod("2"))
    target = there.child(RAY_SERVICE, resource.metadata)["spec"]["rayClusterConfig"]
    for step in path[:-1]:
        target = target[step]
    if isinstance(target, list):
        target.append(value)
    else:
        target[path[-1]] = value

    done = plan(resource, there, CONTEXT)

    (restored,) = done.apply
    assert restored.is_repair
    assert "theirs" not in str(restored.patch or restored.manifest)
    assert Given(resource, there, done, UNPOLLED, 0.0).count("readyReplicas") == 2


def test_defaults_of_kuberay_are_no_additions():
    resource = make_resource()
    there = applied(plan(resource, EMPTY, CONTEXT), EMPTY, make_pod("1"), make_pod("2"))
    (group,) = there.child(RAY_SERVICE, resource.metadata)["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    group["numOfHosts"] = 1

    assert plan(resource, there, CONTEXT).because == ()


def test_ray_reports_nothing_that_nobody_reads_and_treats_replicas_as_kubernetes_treats_pods():
    done = plan(make_resource(), EMPTY, CONTEXT)

    head = spec_of(done)["rayClusterConfig"]["headGroupSpec"]
    for group in (head, group_of(done)):
        (container,) = group["template"]["spec"]["containers"]
        variables = {each["name"]: each.get("value") for each in container["env"]}
        assert group["rayStartParams"]["include-log-monitor"] == "false"
        assert (variables["RAY_USAGE_STATS_ENABLED"], variables["RAY_task_events_report_interval_ms"]) == ("0", "0")
        assert (variables["RAY_worker_niceness"], variables["RAY_memory_monitor_refresh_ms"]) == ("0", "0")


def test_a_variable_of_the_template_replaces_that_of_the_operator():
    variable = {"name": "RAY_USAGE_STATS_ENABLED", "value": "1"}
    done = plan(make_resource(template={"image": "ray:1", "env": [variable]}), EMPTY, CONTEXT)

    (container,) = group_of(done)["template"]["spec"]["containers"]
    assert [each for each in container["env"] if each["name"] == variable["name"]] == [variable]


def test_the_most_gpus_and_nodes_that_the_api_admits_make_a_configuration():
    done = plan(make_resource(ray={"nodes": 16}, gpu={"count": 16}), EMPTY, CONTEXT)

    (deployment,) = serve_of(done)["deployments"]
    config = WorkerConfig.parse(deployment["user_config"]["config"], "test")
    assert (config.runtime.tensor_parallel, config.runtime.nodes) == (256, 16)


PLACED = {
    "nodeSelector": {"pool": "a"},
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "imagePullSecrets": ["pull"],
    "tolerations": [{"key": "team", "operator": "Exists"}],
}


def head_pod(**spec: Any) -> Body:
    done = plan(make_resource(template={"image": "ray:1"} | PLACED, **spec), EMPTY, CONTEXT)
    return spec_of(done)["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]


def test_the_head_runs_beside_workers_without_gpus():
    head = head_pod(gpu={"count": 0})

    assert head["nodeSelector"] == {"pool": "a"}
    assert head["affinity"] == {"nodeAffinity": {}}


@pytest.mark.parametrize(("given", "selector"), [({}, None), ({"nodeSelector": {"pool": "cpu"}}, {"pool": "cpu"})])
def test_the_head_of_workers_with_gpus_does_not_follow_them_to_their_nodes(given: Body, selector: Body | None):
    head = head_pod(gpu={"count": 1, "resourceName": "amd.com/gpu"}, engine={"backend": "vllm"}, ray={"head": given})

    assert head.get("nodeSelector") == selector
    assert "affinity" not in head
    assert (head["priorityClassName"], head["imagePullSecrets"]) == ("high", [{"name": "pull"}])
    assert [each["key"] for each in head["tolerations"]][:1] == ["team"]
    assert "amd.com/gpu" not in [each["key"] for each in head["tolerations"]]


def test_no_child_of_a_resource_on_ray_takes_the_name_of_a_resource_that_ends_in_ray():
    names = [step.key.name for step in plan(make_resource(), EMPTY, CONTEXT).apply]

    assert "llm-ray" not in names
