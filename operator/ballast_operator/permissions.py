"""The permissions that the operator needs, and no others. PURE.

The chart's roles are generated from this list. A test compares the list with every call that the operator makes.
"""

from __future__ import annotations

from dataclasses import dataclass

from ballast_operator.kinds import Body


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on resources of one group."""

    group: str
    resources: tuple[str, ...]
    verbs: tuple[str, ...]


READ = ("list", "watch")
KEEP = (*READ, "create", "patch")  # server-side apply needs `create` as well

NAMESPACES = (
    Permission("ballast.dev", ("inferencedeployments",), READ),
    Permission("ballast.dev", ("inferencedeployments/status", "inferencedeployments/scale"), ("patch",)),
    Permission("apps", ("deployments", "statefulsets"), (*KEEP, "delete")),
    Permission("ray.io", ("rayservices",), (*KEEP, "delete")),
    Permission("ray.io", ("rayclusters",), ("get", "patch")),
    Permission("", ("services", "configmaps"), KEEP),
    Permission("policy", ("poddisruptionbudgets",), KEEP),
    Permission("networking.k8s.io", ("networkpolicies",), (*KEEP, "delete")),
    Permission("monitoring.coreos.com", ("servicemonitors", "prometheusrules"), (*KEEP, "delete")),
    Permission("", ("pods",), (*READ, "patch")),
    # Secrets are never listed or watched: the operator reads those that resources name, and writes copies of its own.
    Permission("", ("secrets",), ("get", "create", "patch")),
    Permission("", ("events",), ("create",)),
    # The Lease of another release shows whether this release is gone.
    Permission("coordination.k8s.io", ("leases",), ("get",)),
)
"""Permissions in each namespace that the operator watches: a Role, or a part of the ClusterRole for all namespaces."""
CLUSTER = (*NAMESPACES, Permission("apiextensions.k8s.io", ("customresourcedefinitions",), READ))
"""Permissions of an operator that watches all namespaces: a ClusterRole."""
OWN_NAMESPACE = (Permission("coordination.k8s.io", ("leases",), ("get", "create", "update")),)
"""Permissions in the operator's namespace: a Role."""


def rules(permissions: tuple[Permission, ...]) -> list[Body]:
    """Return the rules of a Role."""
    return [
        {"apiGroups": [each.group], "resources": list(each.resources), "verbs": list(each.verbs)}
        for each in permissions
    ]
