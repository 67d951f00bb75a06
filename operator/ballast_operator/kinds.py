"""The kinds that the operator reads and writes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Body = dict[str, Any]
"""A Kubernetes object as JSON."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of namespaced object."""

    name: str
    group: str
    version: str
    plural: str
    is_optional: bool = False
    """Its CRD may be missing; the operator does without."""

    @property
    def api_version(self) -> str:
        """`apps/v1`, or `v1` for the core group."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None = None, name: str | None = None, subresource: str | None = None) -> str:
        """The path of a collection, an object or a subresource."""
        path = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        if namespace is not None:
            path += f"/namespaces/{namespace}"
        path += f"/{self.plural}"
        if name is not None:
            path += f"/{name}"
        return f"{path}/{subresource}" if subresource else path


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """Names one InferenceDeployment, or any namespaced object of a known kind."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


INFERENCE_DEPLOYMENT = Kind("InferenceDeployment", "ballast.dev", "v1alpha1", "inferencedeployments")
DEPLOYMENT = Kind("Deployment", "apps", "v1", "deployments")
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

CHILDREN = (CONFIG_MAP, NETWORK_POLICY, SERVICE, BUDGET, DEPLOYMENT, SERVICE_MONITOR, RULE)
"""In the order in which they are applied: what a pod needs at its start stands before the Deployment."""
WATCHED = (INFERENCE_DEPLOYMENT, *CHILDREN, POD)


def key_of(body: Body) -> Key:
    """The namespace and name of an object."""
    return Key(body["metadata"]["namespace"], body["metadata"]["name"])
