"""Alerts of the chart: about the operator, and about resources that are Degraded."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from chart_alerts import chart_alerts
from promtool import run_promtool
from scenarios import CRITICAL, RESTARTS, WARNING, Scenario, gauge, operated
from test_names import check
from test_rules import RAY, alerts, check_what_fires

from ballast_api.metrics import OPERATOR_RAY_READY

RUNBOOKS = Path(__file__).parents[2] / "docs" / "runbooks"
OPERATOR = 'namespace="system",service="ballast-operator"'
DOWN, DEGRADED = ("BallastOperatorDown", CRITICAL), ("BallastDegraded", WARNING)


def active(values: str, pod: str = "operator-0", labels: str = OPERATOR) -> dict[str, str]:
    return gauge("ballast_operator_active", values, f'{labels},pod="{pod}"')


def degraded(
    reason: str, values: str, *, status: str = "True", pod: str = "operator-0", name: str = "default/chat"
) -> dict[str, str]:
    """Return the series of the condition, beside those of an active operator and of a resource that serves."""
    types = (f'type="Degraded",status="{status}",reason="{reason}"', 'type="Ready",status="True",reason="Serving"')
    found = active("1x120")
    for labels in types:
        found |= operated("condition", values, labels, pod=pod, name=name)
    return found


def started(values: str, pod: str = "operator-0") -> dict[str, str]:
    return gauge("ballast_operator_start_time_seconds", values, f'{OPERATOR},pod="{pod}"')


def starts(minutes: int, number: int) -> str:
    """Return the start times of an operator that serves for `minutes` after each of its starts, and then goes on."""
    return " ".join([*(f"{i}x{minutes - 1} stale _" for i in range(number)), f"{number}x120"])


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
    Scenario("the operator restarts every eleven minutes", active("1x90") | started(starts(9, 9)), "70m", {DOWN}),
    Scenario(
        "the operator restarted often until half an hour ago",
        active("1x90") | started(starts(3, 6)),
        "1h",
        over={DOWN},
    ),
    Scenario(
        "an upgrade, and a lost lease of each replica",
        active("1x90") | started(starts(9, 1)) | started("_x20 1x5 2x60", "operator-1"),
        "50m",
    ),
    Scenario("a resource has no problem", degraded("Healthy", "1x60", status="False"), "40m"),
    Scenario(
        "a problem of ten minutes",
        degraded("Unschedulable", "1x10 stale") | degraded("Healthy", "_x11 1x60", status="False"),
        "18m",
    ),
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
    Scenario(
        "a problem while the operator restarts again and again",
        degraded("InvalidSpec", RESTARTS.format(1)),
        "30m",
        {DEGRADED},
    ),
    Scenario(
        "a problem with breaks of a minute",
        degraded("Crashing", " ".join(["1x4 stale"] * 8))
        | degraded("Healthy", " ".join(["_x4 1 stale"] + ["_x3 1 stale"] * 8), status="False"),
        "30m",
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
    (left_out,) = set(re.findall(r'reason!~"([^"]+)"', expressions["BallastDegraded"]))
    has_alert = {a["alert"].removeprefix("Ballast") for a in alerts(**RAY) if OPERATOR_RAY_READY in a["expr"]}

    assert set(left_out.split("|")) == has_alert


def test_every_alert_of_the_chart_fires_in_some_scenario() -> None:
    assert {name for each in SCENARIOS for name, _ in each.fires} == {alert["alert"] for alert in chart_alerts()}


@pytest.mark.promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_an_alert_of_the_chart_does(promtool: str, tmp_path: Path, scenario: Scenario) -> None:
    group = {"name": "chart", "interval": "30s", "rules": chart_alerts()}
    check_what_fires(promtool, replace(scenario, every="30s"), [group], tmp_path)


@pytest.mark.promtool
def test_an_alert_about_a_resource_names_it(promtool: str, tmp_path: Path) -> None:
    rules = [rule for rule in chart_alerts() if rule["alert"] == "BallastDegraded"]
    wanted = {"namespace": "default", "inferencedeployment": "chat", "severity": "warning"}
    series = degraded("InvalidSpec", "1x60") | degraded("Healthy", "1x60", status="False", name="other/chat")
    alert = {
        "exp_labels": wanted | {"resource_namespace": "default", "name": "chat"},
        "exp_annotations": {
            "summary": "default/chat: the condition Degraded is True",
            "description": "The resource has a problem for more than 15 minutes. "
            "`ballast explain chat -n default` shows the reason and the message.",
            "runbook_url": "degraded.md",
        },
    }
    asked = [{"eval_time": "30m", "alertname": "BallastDegraded", "exp_alerts": [alert]}]
    run_promtool(promtool, tmp_path, series, [{"name": "chart", "rules": rules}], alert_rule_test=asked)
