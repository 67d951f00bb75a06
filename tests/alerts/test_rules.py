from __future__ import annotations

import json
import re
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import resources
from chart_alerts import chart_alerts
from documented_scaling import documented
from promtool import asks, check_rules, run_promtool
from scenarios import (
    CRITICAL,
    QUEUE,
    SCENARIOS,
    TARGET,
    WARNING,
    Scenario,
    condition,
    ended,
    gauge,
    judged,
    operated,
    ray,
    replicas,
)

from ballast_api.alerts.rule_groups import rule_groups
from ballast_api.inference_deployment import InferenceDeployment

ROOT = Path(__file__).parents[2]
RUNBOOKS = "docs/runbooks"


def make_resource(name: str = "chat", namespace: str = "default", **spec: Any) -> InferenceDeployment:
    base: dict[str, Any] = {"model": {"uri": "hf://a/b"}, "rollout": {"startupSeconds": 600}}
    return resources.make_resource(name, namespace, **(base | spec))


def rules(**spec: Any) -> list[dict[str, Any]]:
    return [rule for group in rule_groups(make_resource(**spec), runbooks=RUNBOOKS) for rule in group["rules"]]


def alerts(**spec: Any) -> list[dict[str, Any]]:
    return [rule for rule in rules(**spec) if "alert" in rule]


ENCODER: dict[str, Any] = {"slo": {"latencyMilliseconds": 30}, "engine": {"backend": "vllm"}}
"""A model that returns vectors."""
RAY: dict[str, Any] = {"runtime": {"ray": {}}}


def every_alert() -> list[dict[str, Any]]:
    return [*alerts(), *alerts(**ENCODER), *alerts(**RAY)]


def test_every_alert_is_listed_and_has_a_page_that_says_what_to_do() -> None:
    listed = (ROOT / "docs" / "how-to" / "prometheus.md").read_text()
    for alert in every_alert():
        page = ROOT / alert["annotations"]["runbook_url"]
        text = page.read_text()

        assert alert["alert"] in text
        assert f"`{alert['alert']}`" in listed
        assert alert["annotations"]["summary"].startswith("default/chat: ")
        assert alert["annotations"]["description"].endswith(".")
        assert {"## Meaning", "## Diagnosis", "## Mitigation"} <= set(text.splitlines())


def test_every_page_has_an_alert() -> None:
    pages = {path.stem for path in (ROOT / RUNBOOKS).glob("*.md")} - {"README"}
    known = [*every_alert(), *chart_alerts()]

    assert pages == {Path(alert["annotations"]["runbook_url"]).stem for alert in known}


def test_a_latency_slo_has_its_own_alert_in_place_of_those_of_tokens() -> None:
    burns = {alert["alert"] for alert in alerts(**ENCODER) if alert["alert"].endswith("BudgetBurn")}

    assert burns == {"BallastLatencyBudgetBurn", "BallastAvailabilityBudgetBurn"}


def test_the_thresholds_follow_the_objective() -> None:
    """The windows and burn rates are those of the SRE workbook, and 0.1 % of the requests may miss."""
    burns = {
        alert["labels"]["severity"]: re.findall(r"rate(\w+)\{[^}]*\} > ([0-9.]+)", alert["expr"])
        for alert in alerts(slo={"objectivePercent": 99.9})
        if alert["alert"] == "BallastTtftBudgetBurn"
    }

    assert burns == {
        "critical": [("1h", "0.0144"), ("5m", "0.0144"), ("6h", "0.006"), ("30m", "0.006")],
        "warning": [("1d", "0.003"), ("2h", "0.003"), ("3d", "0.001"), ("6h", "0.001")],
    }


def test_a_burn_rate_that_no_share_of_misses_can_reach_is_omitted() -> None:
    severities = [a["labels"]["severity"] for a in alerts(slo={"objectivePercent": 75}) if "Ttft" in a["alert"]]

    assert severities == ["warning"]


def test_without_a_reservation_no_alert_watches_it() -> None:
    names = {alert["alert"] for alert in alerts(offline={"reservedPercent": 0})}

    assert "BallastOfflineReservationNotMet" not in names


def test_only_a_resource_on_ray_has_alerts_about_ray() -> None:
    names = {alert["alert"] for alert in alerts(**RAY)} - {alert["alert"] for alert in alerts()}

    assert names == {"BallastRayHeadDown", "BallastRayStorageDown", "BallastRayReplicasPending"}


