"""Every field is changed under a running operator, and what it makes of that is taken by the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from control_plane import ControlPlane
from every_field import BY_OWN_REDIS, BY_RAY, BY_SCALING, REFUSED, SPEC, changed, everything
from operated import Cluster, installed, optional_kinds, running, until

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import config_map
from ballast_api.structural import leaves
from ballast_operator.context import OperatorContext
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import CHILDREN, CONFIG_MAP, key_of
from ballast_operator.plan import ClusterSnapshot

pytestmark = pytest.mark.envtest

ANYTHING = {
    "BALLAST_REQUIRE_SECRET_LABEL": "false",
    "BALLAST_ALLOWED_SERVICE_ACCOUNTS": "*",
    "BALLAST_ALLOWED_HOST_PATHS": "/",
    "BALLAST_ALLOWED_CACHE_PATHS": "/var/cache/ballast,/var/cache/ballastx",
}
CONTEXT = OperatorContext(image="worker:1", kinds=frozenset({"ServiceMonitor", "PrometheusRule"}))


@pytest.fixture
def monitored(controllers: ControlPlane) -> Iterator[ControlPlane]:
    """With the prometheus-operator's kinds, for this test alone."""
    with installed(controllers, optional_kinds()):
        yield controllers


def missing(cluster: Cluster) -> tuple[str, ...]:
    """What is left to write, by what the resource says now and what stands in the cluster."""
    resource = InferenceDeployment.read(cluster.resource(), "the cluster")
    children = {}
    for kind in CHILDREN:
        found = cluster.get(kind.plural, config_map("llm") if kind is CONFIG_MAP else "llm")
        if found is not None:
            children[key_of(kind, found)] = found
    return plan(resource, ClusterSnapshot(resource.metadata.uid, children), CONTEXT).because


@pytest.mark.slow
def test_each_field_reaches_its_child(monitored: ControlPlane, cluster: Cluster, tmp_path: Path) -> None:
    """`scaling` decides on replicas, which the operator writes into the resource itself."""
    spec: dict[str, Any] = everything() | {"replicas": 0}
    del spec["scaling"]
    with running(monitored.kubeconfig, tmp_path, **ANYTHING):
        cluster.make(**spec)
        for leaf in sorted(set(leaves(SPEC)) - set(REFUSED) - BY_SCALING - BY_OWN_REDIS - BY_RAY):
            _, after = changed(spec, leaf, SPEC)
            change = [{"op": "replace", "path": "/spec", "value": after}]
            headers = {"Content-Type": "application/json-patch+json"}
            cluster.request("PATCH", cluster.path("inferencedeployments", "llm"), json=change, headers=headers)

            until(lambda: not missing(cluster), said=leaf)
        assert cluster.condition("Degraded")["reason"] not in {"InvalidPod", "NameTaken", "InvalidSpec"}
