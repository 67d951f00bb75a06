"""What the operator may do, as least as it can be: the chart's roles are written from this, and a test compares it with
every call that the operator makes. PURE.
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

    def rule(self) -> Body:
        """As it stands in a Role."""
        return {"apiGroups": [self.group], "resources": list(self.resources), "verbs": list(self.verbs)}


READ = ("list", "watch")
KEEP = (*READ, "create", "patch")  # server-side apply creates, too

CLUSTER = (
    Permission("ballast.dev", ("inferencedeployments",), READ),
    Permission("ballast.dev", ("inferencedeployments/status", "inferencedeployments/scale"), ("patch",)),
    Permission("apps", ("deployments",), KEEP),
    Permission("", ("services", "configmaps"), KEEP),
    Permission("policy", ("poddisruptionbudgets",), KEEP),
    Permission("networking.k8s.io", ("networkpolicies",), (*KEEP, "delete")),
    Permission("monitoring.coreos.com", ("servicemonitors", "prometheusrules"), (*KEEP, "delete")),
    Permission("", ("pods",), (*READ, "patch")),
    # Never listed nor watched: single Secrets that resources name, and copies of the operator's own.
    Permission("", ("secrets",), ("get", "create", "patch")),
    Permission("", ("events",), ("create",)),
    Permission("apiextensions.k8s.io", ("customresourcedefinitions",), READ),
)
"""In every namespace: a ClusterRole."""
OWN_NAMESPACE = (Permission("coordination.k8s.io", ("leases",), ("get", "create", "update")),)
"""In the operator's namespace: a Role."""


def rules(permissions: tuple[Permission, ...]) -> list[Body]:
    """As they stand in a Role."""
    return [permission.rule() for permission in permissions]
