"""The operator is never blind: it watches again when its kind exists, and is unready meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from control_plane import ControlPlane, control_plane
from faults import Answer, Call, proxy
from operated import Cluster, Operator, running, until

pytestmark = pytest.mark.envtest

CRD = Path(__file__).parent.parent.parent / "crds" / "ballast.dev_inferencedeployments.yaml"
NAME = "inferencedeployments.ballast.dev"


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A plane whose CRD may be deleted."""
    with control_plane(tmp_path_factory.mktemp("own-plane")) as plane:
        yield plane


def install(plane: ControlPlane) -> None:
    plane.kubectl("apply", "--server-side", "-f", str(CRD))
    plane.kubectl("wait", "--for=condition=Established", "crd", NAME, "--timeout=30s")


def remove(plane: ControlPlane) -> None:
    plane.kubectl("delete", "crd", NAME, "--ignore-not-found", "--wait")


def probe(operator: Operator, path: str) -> int:
    return httpx.get(f"http://127.0.0.1:{operator.port}/{path}").status_code


def make(plane: ControlPlane, namespace: str) -> Cluster:
    plane.kubectl("create", "namespace", namespace)
    cluster = Cluster(plane, namespace)
    until(lambda: plane.http.get(cluster.path("inferencedeployments")).is_success, said="the kind is served")
    cluster.make()
    return cluster


def test_a_crd_that_is_installed_later_is_watched_then(own: ControlPlane, tmp_path: Path) -> None:
    remove(own)
    with running(own.kubeconfig, tmp_path) as operator:
        until(lambda: probe(operator, "readyz") == 503, said="unready without its kind")
        assert probe(operator, "healthz") == 200
        install(own)
        cluster = make(own, "later")

        until(lambda: cluster.get("deployments", "llm"), said="reconciled")
        until(lambda: probe(operator, "readyz") == 200, said="ready")


@pytest.mark.parametrize("when", ["at once", "after a while"])
def test_a_crd_that_is_deleted_and_restored_is_watched_again(own: ControlPlane, tmp_path: Path, when: str) -> None:
    install(own)
    namespace = when.replace(" ", "-")
    with running(own.kubeconfig, tmp_path) as operator:
        cluster = make(own, namespace)
        until(lambda: cluster.get("deployments", "llm"))
        until(lambda: probe(operator, "readyz") == 200)
        remove(own)
        if when == "after a while":
            until(lambda: probe(operator, "readyz") == 503, said="unready")
        install(own)
        again = make(own, f"{namespace}-again")

        until(lambda: again.get("deployments", "llm"), said="reconciled again")
        until(lambda: probe(operator, "readyz") == 200, said="ready again")
        again.patch("inferencedeployments", "llm", {"spec": {"replicas": 3}})
        until(lambda: again.get("deployments", "llm")["spec"]["replicas"] == 3, said="changes are seen")
        assert operator.is_running


def test_a_discovery_that_is_late_is_asked_again(own: ControlPlane, tmp_path: Path) -> None:
    """The API server lists a kind a moment after its CRD is established, and no event follows."""
    remove(own)
    hidden = True

    def hide(call: Call) -> Answer | None:
        return (404, {}) if hidden and call.path == "/apis/ballast.dev/v1alpha1" else None

    with proxy(own) as between, running(between.kubeconfig, tmp_path) as operator:
        between.before = hide
        install(own)
        cluster = make(own, "hidden")
        until(lambda: sum(call.path == "/apis/ballast.dev/v1alpha1" for call in between.calls) >= 4, said="discovery")
        assert probe(operator, "readyz") == 503
        hidden = False

        until(lambda: cluster.get("deployments", "llm"), said="reconciled")


def test_a_replica_on_standby_is_ready(own: ControlPlane, tmp_path: Path) -> None:
    remove(own)
    with running(own.kubeconfig, tmp_path) as active:
        standby = Operator(own.kubeconfig, tmp_path, lease=active.lease)
        standby.start(active=False)
        try:
            until(lambda: probe(active, "readyz") == 503)
            assert probe(standby, "readyz") == 200
        finally:
            standby.kill()
