"""The Grafana dashboard of the chart, from a list of panels."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

SELECTED = '{namespace="$namespace",service="$deployment"}'
"""The labels of a ServiceMonitor's target, selected by the variables above the panels."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One graph: title, unit, meaning, and legend -> PromQL with `@` for the selected labels."""

    title: str
    unit: str
    text: str
    lines: dict[str, str]


def _quantile(metric: str, share: float) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({metric}_bucket@{{class='online'}}[5m])))"


ROWS: dict[str, tuple[Panel, ...]] = {
    "Online": (
        Panel("Time to first token", "s", "From arrival to the first token of online requests.",
              {f"p{100 * q:g}": _quantile("ballast_time_to_first_token_seconds", q) for q in (0.5, 0.95, 0.99)}),
        Panel("Time per output token", "s", "Mean time of each token after the first, by request.",
              {f"p{100 * q:g}": _quantile("ballast_time_per_output_token_seconds", q) for q in (0.5, 0.95, 0.99)}),
        Panel("Latency", "s", "From arrival to the end of online requests. It is the SLO of a model that returns "
              "vectors or scores.",
              {f"p{100 * q:g}": _quantile("ballast_request_latency_seconds", q) for q in (0.5, 0.95, 0.99)}),
        Panel("SLO attainment", "percentunit", "Share of online requests that met spec.slo.",
              {"{{slo}}": "sum by (slo) (rate(ballast_slo_requests_total@{class='online',met='true'}[5m]))"
                          " / sum by (slo) (rate(ballast_slo_requests_total@{class='online'}[5m]))"}),
        Panel("Ended requests", "reqps", "Requests that ended, by outcome.",
              {"{{outcome}}": "sum by (outcome) (rate(ballast_requests_total@{class='online'}[5m]))"}),
    ),
    "Slots and work": (
        Panel("Slots in use", "short", "Slots that hold a request, on all workers. The ceiling is the "
              "largest batch that the SLO allows.",
              {"{{class}}": "sum by (class) (ballast_slots@{state='running'})",
               "all slots": "sum(ballast_slots_total@)", "ceiling": "sum(ballast_batch_ceiling@)"}),
        Panel("Reserved and borrowed", "short", "Slots reserved for offline work, and slots that each class borrows.",
              {"reserved for {{class}}": "sum by (class) (ballast_slots_reserved@)",
               "borrowed by {{class}}": "sum by (class) (ballast_slots_borrowed@)"}),
        Panel("Lending ratio", "percentunit", "The lending ratio and, under a cap, the share that offline work adds to "
              "online latency.",
              {"lending ratio": "min(ballast_lending_ratio@)",
               "interference": "max(ballast_interference_ratio@)"}),
        Panel("Tokens", "short", "Tokens computed for the first time, per second.",
              {"{{class}} {{phase}}": "sum by (class, phase) (rate(ballast_tokens_total@[5m]))"}),
        Panel("Dollars per million tokens", "currencyUSD", "Cost of the workers, split by the service of each "
              "class, for the tokens that it computed for the first time. It needs spec.cost.",
              {"{{class}}": "1e6 * sum by (class) (rate(ballast_cost_dollars_total@[30m]))"
                            " / (sum by (class) (rate(ballast_tokens_total@[30m])) > 0)"}),
        Panel("Preemptions and wasted tokens", "short", "Preemptions by reason, and tokens that were computed "
              "again, per second.",
              {"{{class}} {{reason}}": "sum by (class, reason) (rate(ballast_preemptions_total@[5m]))",
               "{{class}} wasted tokens": "sum by (class) (rate(ballast_wasted_tokens_total@[5m]))"}),
        Panel("Steps an online request waits for its slot", "short", "The step in flight at its arrival counts as one.",
              {"p99": "histogram_quantile(0.99, sum by (le) (rate(ballast_reclaim_steps_bucket@[5m])))"}),
        Panel("Engine step", "s", "Step time by work.",
              {"{{kind}} p95": "histogram_quantile(0.95, sum by (le, kind) (rate(ballast_step_seconds_bucket@[5m])))"}),
        Panel("KV blocks", "short", "KV blocks that are held, only in the prefix cache, or free.",
              {"{{state}}": "sum by (state) (ballast_kv_blocks@)"}),
    ),
    "Queue": (
        Panel("Items", "short", "Items by state. Items in `inbox` have no job yet.",
              {"{{queue}} {{state}}": "max by (queue, state) (ballast_queue_items@{state!~'succeeded|cancelled'})"}),
        Panel("Oldest waiting job", "s", "Age of the oldest waiting job.",
              {"{{queue}}": "max by (queue) (ballast_queue_oldest_seconds@)"}),
        Panel("Jobs at risk and dead letters", "short", "Jobs that will miss their deadline, and dead letters.",
              {"jobs at risk": "max by (queue) (ballast_jobs_at_risk@)",
               "dead letters": "max by (queue) (ballast_dead_letters@)"}),
        Panel("Service by tenant", "short", "Weighted tokens of offline work per second.",
              {"{{tenant}}": "sum by (tenant) (rate(ballast_tenant_service_total@{class='offline'}[5m]))"}),
    ),
    "Health": (
        Panel("Offline reservation met", "bool_yes_no", "1: offline runs in its reserved slots, or in as many as its "
              "requests and tenant caps allow.",
              {"{{pod}}": "ballast_offline_reservation_met@"}),
        Panel("Redis", "bool_yes_no", "1: the worker can use Redis.", {"{{pod}}": "ballast_redis_up@"}),
        Panel("Configuration in force", "short", "Generation by worker.",
              {"{{pod}}": "ballast_config_generation@"}),
        Panel("Cost model", "percentunit", "Relative error of predicted step times.",
              {"p50": "histogram_quantile(0.5, sum by (le) (rate(ballast_step_prediction_error_ratio_bucket@[5m])))"}),
    ),
}  # fmt: skip


def text() -> str:
    """Return the dashboard as JSON."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append(_row(title, top))
        top += 1
        for number, panel in enumerate(row):
            panels.append(_graph(panel, len(panels), x=6 * (number % 4), y=top + 8 * (number // 4)))
        top += 8 * -(-len(row) // 4)
    dashboard = {
        "title": "Ballast",
        "uid": "ballast",
        "tags": ["ballast"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": panels,
    }
    return json.dumps(dashboard, indent=1)


def _selected(query: str) -> str:
    """Replace `@` by the selected labels, before the labels that the query has."""
    return query.replace("@{", SELECTED[:-1] + ",").replace("@", SELECTED)


_SOURCE = {"type": "prometheus", "uid": "$datasource"}


def _row(title: str, y: int) -> dict[str, Any]:
    return {"type": "row", "title": title, "collapsed": False, "gridPos": {"h": 1, "w": 24, "x": 0, "y": y}}


def _graph(panel: Panel, number: int, *, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + i), "expr": _selected(query), "legendFormat": legend, "datasource": _SOURCE}
        for i, (legend, query) in enumerate(panel.lines.items())
    ]
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"h": 8, "w": 6, "x": x, "y": y},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _variables() -> list[dict[str, Any]]:
    def asked(name: str, query: str) -> dict[str, Any]:
        return {"name": name, "type": "query", "datasource": _SOURCE, "query": query, "refresh": 2, "sort": 1}

    return [
        {"name": "datasource", "type": "datasource", "query": "prometheus"},
        asked("namespace", "label_values(ballast_slots_total, namespace)"),
        asked("deployment", 'label_values(ballast_slots_total{namespace="$namespace"}, service)'),
    ]
