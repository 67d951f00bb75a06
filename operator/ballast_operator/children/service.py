"""Service, PodDisruptionBudget and NetworkPolicy of the workers. PURE."""

from __future__ import annotations

from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT, HTTP_PORT_NAME, METRICS_PORT, METRICS_PORT_NAME, selector
from ballast_operator.children.manifest import manifest
from ballast_operator.kinds import BUDGET, NETWORK_POLICY, SERVICE, Body


def service(resource: InferenceDeployment) -> Body:
    """Return the Service of all ready workers."""
    names = {HTTP_PORT_NAME: HTTP_PORT}
    if resource.spec.network.metrics_from:
        names[METRICS_PORT_NAME] = METRICS_PORT
    # A mesh takes the protocol from the name of a port, unless the port states it.
    protocol = "http" if resource.spec.network.tls_secret is None else "https"
    ports = [
        {"name": name, "port": port, "targetPort": name, "protocol": "TCP", "appProtocol": protocol}
        for name, port in names.items()
    ]
    spec = {"type": "ClusterIP", "ports": ports, "selector": selector(resource.metadata.name)}
    return manifest(SERVICE, resource, {"spec": spec})


def budget(resource: InferenceDeployment) -> Body:
    """Return the limit of evictions. Workers that are not ready never block the drain of a node."""
    most = resource.spec.disruption.max_unavailable
    ray = resource.spec.runtime.ray
    spec = {
        # Kubernetes does not know how many pods a Ray cluster should have, so it cannot count those that are missing.
        **({"maxUnavailable": most} if ray is None else {"minAvailable": max(0, resource.spec.replicas - most)}),
        "selector": {"matchLabels": selector(resource.metadata.name)},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return manifest(BUDGET, resource, {"spec": spec})


def network_policy(resource: InferenceDeployment) -> Body | None:
    """Return the policy that admits only the ports of the workers, or None if it is turned off."""
    network = resource.spec.network
    if not network.policy:
        return None
    rule: Body = {"ports": [{"port": HTTP_PORT, "protocol": "TCP"}]}
    if network.ingress_from:
        rule["from"] = list(network.ingress_from)
    rules = [rule]
    if network.metrics_from:
        rules.append({"ports": [{"port": METRICS_PORT, "protocol": "TCP"}], "from": list(network.metrics_from)})
    spec = {
        "podSelector": {"matchLabels": selector(resource.metadata.name)},
        "policyTypes": ["Ingress"],
        "ingress": rules,
    }
    return manifest(NETWORK_POLICY, resource, {"spec": spec})
