"""Workers and operator export every metric that rules and dashboards read, with the same labels."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from test_rules import alerts, make_resource

from ballast_api import metrics
from ballast_api.alerts.rule_groups import rule_groups
from ballast_operator.metrics import Metrics as OperatorMetrics

ROOT = Path(__file__).parents[2]
DASHBOARD = ROOT / "helm" / "ballast" / "dashboards" / "ballast.json"
SCRAPED = {"namespace", "service", "pod", "instance", "job", "le"}
"""Labels that Prometheus adds, or that histograms have."""
SELECTED = re.compile(r"\b(ballast_[a-z_]+|up)\b(?:\{([^}]*)\})?")


def exported() -> dict[str, set[str]]:
    """Return every series with its labels. Those of workers are from the generated reference page."""
    found: dict[str, set[str]] = {"up": set()}
    for line in (ROOT / "docs" / "reference" / "metrics.md").read_text().splitlines():
        row = re.match(r"\| `([^`]+)` \| (\w+) \| (.*?) \| [^|]*\|$", line.replace("\\|", "/"))
        if row is None:
            continue
        labels = {label.split("=")[0].strip() for label in row[3].split(",") if label.strip()}
        suffixes = ("_bucket", "_sum", "_count") if row[2] == "histogram" else ("",)
        found |= {row[1] + suffix: labels for suffix in suffixes}
    operator = OperatorMetrics()
    operator.replicas.labels("InferenceDeployment", "n", "n", "ready").set(1)
    operator.conditions.labels("InferenceDeployment", "n", "n", "Degraded", "True", "Crashing").set(1)
    operator.ray_ready.labels("InferenceDeployment", "n", "n", "head").set(1)
    for family in text_string_to_metric_families(operator.text().decode()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def read_by(expression: str) -> list[tuple[str, set[str]]]:
    """Return the metrics of an expression, each with the labels of its selector."""
    return [
        (name, set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", labels or "")) - SCRAPED)
        for name, labels in SELECTED.findall(expression)
    ]


def check(expressions: list[str]) -> None:
    known = exported()
    used = [pair for expression in expressions for pair in read_by(expression)]

    assert used
    assert [name for name, _ in used if name not in known] == []
    assert [(name, labels - known[name]) for name, labels in used if labels - known[name]] == []


def test_rules_read_what_is_exported() -> None:
    check([rule["expr"] for group in rule_groups(make_resource()) for rule in group["rules"]])


def test_the_dashboard_reads_what_is_exported() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]

    check([target["expr"] for panel in panels for target in panel.get("targets", ())])


def test_one_module_has_every_name_that_rules_read() -> None:
    named = {value for value in vars(metrics).values() if isinstance(value, str)}
    read = {name for alert in alerts() for name, _ in read_by(alert["expr"]) if name != "up"}

    assert read <= named


def test_outcomes_are_those_of_the_worker() -> None:
    from ballast_worker.requests import RequestOutcome

    assert set(metrics.FAILURES) | set(metrics.ANSWERS) <= {outcome.value for outcome in RequestOutcome}
