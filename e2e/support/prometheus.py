"""A real Prometheus in the cluster. It finds workers through the Kubernetes API by their labels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import yaml
from cluster import UNPRIVILEGED, Cluster, restricted_pod, until
from images import PROMETHEUS

NAMESPACE = "e2e-monitoring"
"""The addon with the Prometheus operator has `monitoring`."""
NAME = "prometheus"

SCRAPE: dict[str, Any] = {
    "global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"},
    "scrape_configs": [
        {
            "job_name": "ballast-workers",
            "kubernetes_sd_configs": [{"role": "pod"}],
            "relabel_configs": [
                {
                    "source_labels": [
                        "__meta_kubernetes_pod_label_app_kubernetes_io_name",
                        "__meta_kubernetes_pod_container_port_name",
                    ],
                    "separator": "/",
                    "regex": "ballast-worker/http",
                    "action": "keep",
                },
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                {"source_labels": ["__meta_kubernetes_pod_name"], "target_label": "pod"},
            ],
        }
    ],
}
READ = {"verbs": ["get", "list", "watch"]}
RIGHTS = [
    {"apiGroups": [""], "resources": ["pods", "services"], **READ},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], **READ},
]


@dataclass
class Prometheus:
    """A pod that scrapes every second."""

    cluster: Cluster

    @classmethod
    def start(
        cls,
        cluster: Cluster,
        config: dict[str, Any] = SCRAPE,
        rules: list[dict[str, Any]] | None = None,
        *,
        node: str = "",
    ) -> Prometheus:
        """Create Prometheus again with groups of rules, on any or on the given node, and wait until it answers."""
        cluster.start_pods(*manifests(config, rules or [], node), namespace=NAMESPACE)
        return cls(cluster)

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Return the current labels and value of each series of an expression."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{NAME}:9090/proxy/api/v1/query?query={quote(text)}"
        answer = json.loads(self.cluster.kubectl("get", "--raw", path).stdout)
        assert answer["status"] == "success", answer
        return [(each["metric"], float(each["value"][1])) for each in answer["data"]["result"]]

    def value(self, text: str) -> float:
        """Return the single value of an expression; 0 if it has none."""
        found = self.query(text)
        assert len(found) <= 1, found
        return found[0][1] if found else 0.0

    def wait_scraped(self, count: int, *, namespace: str) -> None:
        """Wait until Prometheus scrapes `count` workers."""
        up = f'up{{job="ballast-workers", namespace="{namespace}"}}'
        # A Prometheus that lost power did not mark the series of that moment as stale.
        text = f"sum({up} and time() - timestamp({up}) < 10)"
        until(lambda: self.value(text) == count, seconds=60, said=f"{count} workers of {namespace} are scraped")


def manifests(config: dict[str, Any], rules: list[dict[str, Any]], node: str) -> list[dict[str, Any]]:
    """Return the pod, its configuration and its role."""
    container = {
        "image": PROMETHEUS.name,
        "args": ["--config.file=/etc/prometheus/prometheus.yaml", "--storage.tsdb.path=/data"],
        "readinessProbe": {"httpGet": {"path": "/-/ready", "port": 9090}, "periodSeconds": 1},
        # Without a request, the workers under test leave it no processor time.
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}},
    }
    mounts = {"/etc/prometheus": {"configMap": {"name": NAME}}, "/data": {"emptyDir": {}}}
    pod = restricted_pod(NAME, container, mounts=mounts, user=UNPRIVILEGED)
    account = {"serviceAccountName": NAME, "automountServiceAccountToken": True}
    placed = {"nodeSelector": {"kubernetes.io/hostname": node}} if node else {}
    subject = {"kind": "ServiceAccount", "name": NAME, "namespace": NAMESPACE}
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": NAME}
    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": NAME}},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": NAME},
            "data": {
                "prometheus.yaml": yaml.safe_dump(config | {"rule_files": ["/etc/prometheus/rules.yaml"]}),
                "rules.yaml": yaml.safe_dump({"groups": rules}),
            },
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRole",
            "metadata": {"name": NAME},
            "rules": RIGHTS,
        },
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": "ClusterRoleBinding",
            "metadata": {"name": NAME},
            "roleRef": reference,
            "subjects": [subject],
        },
        pod | {"spec": pod["spec"] | account | placed},
    ]
