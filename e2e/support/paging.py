"""The path of an alert: the kinds of the prometheus-operator, Alertmanager, and the receiver of its webhook."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

import yaml
from client import SCRIPTS
from cluster import UNPRIVILEGED, Cluster, restricted_pod
from images import ALERTMANAGER, CLIENT
from prometheus import NAMESPACE

FACTOR = 60
"""A minute of the rules takes a second. Every duration is divided by it, the scrape's too; nothing else changes."""
GROUP = "monitoring.coreos.com"
ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
KINDS: list[dict[str, Any]] = [
    {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{kind.lower()}s.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"},
            "versions": [{"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": ANYTHING}}],
        },
    }
    for kind in ("ServiceMonitor", "PrometheusRule")
]
"""The kinds that the operator writes where they exist, without the prometheus-operator's own schema."""
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def shortened(groups: list[dict[str, Any]], factor: int = FACTOR) -> list[dict[str, Any]]:
    """Return the groups of a PrometheusRule with each window, interval, offset and `for` divided by the factor."""

    def divided(duration: str) -> str:
        return f"{int(duration[:-1]) * SECONDS[duration[-1]] * 1000 // factor}ms"

    def rule(each: dict[str, Any]) -> dict[str, Any]:
        text = re.sub(r"(\[|offset )(\d+[smhd])\b", lambda found: found[1] + divided(found[2]), each["expr"])
        lasting = {"for": divided(each["for"])} if "for" in each else {}
        return {**each, "expr": text, **lasting}

    return [
        {**group, "interval": divided(group["interval"]), "rules": [rule(each) for each in group["rules"]]}
        for group in groups
    ]


def scrape(monitor: dict[str, Any]) -> dict[str, Any]:
    """Return the scrape configuration that the prometheus-operator makes of a ServiceMonitor, but more frequent."""
    namespace, (endpoint,) = monitor["metadata"]["namespace"], monitor["spec"]["endpoints"]
    interval = f"{int(endpoint['interval'].removesuffix('s')) * 1000 // FACTOR}ms"
    chosen = monitor["spec"]["selector"]["matchLabels"].items()
    labels = [(f"service_label_{re.sub(r'[^a-zA-Z0-9]', '_', name)}", value) for name, value in chosen]
    kept = [*labels, ("endpointslice_port_name", endpoint["port"])]
    given = {"namespace": "namespace", "service_name": "service", "pod_name": "pod"}
    return {
        "global": {"scrape_interval": interval, "scrape_timeout": interval},
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": ["alertmanager:9093"]}]}]},
        "scrape_configs": [
            {
                "job_name": f"serviceMonitor/{namespace}/{monitor['metadata']['name']}/0",
                "metrics_path": endpoint["path"],
                "kubernetes_sd_configs": [{"role": "endpointslice", "namespaces": {"names": [namespace]}}],
                "relabel_configs": [
                    *(
                        {"action": "keep", "source_labels": [f"__meta_kubernetes_{label}"], "regex": value}
                        for label, value in kept
                    ),
                    *(
                        {"source_labels": [f"__meta_kubernetes_{label}"], "target_label": target}
                        for label, target in given.items()
                    ),
                ],
            }
        ],
    }


@dataclass
class Pager:
    """The alerts that a person on call receives."""

    cluster: Cluster

    @classmethod
    def start(cls, cluster: Cluster) -> Pager:
        """Start a new receiver, and a new Alertmanager that sends each change immediately."""
        cluster.start_pods(*manifests(), namespace=NAMESPACE)
        return cls(cluster)

    def told(self, alert: str, status: str, *, namespace: str, severity: str = "critical") -> list[dict[str, Any]]:
        """Return the notifications of an alert in a namespace that have this status (`firing` or `resolved`)."""
        wanted = {"alertname": alert, "namespace": namespace, "severity": severity}
        lines = self.cluster.kubectl("logs", "pager", "-n", NAMESPACE).stdout.splitlines()
        found = [json.loads(line) for line in lines]
        return [each for each in found if each["status"] == status and each["labels"].items() >= wanted.items()]


ROUTING: dict[str, Any] = {
    "route": {
        "receiver": "webhook",
        "group_by": ["..."],
        "group_wait": "0s",
        "group_interval": "1s",
        "repeat_interval": "1h",
    },
    "receivers": [
        {"name": "webhook", "webhook_configs": [{"url": f"http://pager.{NAMESPACE}.svc:8080/", "send_resolved": True}]}
    ],
}


def manifests() -> list[dict[str, Any]]:
    """Return Alertmanager with its configuration, the receiver, and a Service for each."""
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "alertmanager"}}
    return [
        config | {"data": {"alertmanager.yaml": yaml.safe_dump(ROUTING)}},
        *serving(
            "alertmanager",
            9093,
            {
                "image": ALERTMANAGER.name,
                "args": [
                    "--config.file=/etc/alertmanager/alertmanager.yaml",
                    "--storage.path=/data",
                    "--cluster.listen-address=",
                ],
            },
            {"/etc/alertmanager": {"configMap": {"name": "alertmanager"}}, "/data": {"emptyDir": {}}},
        ),
        *serving(
            "pager",
            8080,
            {"image": CLIENT.name, "command": ["python3", "-c", (SCRIPTS / "pager.py").read_text()]},
            {},
        ),
    ]


def serving(name: str, port: int, container: dict[str, Any], mounts: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a pod with one restricted container, and its Service."""
    about = {
        "readinessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}},
    }
    return [
        restricted_pod(name, about | container, mounts=mounts, user=UNPRIVILEGED),
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": [{"port": port}]},
        },
    ]
