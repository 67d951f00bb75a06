"""Alerts of the chart, as it renders them for a release in the namespace `system`: tests/helm compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "helm" / "ballast" / "files" / "operator-alerts.yaml"


def chart_alerts() -> list[dict[str, Any]]:
    text = FILE.read_text().replace("RELEASE_NAMESPACE", "system").replace("OPERATOR_SERVICE", "ballast-operator")
    found: list[dict[str, Any]] = yaml.safe_load(text)
    return found
