"""All rules of one resource: what Prometheus records at each interval, and the alerts."""

from __future__ import annotations

from collections.abc import Mapping

from ballast_api.alerts.alert import RuleJson
from ballast_api.alerts.burn_rates import WINDOWS, burn_alerts, recordings
from ballast_api.alerts.offline import offline_alerts
from ballast_api.alerts.series import Labels
from ballast_api.alerts.workers import worker_alerts
from ballast_api.inference_deployment import InferenceDeployment


def rule_groups(
    resource: InferenceDeployment,
    *,
    match: str | None = None,
    labels: Mapping[str, str] | None = None,
    runbooks: str | None = None,
    keeps_head_state: bool = True,
) -> list[RuleJson]:
    """Return the groups of a PrometheusRule's spec or of a rules file.

    Args:
        resource: The resource to watch.
        match: PromQL matchers of the scraped workers; by default the labels that the resource's ServiceMonitor sets.
        labels: Labels that every series must have, and that every alert and recorded series gets, such as the cluster.
            None is of `RESERVED_LABELS`.
        runbooks: Base URL of the runbook pages. Without it, alerts have no `runbook_url`.
        keeps_head_state: Whether a Redis keeps the state of Ray's head, if the resource runs on Ray.
    """
    labels = labels or {}
    own = Labels(resource, match, labels)
    ids = {**labels, "namespace": own.namespace, "inferencedeployment": own.name}
    prefix = "/".join(("ballast", *labels.values(), own.namespace, own.name))
    alerts = [
        *burn_alerts(own, resource.spec.slo),
        *offline_alerts(own, resource.spec.offline),
        *worker_alerts(own, resource, keeps_head_state=keeps_head_state),
    ]
    return [
        *(
            {
                "name": f"{prefix}/every-{interval}",
                "interval": interval,
                "rules": list(recordings(own, resource.spec.slo, ids, windows)),
            }
            for interval, windows in WINDOWS.items()
        ),
        {"name": f"{prefix}/alerts", "interval": "30s", "rules": [alert.rule(ids, runbooks) for alert in alerts]},
    ]
