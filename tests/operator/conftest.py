"""The operator as a real process, in front of a real API server with the real controllers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import reconciled
import yaml
from control_plane import ControlPlane, assets
from faults import Proxy, proxy
from operated import Cluster, Operator, running


@pytest.fixture(scope="session")
def controllers(plane: ControlPlane) -> ControlPlane:
    """The plane with the controllers that make pods and collect garbage."""
    if not (assets() / "kube-controller-manager").exists():
        pytest.skip("KUBEBUILDER_ASSETS holds no kube-controller-manager: see `make envtest`")
    plane.start_controller_manager()
    return plane


@pytest.fixture(scope="module")
def operator(controllers: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Operator]:
    """One operator for a module that leaves it alone; others start their own: either of two would claim a resource."""
    with running(controllers.kubeconfig, tmp_path_factory.mktemp("operator")) as found:
        yield found


@pytest.fixture
def cluster(controllers: ControlPlane, namespace: str) -> Cluster:
    """A namespace that no other test knows."""
    return Cluster(controllers, namespace)


@pytest.fixture
def between(controllers: ControlPlane) -> Iterator[Proxy]:
    """A proxy in front of the API server, which counts, delays and refuses calls."""
    with proxy(controllers) as found:
        yield found


@pytest.fixture
def unreachable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the operator find the configuration of a cluster that does not answer."""
    content = {
        "current-context": "here",
        "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": "http://127.0.0.1:9"}}],
        "users": [{"name": "me", "user": {"token": "t"}}],
    }
    (tmp_path / "config").write_text(yaml.safe_dump(content))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))


@pytest.fixture(autouse=True)
def unplannable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the operator fail to compute children from `UNPLANNABLE`. No spec that it reads makes it fail."""
    monkeypatch.setattr("ballast_operator.reconcile.plan", reconciled.plan)
