"""The kinds of objects that the operator reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True, slots=True, order=True)
class Kind:
    """One kind of namespaced object."""

    name: str
    group: str
    version: str
    plural: str
    is_optional: bool = False
    """The cluster may lack its CRD. The operator then works without this kind."""

    @property
    def api_version(self) -> str:
        """Return `apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the path of a collection, an object or a subresource."""
        path = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace is not None:
            path += f"/namespaces/{namespace}"
        path += f"/{self.plural}"
        if name is not None:
            path += f"/{name}"
        return f"{path}/{subresource}" if subresource else path


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """The identity of one object: its kind, namespace and name."""

    kind: Kind
    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind.name} {self.namespace}/{self.name}"

    def path(self, subresource: str | None = None) -> str:
        """Return the path of the object or of its subresource."""
        return self.kind.path(self.namespace, self.name, subresource)


INFERENCE_DEPLOYMENT = Kind("InferenceDeployment", "ballast.dev", "v1alpha1", "inferencedeployments")
CRD = Kind("CustomResourceDefinition", "apiextensions.k8s.io", "v1", "customresourcedefinitions")
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
STATEFUL_SET = Kind("StatefulSet", "apps", "v1", "statefulsets")
SERVICE = Kind("Service", "", "v1", "services")
CONFIG_MAP = Kind("ConfigMap", "", "v1", "configmaps")
SECRET = Kind("Secret", "", "v1", "secrets")
POD = Kind("Pod", "", "v1", "pods")
EVENT = Kind("Event", "", "v1", "events")
BUDGET = Kind("PodDisruptionBudget", "policy", "v1", "poddisruptionbudgets")
NETWORK_POLICY = Kind("NetworkPolicy", "networking.k8s.io", "v1", "networkpolicies")
LEASE = Kind("Lease", "coordination.k8s.io", "v1", "leases")
SERVICE_MONITOR = Kind("ServiceMonitor", "monitoring.coreos.com", "v1", "servicemonitors", is_optional=True)
RULE = Kind("PrometheusRule", "monitoring.coreos.com", "v1", "prometheusrules", is_optional=True)

RAY_CLUSTER = Kind("RayCluster", "ray.io", "v1", "rayclusters", is_optional=True)
RAY_SERVICE = Kind("RayService", "ray.io", "v1", "rayservices", is_optional=True)

CHILDREN = (CONFIG_MAP, NETWORK_POLICY, SERVICE, BUDGET, DEPLOYMENT, STATEFUL_SET, RAY_SERVICE, SERVICE_MONITOR, RULE)
"""The children of a resource in the order of application: the Deployment follows the objects that a pod needs."""
WATCHED = (INFERENCE_DEPLOYMENT, *CHILDREN, POD)


def key_of(kind: Kind, body: Body) -> Key:
    """Return the key of an object of this kind."""
    return Key(kind, body["metadata"]["namespace"], body["metadata"]["name"])
