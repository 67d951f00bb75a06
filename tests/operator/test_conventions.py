"""What others find by convention: kubectl's columns, labels for routers, the scale subresource, events, metrics."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from documented_scaling import documented
from operated import Cluster, Operator, report, until

from ballast_queue.redis_store import Queue

pytestmark = pytest.mark.envtest


def one_ready(cluster: Cluster, ip: str = "10.8.0.1") -> str:
    name = str(until(cluster.pods)[0]["metadata"]["name"])
    cluster.make_ready(name, ip)
    return name


def test_kubectl_shows_readiness_replicas_model_slots_and_age(
    operator: Operator, cluster: Cluster, valkey: Any
) -> None:
    cluster.secret("redis", url=valkey.url)
    cluster.make(redis={"secretName": "redis"})
    one_ready(cluster)
    report(Queue.connect(valkey.url, f"{cluster.namespace}/llm"), "10.8.0.1")
    cluster.plane.kubectl("wait", "-n", cluster.namespace, "infd/llm", "--for=condition=Ready", "--timeout=20s")

    head, row = cluster.plane.kubectl("get", "infd", "-n", cluster.namespace).stdout.splitlines()

    assert head.split() == ["NAME", "READY", "REPLICAS", "MODEL", "ONLINE", "OFFLINE", "AGE"]
    assert row.split()[:-1] == ["llm", "True", "1/1", "file:///models/tiny", "7", "1"]


def test_pods_carry_the_labels_and_the_port_that_an_inference_pool_selects_by(
    operator: Operator, cluster: Cluster
) -> None:
    cluster.make(model={"uri": "hf://Qwen/Qwen3-8B"})
    pod = until(cluster.pods)[0]
    found = {name: value for name, value in pod["metadata"]["labels"].items() if name != "pod-template-hash"}

    assert found == {
        "app.kubernetes.io/name": "ballast-worker",
        "app.kubernetes.io/instance": "llm",
        "app.kubernetes.io/component": "worker",
        "app.kubernetes.io/part-of": "ballast",
        "app.kubernetes.io/managed-by": "ballast-operator",
        "llm-d.ai/inference-serving": "true",
        "llm-d.ai/role": "both",
        "llm-d.ai/model": "Qwen3-8B",
        "llm-d.ai/engine-type": "vllm",
    }
    assert [port["containerPort"] for port in pod["spec"]["containers"][0]["ports"]] == [8000]


def test_an_autoscaler_of_kubernetes_sets_the_replicas_and_is_respected(operator: Operator, cluster: Cluster) -> None:
    """The real controller, which asks no metrics for its lower bound; KEDA makes such an autoscaler."""
    cluster.make()
    until(cluster.pods)
    autoscaler = documented("kind", "HorizontalPodAutoscaler")
    autoscaler["spec"]["scaleTargetRef"]["name"] = "llm"
    least = autoscaler["spec"]["minReplicas"]
    cluster.plane.kubectl("apply", "-n", cluster.namespace, "-f", "-", manifest=yaml.safe_dump(autoscaler))

    until(lambda: cluster.resource()["spec"]["replicas"] == least)
    until(lambda: len(cluster.pods()) == least)
    cluster.patch("inferencedeployments", "llm", {"spec": {"disruption": {"maxUnavailable": 2}}})
    until(lambda: cluster.get("poddisruptionbudgets", "llm")["spec"]["maxUnavailable"] == 2)
    assert cluster.get("deployments", "llm")["spec"]["replicas"] == cluster.resource()["spec"]["replicas"] == least


def events(cluster: Cluster) -> dict[str, tuple[str, str]]:
    """Type and message of the events about the resource, by their reason."""
    found = (each for each in cluster.list("events") if each["involvedObject"]["kind"] == "InferenceDeployment")
    return {each["reason"]: (each["type"], each["message"]) for each in found}


def test_events_tell_what_was_made_what_changed_and_what_went_wrong(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    name = one_ready(cluster)
    kind, said = until(lambda: events(cluster).get("Applied"))
    assert kind == "Normal"
    assert {f"Created {each} llm" for each in ("Deployment", "Service", "PodDisruptionBudget")} <= {*said.split("; ")}
    assert until(lambda: events(cluster).get("Serving")) == ("Normal", "Ready is True: 1 of 1 workers are ready")

    waiting = {"reason": "ErrImagePull", "message": "manifest unknown"}
    container = {"name": "worker", "image": "worker:1", "imageID": "", "ready": False, "restartCount": 0}
    cluster.set_pod(name, containerStatuses=[container | {"state": {"waiting": waiting}}])

    kind, said = until(lambda: events(cluster).get("ImagePull"))
    assert (kind, "manifest unknown" in said) == ("Warning", True)


def test_metrics_count_reconciliations_phases_and_waiting_resources(operator: Operator, cluster: Cluster) -> None:
    before = operator.metrics()["ballast_operator_reconcile_seconds_count"]
    cluster.make()
    until(cluster.pods)
    number = len(cluster.plane.kubectl("get", "infd", "-A", "-o", "name").stdout.split())  # of other tests as well

    until(lambda: counted(operator) >= number)
    assert operator.metrics()["ballast_operator_reconcile_seconds_count"] > before
    assert operator.metrics()["ballast_operator_queue_length"] >= 0  # others may still wait
    one_ready(cluster)
    until(lambda: operator.metrics().get('ballast_operator_resources{kind="InferenceDeployment",phase="Ready"}', 0) > 0)


def counted(operator: Operator) -> float:
    """Resources that the operator counts, whatever their phase."""
    found = operator.metrics()
    return sum(value for name, value in found.items() if name.startswith("ballast_operator_resources{"))