def test_a_named_queue_is_the_one_that_is_watched() -> None:
    (late,) = (a for a in alerts(offline={"queue": "teams/shared"}) if a["alert"] == "BallastDeadlineAtRisk")

    assert 'queue="teams/shared"' in late["expr"]


def test_matchers_can_be_given_for_another_scrape() -> None:
    groups = rule_groups(make_resource(), match='job="chat"')

    assert 'ballast_redis_up{job="chat"}' in str(groups)
    assert "service=" not in str(groups)


def test_alerts_link_to_the_runbook_pages_of_the_base_url() -> None:
    groups = rule_groups(make_resource(), runbooks="https://docs.example/run/")

    assert "'https://docs.example/run/dead-letters.md'" in str(groups)


def test_without_a_base_url_alerts_have_no_runbook_url() -> None:
    groups = rule_groups(make_resource())

    assert "summary" in str(groups)
    assert "runbook" not in str(groups)


@pytest.mark.promtool
@pytest.mark.parametrize("objective", [50, 90, 99, 99.95])
def test_promtool_accepts_the_rules(promtool: str, tmp_path: Path, objective: float) -> None:
    check_rules(promtool, tmp_path, rule_groups(make_resource(slo={"objectivePercent": objective})))


@pytest.mark.promtool
def test_promtool_accepts_the_queries_of_the_dashboard(promtool: str, tmp_path: Path) -> None:
    panels = json.loads((ROOT / "helm" / "ballast" / "dashboards" / "ballast.json").read_text())["panels"]
    asked = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    assert len(asked) > 20
    check_rules(
        promtool, tmp_path, [{"name": "g", "rules": [{"record": f"r{i}", "expr": e} for i, e in enumerate(asked)]}]
    )


def test_every_alert_fires_in_some_scenario() -> None:
    fired = {name for scenario in SCENARIOS for name, _ in scenario.fires}

    assert fired == {alert["alert"] for alert in every_alert()}


def check_what_fires(promtool: str, scenario: Scenario, groups: list[Any], folder: Path, where: str = "") -> None:
    """Run promtool on the scenario and on groups of rules. Compare the alerts with the labels of `where`.

    An alert that fires has each label that its annotations show.
    """
    firing = f'ALERTS{{alertstate="firing",{where}}}'
    expected = {firing: scenario.fires, f"max_over_time({firing}[{scenario.at}])": scenario.fires | scenario.over}
    shown = {
        (rule["alert"], label)
        for group in groups
        for rule in group["rules"]
        for label in re.findall(r"\$labels\.(\w+)", str(rule.get("annotations")))
    }
    asked = [
        asks(
            f"count by (alertname, severity) ({series})",
            scenario.at,
            {f'{{alertname="{name}",severity="{severity}"}}': 1 for name, severity in names},
        )
        for series, names in expected.items()
    ]
    asked += [
        asks(f'ALERTS{{alertname="{alert}",alertstate="firing",{label}=""}}', scenario.at)
        for alert, label in sorted(shown)
    ]
    run_promtool(promtool, folder, scenario.series, groups, scenario.every, promql_expr_test=asked)


@pytest.mark.promtool
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_what_fires(promtool: str, tmp_path: Path, scenario: Scenario) -> None:
    groups = rule_groups(make_resource(**scenario.spec), keeps_head_state=scenario.keeps_head_state)
    check_what_fires(promtool, scenario, groups, tmp_path)


@pytest.mark.promtool
def test_one_prometheus_can_have_the_rules_of_several_clusters(promtool: str, tmp_path: Path) -> None:
    clusters = ("eu", "us")
    groups = [group for each in clusters for group in rule_groups(make_resource(), labels={"cluster": each})]
    found = judged("ttft", "0+80x200", "0+20x200") | replicas("2x200", "2x99 0x100")
    series = {key.replace("{", '{cluster="us",'): values for key, values in found.items()}
    found = judged("ttft", "0+100x200", "0x200") | replicas("2x200", "2x200")
    series |= {key.replace("{", '{cluster="eu",'): values for key, values in found.items()}
    fires = {
        ("BallastTtftBudgetBurn", CRITICAL),
        ("BallastTtftBudgetBurn", WARNING),
        ("BallastNoWorkerReady", CRITICAL),
    }
    check_what_fires(promtool, Scenario("two", series, "108m", fires), groups, tmp_path, where='cluster="us"')
    check_what_fires(promtool, Scenario("two", series, "108m"), groups, tmp_path, where='cluster!="us"')

    assert len({group["name"] for group in groups}) == len(groups)


