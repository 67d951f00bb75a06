"""The chart: its values, their schema, and the objects that it renders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[2] / "helm" / "ballast"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "external-redis": {"valkey": {"enabled": False}, "redis": {"existingSecret": "my-redis"}},
    "without-redis": {"valkey": {"enabled": False}, "operator": {"replicas": 1}},
    "monitored": {
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}},
        "grafana": {"dashboards": {"enabled": True, "annotations": {"folder": "inference"}}},
    },
}
"""Values of the snapshots. They omit CRD and roles, which other tests check, and the content of dashboards."""
WITH_PODS = {"Deployment", "StatefulSet", "DaemonSet", "Job", "Pod"}


def nested(path: str, value: Any) -> dict[str, Any]:
    head, _, rest = path.partition(".")
    return {head: nested(rest, value) if rest else value}


def merged(base: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    return base | {
        k: merged(base[k], v) if isinstance(v, dict) and isinstance(base.get(k), dict) else v for k, v in more.items()
    }


def pod_of(rendered: dict[str, Any]) -> dict[str, Any]:
    """Return the spec of the pod, or of the pods that the object makes."""
    return rendered["spec"] if rendered["kind"] == "Pod" else rendered["spec"]["template"]["spec"]
