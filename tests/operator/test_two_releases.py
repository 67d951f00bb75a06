"""Two releases of the chart in one cluster: one reconciles a resource, and the other writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from faults import proxy
from operated import Cluster, Operator, running, until

pytestmark = pytest.mark.envtest

GAUGE = 'ballast_operator_foreign_resources{kind="InferenceDeployment"}'


def release_of(cluster: Cluster, name: str = "llm") -> str:
    return str((cluster.resource(name).get("status") or {}).get("operator", ""))


def image_of(cluster: Cluster, name: str = "llm") -> str:
    found = cluster.get("deployments", name)
    return str(found["spec"]["template"]["spec"]["containers"][0]["image"]) if found else ""


def lease(operator: Operator) -> str:
    return f"default/{operator.lease}"


def test_the_other_release_writes_nothing_and_reports_it(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    with (
        proxy(controllers) as between,
        running(controllers.kubeconfig, tmp_path) as first,
    ):
        cluster.make()
        cluster.says("Degraded", "False")
        with running(between.kubeconfig, tmp_path, BALLAST_WORKER_IMAGE="worker:2") as second:
            until(lambda: second.metrics()[GAUGE] >= 1, said="the metric")
            cluster.patch("inferencedeployments", "llm", {"spec": {"slots": 3}})
            until(lambda: cluster.get("deployments", "llm")["metadata"]["generation"] == 2, said="the first goes on")
            until(lambda: release_of(cluster) == lease(first))
            own = [call for call in between.writes if cluster.namespace in call.path]

            assert own == []
            assert f"release={lease(first)}" in second.text().replace('"', "")
            assert first.metrics()[GAUGE] == 0
            assert image_of(cluster) == "worker:1"


def test_two_releases_that_see_a_new_resource_at_once_never_both_write_its_children(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    with (
        proxy(controllers) as one,
        proxy(controllers) as other,
        running(one.kubeconfig, tmp_path) as first,
        running(other.kubeconfig, tmp_path) as second,
    ):
        for number in range(10):
            cluster.make(f"llm-{number}")
        for number in range(10):
            cluster.says("Degraded", "False", name=f"llm-{number}")
        for number in range(10):
            kept = release_of(cluster, f"llm-{number}")
            writers = [
                lease(operator)
                for operator, between in ((first, one), (second, other))
                if any(cluster.path("deployments", f"llm-{number}") == call.path for call in between.writes)
            ]

            assert writers == [kept]


@pytest.mark.parametrize("gone", [True, False])
def test_a_resource_is_claimed_only_if_its_release_is_gone(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path, gone: bool
) -> None:
    plane: Any = controllers
    with running(plane.kubeconfig, tmp_path, keeps_lease=not gone):
        cluster.make()
        cluster.says("Degraded", "False")
    with running(plane.kubeconfig, tmp_path, BALLAST_WORKER_IMAGE="worker:2") as second:
        if gone:
            until(lambda: image_of(cluster) == "worker:2")
            assert release_of(cluster) == lease(second)
        else:
            until(lambda: second.metrics()[GAUGE] >= 1)
            assert image_of(cluster) == "worker:1"


def test_a_resource_can_be_handed_over(controllers: ControlPlane, cluster: Cluster, tmp_path: Path) -> None:
    with running(controllers.kubeconfig, tmp_path, keeps_lease=True) as first:
        cluster.make()
        cluster.says("Degraded", "False")
    with running(controllers.kubeconfig, tmp_path) as second:
        until(lambda: second.metrics()[GAUGE] >= 1)
        assert release_of(cluster) == lease(first)
        cluster.patch("inferencedeployments", "llm", {"status": {"operator": None}}, "status")

        until(lambda: release_of(cluster) == lease(second))


def test_a_release_keeps_its_resources_when_its_name_in_redis_changes(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    with running(controllers.kubeconfig, tmp_path, keeps_lease=True, BALLAST_RELEASE="") as first:
        cluster.make()
        cluster.says("Degraded", "False")
        assert first.stop() == 0
    changed = {"BALLAST_LEASE_NAME": first.lease, "BALLAST_RELEASE": "east", "BALLAST_WORKER_IMAGE": "worker:2"}
    with running(controllers.kubeconfig, tmp_path, **changed):
        until(lambda: image_of(cluster) == "worker:2")

        assert release_of(cluster) == lease(first)


def test_a_release_claims_no_resource_of_a_name_that_is_no_lease(
    controllers: ControlPlane, cluster: Cluster, tmp_path: Path
) -> None:
    cluster.make()
    cluster.patch("inferencedeployments", "llm", {"status": {"operator": "east"}}, "status")
    with running(controllers.kubeconfig, tmp_path, BALLAST_RELEASE="east") as other:
        until(lambda: other.metrics()[GAUGE] >= 1)

        assert "cannot know whether another release is gone" in other.text()
        assert release_of(cluster) == "east"
