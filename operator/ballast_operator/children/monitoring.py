"""What Prometheus is told, where the prometheus-operator's kinds exist. PURE."""

from __future__ import annotations

from ballast_api.alerts import rule_groups
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT_NAME, METRICS_PATH, selector
from ballast_operator.children.manifest import manifest
from ballast_operator.kinds import RULE, SERVICE_MONITOR, Body


def service_monitor(resource: InferenceDeployment) -> Body | None:
    """Has each worker scraped; None where it is switched off."""
    monitoring = resource.spec.monitoring
    if not monitoring.service_monitor:
        return None
    endpoint = {"port": HTTP_PORT_NAME, "path": METRICS_PATH, "interval": f"{monitoring.scrape_seconds}s"}
    spec = {"selector": {"matchLabels": selector(resource.metadata.name)}, "endpoints": [endpoint]}
    return manifest(SERVICE_MONITOR, resource, {"spec": spec}, labels=dict(monitoring.labels))


def prometheus_rule(resource: InferenceDeployment) -> Body | None:
    """Has Prometheus watch over what the resource promises; None where it is switched off."""
    monitoring = resource.spec.monitoring
    if not monitoring.prometheus_rule:
        return None
    spec = {"groups": rule_groups(resource)}
    return manifest(RULE, resource, {"spec": spec}, labels=dict(monitoring.labels))
