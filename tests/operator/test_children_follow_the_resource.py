"""`kubectl apply`, and it is right; somebody changes something, and it is right again."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from operated import Cluster, Operator, until

from ballast_api.worker_config import WorkerConfig

pytestmark = pytest.mark.envtest

CHILDREN = ("deployments", "services", "poddisruptionbudgets", "networkpolicies")


def config_of(cluster: Cluster, name: str = "llm") -> Any:
    """The configuration that new pods read."""
    args = pod_of(cluster, name)["containers"][0]["args"]
    data = cluster.get("configmaps", f"{name}-ballast-config")["data"]
    text = data[args[1].rpartition("/")[2]]
    return WorkerConfig.parse(text, name).model_dump(mode="json", by_alias=True)


def pod_of(cluster: Cluster, name: str = "llm") -> Any:
    return cluster.get("deployments", name)["spec"]["template"]["spec"]


def made(cluster: Cluster, name: str = "llm") -> None:
    until(lambda: all(cluster.get(kind, name) for kind in CHILDREN), said=f"children of {name}")


def test_a_resource_gets_all_its_children(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    made(cluster)

    assert config_of(cluster)["model"]["uri"] == "file:///models/tiny"
    owners = [cluster.get(kind, "llm")["metadata"]["ownerReferences"][0]["kind"] for kind in CHILDREN]
    assert owners == ["InferenceDeployment"] * 4
    assert cluster.get("services", "llm")["spec"]["ports"][0]["port"] == 8000


def test_what_somebody_changes_or_deletes_is_restored(operator: Operator, cluster: Cluster) -> None:
    cluster.make(replicas=2)
    made(cluster)
    cluster.patch("deployments", "llm", {"spec": {"replicas": 9}})
    cluster.patch("services", "llm", {"spec": {"ports": [{"name": "http", "port": 9, "targetPort": "http"}]}})
    cluster.delete("poddisruptionbudgets", "llm")
    cluster.delete("configmaps", "llm-ballast-config")

    until(lambda: cluster.get("deployments", "llm")["spec"]["replicas"] == 2)
    until(lambda: cluster.get("services", "llm")["spec"]["ports"][0]["port"] == 8000)
    until(lambda: cluster.get("poddisruptionbudgets", "llm"))
    until(lambda: cluster.get("configmaps", "llm-ballast-config"))


def test_fields_that_others_add_are_left_alone(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    made(cluster)
    cluster.patch("deployments", "llm", {"metadata": {"annotations": {"team": "blue"}}})
    cluster.patch("inferencedeployments", "llm", {"spec": {"replicas": 2}})
    until(lambda: cluster.get("deployments", "llm")["spec"]["replicas"] == 2)

    assert cluster.get("deployments", "llm")["metadata"]["annotations"]["team"] == "blue"


def test_a_service_of_somebody_else_is_not_taken(operator: Operator, cluster: Cluster) -> None:
    spec = {"ports": [{"port": 80}], "selector": {"app": "theirs"}}
    cluster.create("services", {"metadata": {"name": "llm"}, "spec": spec})
    cluster.make()

    assert "Ballast does not own it" in cluster.says("Degraded", "True", "NameTaken")["message"]
    assert cluster.get("services", "llm")["spec"]["selector"] == {"app": "theirs"}


def test_what_no_pod_can_have_is_told_in_the_api_servers_words(operator: Operator, cluster: Cluster) -> None:
    cluster.make(template={"volumes": [{"name": "x", "emptyDir": {"sizeLimits": "1Gi"}}]})

    assert "sizeLimits" in cluster.says("Degraded", "True", "InvalidPod")["message"]
    cluster.patch("inferencedeployments", "llm", {"spec": {"template": {"volumes": []}}})
    cluster.says("Degraded", "False")


def test_deletion_leaves_nothing_behind(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    made(cluster)
    until(cluster.pods)
    cluster.delete("inferencedeployments", "llm")

    kinds = ("inferencedeployments", *CHILDREN, "pods")
    until(lambda: not [kind for kind in kinds if cluster.names(kind)], said="nothing is left")
    assert "llm-ballast-config" not in cluster.names("configmaps")


def test_a_resource_made_again_under_its_name_gets_children_of_its_own(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    made(cluster)
    cluster.delete("inferencedeployments", "llm")
    uid = cluster.make(slots=3)["metadata"]["uid"]

    until(lambda: _owner(cluster) == uid and config_of(cluster).get("slots") == 3)


def _owner(cluster: Cluster) -> str:
    found = cluster.get("deployments", "llm")
    return found["metadata"]["ownerReferences"][-1]["uid"] if found else ""


def test_kubectl_scale_and_wait_work(operator: Operator, cluster: Cluster) -> None:
    cluster.make()
    cluster.plane.kubectl("scale", "-n", cluster.namespace, "infd/llm", "--replicas=2")
    until(lambda: len(cluster.pods()) == 2)
    for number, pod in enumerate(cluster.pods()):
        cluster.make_ready(pod["metadata"]["name"], f"10.0.0.{number + 1}")

    cluster.plane.kubectl("wait", "-n", cluster.namespace, "infd/llm", "--for=condition=Ready", "--timeout=20s")
    scale = cluster.request("GET", cluster.path("inferencedeployments", "llm") + "/scale")
    assert scale["status"]["selector"] == "app.kubernetes.io/name=ballast-worker,app.kubernetes.io/instance=llm"


def test_probes_and_metrics_answer(operator: Operator, cluster: Cluster) -> None:
    cluster.make(replicas=2)
    made(cluster)
    address = f"http://127.0.0.1:{operator.port}"
    labels = f'kind="InferenceDeployment",name="llm",resource_namespace="{cluster.namespace}",state="desired"'
    series = f"ballast_operator_replicas{{{labels}}}"

    assert httpx.get(f"{address}/healthz").status_code == httpx.get(f"{address}/readyz").status_code == 200
    until(lambda: operator.metrics().get(series) == 2)
    assert operator.metrics()["ballast_operator_active"] == 1
