"""ServiceMonitor and PrometheusRule, for clusters with the kinds of the prometheus-operator. PURE."""

from __future__ import annotations

from ballast_api.alerts.rule_groups import rule_groups
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.names import HTTP_PORT_NAME, METRICS_PATH, METRICS_PORT_NAME, selector
from ballast_operator.children.gcs import options
from ballast_operator.children.manifest import manifest
from ballast_operator.context import OperatorContext
from ballast_operator.kinds import RULE, SERVICE_MONITOR, Body


def service_monitor(resource: InferenceDeployment) -> Body | None:
    """Return the object that has Prometheus scrape each worker, or None if it is turned off."""
    monitoring = resource.spec.monitoring
    if not monitoring.service_monitor:
        return None
    port = METRICS_PORT_NAME if resource.spec.network.metrics_from else HTTP_PORT_NAME
    endpoint: Body = {"port": port, "path": METRICS_PATH, "interval": f"{monitoring.scrape_seconds}s"}
    secret = resource.spec.network.tls_secret
    if secret is not None:
        # Prometheus scrapes pods by address, and a certificate names the Service.
        host = f"{resource.metadata.name}.{resource.metadata.namespace}.svc"
        authority = {"secret": {"name": secret, "key": "ca.crt"}}
        endpoint |= {"scheme": "https", "tlsConfig": {"ca": authority, "serverName": host}}
    spec = {"selector": {"matchLabels": selector(resource.metadata.name)}, "endpoints": [endpoint]}
    return manifest(SERVICE_MONITOR, resource, {"spec": spec}, labels=dict(monitoring.labels))


def prometheus_rule(resource: InferenceDeployment, context: OperatorContext) -> Body | None:
    """Return the alert rules of the resource, or None if they are turned off."""
    monitoring = resource.spec.monitoring
    if not monitoring.prometheus_rule:
        return None
    keeps_head_state = options(resource, context) is not None
    spec = {"groups": rule_groups(resource, runbooks=context.runbooks, keeps_head_state=keeps_head_state)}
    return manifest(RULE, resource, {"spec": spec}, labels=dict(monitoring.labels))
