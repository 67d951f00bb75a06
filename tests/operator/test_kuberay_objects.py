"""Objects that KubeRay makes for a resource, and those of other owners that have their names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from operated import Cluster, Operator, installed, optional_kinds, running, until

from ballast_api.names import MANAGED_BY_LABEL, OPERATOR, RAY_HEAD_LABEL, RAY_LABEL, selector

pytestmark = pytest.mark.envtest


@pytest.fixture
def operator(controllers: ControlPlane, cluster: Cluster, tmp_path: Path) -> Iterator[Operator]:
    """An operator in a cluster with the kinds of KubeRay."""
    kinds = [kind for kind in optional_kinds() if kind["spec"]["group"] == "ray.io"]
    gcs = {"BALLAST_GCS_REDIS_IMAGE": "valkey:1", "BALLAST_GCS_REDIS_STORAGE": "1Gi"}
    with installed(controllers, kinds), running(controllers.kubeconfig, tmp_path, **gcs) as found:
        yield found


def make(cluster: Cluster, **spec: Any) -> None:
    cluster.make(runtime={"ray": {}}, template={"image": "ray:1"}, **spec)


def make_service(cluster: Cluster, name: str, owners: list[Any] | None = None) -> Any:
    spec = {"selector": {"app": "theirs"}, "ports": [{"port": 80}]}
    return cluster.create("services", {"metadata": {"name": name, "ownerReferences": owners or []}, "spec": spec})


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("service", ["llm-head-svc", "llm-serve-svc"])
def test_no_ray_service_is_made_while_another_owner_has_a_service_of_kuberay(cluster: Cluster, service: str) -> None:
    make_service(cluster, service)
    make(cluster)

    assert service in cluster.says("Degraded", "True", "NameTaken")["message"]
    assert not cluster.get("rayservices", "llm")
    cluster.delete("services", service)
    until(lambda: cluster.get("rayservices", "llm"), said="made when the name is free")


@pytest.mark.usefixtures("operator")
def test_the_services_that_kuberay_made_for_a_resource_are_its_own(cluster: Cluster) -> None:
    make(cluster)
    made = until(lambda: cluster.get("rayservices", "llm"))
    owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": "llm", "uid": made["metadata"]["uid"]}
    make_service(cluster, "llm-head-svc", [owner])
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})

    until(lambda: cluster.get("rayservices", "llm")["metadata"]["generation"] > 1, said="the RayService changed")


@pytest.mark.usefixtures("operator")
@pytest.mark.parametrize("is_own", [True, False])
def test_only_the_ray_cluster_of_the_resource_is_resized(cluster: Cluster, is_own: bool) -> None:
    make(cluster, replicas=2)
    made = until(lambda: cluster.get("rayservices", "llm"))
    owner = {"apiVersion": "ray.io/v1", "kind": "RayService", "name": "llm", "uid": made["metadata"]["uid"]}
    if not is_own:
        (owner,) = made["metadata"]["ownerReferences"]
    cluster.make_ray_cluster(owner, replicas=1)
    active = {"rayClusterName": "llm-1", "rayClusterStatus": {"desiredWorkerReplicas": 1}}
    cluster.patch("rayservices", "llm", {"status": {"activeServiceStatus": active}})

    def replicas() -> int:
        return int(cluster.get("rayclusters", "llm-1")["spec"]["workerGroupSpecs"][0]["replicas"])

    def events() -> list[str]:
        return [event["message"] for event in cluster.list("events") if event["reason"] == "Applied"]

    if is_own:
        until(lambda: replicas() == 2, said="the RayCluster has another size")
        before = until(lambda: [event for event in events() if "llm-1" in event] and events())
        cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})  # KubeRay still reports one pod
        until(lambda: len(events()) > len(before), said="the next write")
        assert [event for event in events() if "llm-1" in event] == ["Changed the Ray cluster llm-1 to 2 worker pods"]
    else:
        assert "llm-1" in cluster.says("Degraded", "True", "NotApplied")["message"]
        assert replicas() == 1


def test_the_redis_of_the_head_has_a_password_that_stays(
    operator: Operator, cluster: Cluster, controllers: ControlPlane, tmp_path: Path
) -> None:
    def password() -> str:
        return str((cluster.get("secrets", "llm-ballast-gcs") or {"data": {}})["data"].get("password", ""))

    make(cluster)
    first = until(password)
    until(lambda: cluster.get("rayservices", "llm"))
    made = cluster.get("statefulsets", "llm-ballast-gcs")
    operator.kill()
    operator.start()
    cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
    until(lambda: cluster.get("rayservices", "llm")["metadata"]["generation"] > 1, said="the new process works")

    assert len(first) > 40
    assert password() == first
    assert cluster.get("statefulsets", "llm-ballast-gcs")["metadata"]["generation"] == made["metadata"]["generation"]
    assert "the cluster changes applied fields" not in operator.text()


def test_another_size_of_the_volume_of_the_heads_redis_is_for_new_resources(
    operator: Operator, cluster: Cluster
) -> None:
    """The API server refuses a change of a claim."""

    def sizes(name: str) -> list[str]:
        claims = cluster.get("statefulsets", f"{name}-ballast-gcs")["spec"].get("volumeClaimTemplates", ())
        return [claim["spec"]["resources"]["requests"]["storage"] for claim in claims]

    make(cluster)
    until(lambda: cluster.get("rayservices", "llm"))
    operator.kill()
    operator.environment |= {"BALLAST_GCS_REDIS_IMAGE": "valkey:2", "BALLAST_GCS_REDIS_STORAGE": "1536Mi"}
    operator.start()
    until(lambda: "valkey:2" in str(cluster.get("statefulsets", "llm-ballast-gcs")), said="the new image")
    cluster.make("later", runtime={"ray": {}}, template={"image": "ray:1"})
    until(lambda: cluster.get("rayservices", "later"))

    assert (sizes("llm"), sizes("later")) == (["1Gi"], ["1536Mi"])
    cluster.says("Degraded", "False", "Healthy")


@pytest.mark.usefixtures("operator")
def test_a_password_of_another_owner_is_not_used(cluster: Cluster) -> None:
    cluster.create("secrets", {"metadata": {"name": "llm-ballast-gcs"}, "stringData": {"password": "theirs"}})
    make(cluster)

    assert "llm-ballast-gcs" in cluster.says("Degraded", "True", "NameTaken")["message"]
    assert not cluster.get("statefulsets", "llm-ballast-gcs")
    assert not cluster.get("rayservices", "llm")


def make_pod(cluster: Cluster, name: str, **labels: str) -> None:
    labels |= {MANAGED_BY_LABEL: OPERATOR, "ray.io/cluster": "llm-1"}
    container = {"name": "worker", "image": "ray:1"}
    cluster.create("pods", {"metadata": {"name": name, "labels": labels}, "spec": {"containers": [container]}})
    cluster.make_ready(name)


def test_a_head_that_goes_while_workers_serve_is_reported_and_exported(operator: Operator, cluster: Cluster) -> None:
    make(cluster)
    until(lambda: cluster.get("rayservices", "llm"))
    make_pod(cluster, "head", **{RAY_HEAD_LABEL: "llm"})
    make_pod(cluster, "worker", **selector("llm"), **{RAY_LABEL: "llm"})
    active = {"rayClusterName": "llm-1", "rayClusterStatus": {"desiredWorkerReplicas": 1}}
    cluster.patch("rayservices", "llm", {"status": {"activeServiceStatus": active}})
    cluster.says("Degraded", "True", "RayStorageDown")
    until(lambda: cluster.get("pods", "llm-ballast-gcs-0"))
    cluster.make_ready("llm-ballast-gcs-0")
    cluster.says("Degraded", "False", "Healthy")

    cluster.delete("pods", "head")
    cluster.says("Degraded", "True", "RayHeadDown")
    labels = f'kind="InferenceDeployment",name="llm",part="{{}}",resource_namespace="{cluster.namespace}"'
    head, storage = (f"ballast_operator_ray_ready{{{labels.format(part)}}}" for part in ("head", "storage"))
    until(lambda: operator.metrics().get(head) == 0)
    assert operator.metrics()[storage] == 1