PROBLEMS = (
    judged("ttft", "0+80x130", "0+20x130")
    | ended(stop="0+80x130", failed="0+20x130")
    | gauge("ballast_offline_reservation_met", "0x130")
    | gauge("ballast_jobs_at_risk", "1x130", QUEUE)
    | gauge("ballast_dead_letters", "7x110 9x20", QUEUE)
    | gauge("ballast_redis_up", "0x130")
    | gauge("ballast_config_invalid", "1x130")
    | gauge("ballast_feeder_failures_total", "0+1x130", TARGET + ',task="inbox"')
    | replicas("2x130", "2x107 0x30")
    | ray("0x130")
    | condition("Progressing", "RayReplicasPending", "1x130")
)
SILENT = {
    ("BallastTpotBudgetBurn", CRITICAL),
    ("BallastTpotBudgetBurn", WARNING),
    ("BallastRayStorageDown", CRITICAL),
    ("BallastWorkerNotReady", WARNING),
}
"""Alerts that these problems do not fire."""


@pytest.mark.promtool
@pytest.mark.parametrize("neighbour", [("default", "other"), ("other", "chat")], ids="/".join)
def test_a_problem_of_a_resource_fires_no_alert_of_its_neighbour(
    promtool: str, tmp_path: Path, neighbour: tuple[str, str]
) -> None:
    """Names are unique in a namespace only."""
    namespace, name = neighbour
    resources = [make_resource(*each, **RAY) for each in (("chat", "default"), (name, namespace))]
    groups = [group for resource in resources for group in rule_groups(resource)]
    moved = {
        'namespace="default"': f'namespace="{namespace}"',
        'service="chat"': f'service="{name}"',
        ',name="chat"': f',name="{name}"',
        "default/chat": f"{namespace}/{name}",
    }
    series = {reduce(lambda text, pair: text.replace(*pair), moved.items(), key): v for key, v in PROBLEMS.items()}
    fires = {(alert["alert"], alert["labels"]["severity"]) for alert in alerts(**RAY)} - SILENT
    own = 'namespace="default",inferencedeployment="chat"'
    theirs = f'namespace="{namespace}",inferencedeployment="{name}"'

    check_what_fires(promtool, Scenario("theirs", series, "121m", fires), groups, tmp_path, where=theirs)
    check_what_fires(promtool, Scenario("own", series, "121m"), groups, tmp_path, where=own)


ONLINE, OFFLINE = 'class="online"', 'class="offline"'
LOAD = {
    "ballast_slots": {f'{ONLINE},state="running"': (20, 26), f'{ONLINE},state="parked"': (2, 0),
                      f'{OFFLINE},state="running"': (9, 6)},
    "ballast_requests_waiting": {ONLINE: (5, 0), OFFLINE: (70, 70)},
    "ballast_batch_ceiling": {"": (32, 32)},
}  # fmt: skip
"""Series of two workers: 53 online requests, and offline work that no autoscaler should count."""


@pytest.mark.promtool
def test_a_documented_autoscaler_measures_online_requests_in_workers(promtool: str, tmp_path: Path) -> None:
    (trigger,) = documented("kind", "ScaledObject")["spec"]["triggers"]
    (rule,) = documented("rules")["rules"]
    of_pods = rule["metricsQuery"].replace("<<.GroupBy>>", "namespace,pod")
    of_pods = of_pods.replace("<<.LabelMatchers>>", 'namespace="default",pod=~"chat-0|chat-1"')
    series = {
        f'{name}{{namespace="default",service="chat",pod="chat-{pod}",{labels}}}': f"{values[pod]}x1"
        for name, found in LOAD.items()
        for labels, values in found.items()
        for pod in (0, 1)
    }
    series |= operated("replicas", "2 3", 'state="ready"')
    expected = {trigger["metadata"]["query"]: 53 / 32, f"sum({of_pods})": 53 / 32, f"count({of_pods})": 2}
    asked = [asks(query, "0m", {"{}": value}) for query, value in expected.items()]
    asked.append(asks(trigger["metadata"]["query"], "1m"))  # a third is not scraped
    run_promtool(promtool, tmp_path, series, promql_expr_test=asked)
