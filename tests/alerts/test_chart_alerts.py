"""Alerts of the chart: about the operator, and about resources that are Degraded."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml
from chart_alerts import chart_alerts
from scenarios import CRITICAL, WARNING, Scenario, gauge
from test_names import check
from test_rules import RAY, alerts, check_what_fires

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
OPERATOR = 'namespace="system",service="ballast-operator"'
DOWN, DEGRADED = ("BallastOperatorDown", CRITICAL), ("BallastDegraded", WARNING)


def active(values: str, pod: str = "operator-0", labels: str = OPERATOR) -> dict[str, str]:
    return gauge("ballast_operator_active", values, f'{labels},pod="{pod}"')


def degraded(reason: str, values: str, *, status: str = "True", pod: str = "operator-0") -> dict[str, str]:
    """Return the series of the condition, with the namespace of the resource and the Service of the operator."""
    labels = f'kind="InferenceDeployment",namespace="default",name="chat",type="Degraded",status="{status}"'
    more = f'reason="{reason}",service="ballast-operator",pod="{pod}"'
    return active("1x120") | gauge("ballast_operator_condition", values, f"{labels},{more}")


SCENARIOS = (
    Scenario("one of two replicas is active", active("1x60") | active("0x60", "operator-1"), "30m"),
    Scenario("nothing is scraped", {}, "10m", {DOWN}),
    Scenario("an upgrade replaces the active replica", active("1x10 stale") | active("0x13 1x60", "operator-1"), "16m"),
    Scenario("all replicas are on standby", active("0x60") | active("0x60", "operator-1"), "10m", {DOWN}),
    Scenario("all replicas are gone", active("1x10 stale"), "20m", {DOWN}),
    Scenario(
        "only the operator of another release is active",
        active("1x60", labels=OPERATOR.replace("system", "other")),
        "10m",
        {DOWN},
    ),
    Scenario("a resource has no problem", degraded("Healthy", "1x60", status="False"), "40m"),
    Scenario("a problem of ten minutes", degraded("Unschedulable", "1x10 stale"), "18m"),
    Scenario("a problem that stays", degraded("InvalidSpec", "1x60"), "30m", {DEGRADED}),
    Scenario(
        "a problem whose reason changes",
        degraded("ImagePull", "1x10 stale") | degraded("Crashing", "_x11 1x60"),
        "20m",
        {DEGRADED},
    ),
    Scenario(
        "a problem during which another replica becomes active",
        degraded("InvalidSpec", "1x10 stale") | degraded("InvalidSpec", "_x12 1x60", pod="operator-1"),
        "20m",
        {DEGRADED},
    ),
    Scenario("a problem of Ray with an alert of its own", degraded("RayHeadDown", "1x60"), "40m"),
)


def test_every_alert_of_the_chart_has_a_page_that_says_what_to_do() -> None:
    for alert in chart_alerts():
        text = (RUNBOOKS / alert["annotations"]["runbook_url"]).read_text()

        assert text.startswith(f"# {alert['alert']}\n")
        assert {"## Meaning", "## Diagnosis", "## Mitigation"} <= set(text.splitlines())


def test_alerts_of_the_chart_read_what_the_operator_exports() -> None:
    check([alert["expr"] for alert in chart_alerts()])


def test_a_reason_is_left_out_if_and_only_if_it_has_an_alert() -> None:
    expressions = {alert["alert"]: alert["expr"] for alert in chart_alerts()}
    (left_out,) = re.findall(r'reason!~"([^"]+)"', expressions["BallastDegraded"])
    has_alert = re.findall(r'type="Degraded",reason="(\w+)"', "".join(alert["expr"] for alert in alerts(**RAY)))

    assert sorted(left_out.split("|")) == sorted(has_alert)


def test_every_alert_of_the_chart_fires_in_some_scenario() -> None:
    assert {name for each in SCENARIOS for name, _ in each.fires} == {alert["alert"] for alert in chart_alerts()}


@pytest.mark.promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_an_alert_of_the_chart_does(promtool: str, tmp_path: Path, scenario: Scenario) -> None:
    group = {"name": "chart", "interval": "30s", "rules": chart_alerts()}
    check_what_fires(promtool, scenario, [group], tmp_path, every="30s")


@pytest.mark.promtool
def test_an_alert_about_a_resource_names_it(promtool: str, tmp_path: Path) -> None:
    rules = [rule for rule in chart_alerts() if rule["alert"] == "BallastDegraded"]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "chart", "rules": rules}]}))
    wanted = {"namespace": "default", "name": "chat", "inferencedeployment": "chat", "severity": "warning"}
    case = {
        "interval": "1m",
        "input_series": [{"series": s, "values": v} for s, v in degraded("InvalidSpec", "1x60").items()],
        "alert_rule_test": [
            {
                "eval_time": "30m",
                "alertname": "BallastDegraded",
                "exp_alerts": [
                    {
                        "exp_labels": wanted,
                        "exp_annotations": {
                            "summary": "default/chat: the condition Degraded is True",
                            "description": "The resource has a problem for more than 15 minutes. "
                            "`ballast explain chat -n default` shows the reason and the message.",
                            "runbook_url": "degraded.md",
                        },
                    }
                ],
            }
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": ["rules.yaml"], "tests": [case]}))

    done = subprocess.run(
        [promtool, "test", "rules", "test.yaml"], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
