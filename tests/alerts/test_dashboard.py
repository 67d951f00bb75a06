"""The queries of the dashboard add up the workers of one resource, or pick one, and read no other resource."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from promtool import asks, run_promtool

DASHBOARD = Path(__file__).parents[2] / "helm" / "ballast" / "dashboards" / "ballast.json"
ONLINE, OFFLINE, QUEUE = 'class="online"', 'class="offline"', 'queue="default/chat"'
COUNTERS: dict[str, tuple[int, int]] = {
    f'ballast_slo_requests_total{{{ONLINE},slo="ttft",met="true"}}': (60, 48),
    f'ballast_slo_requests_total{{{ONLINE},slo="ttft",met="false"}}': (0, 12),
    f'ballast_slo_requests_total{{{OFFLINE},slo="ttft",met="false"}}': (60, 60),
    f'ballast_requests_total{{{ONLINE},outcome="stop"}}': (60, 30),
    f'ballast_requests_total{{{OFFLINE},outcome="stop"}}': (60, 60),
    f'ballast_tokens_total{{{OFFLINE},phase="prefill"}}': (600, 1200),
    f'ballast_tokens_total{{{OFFLINE},phase="decode"}}': (60, 540),
    f"ballast_cost_dollars_total{{{OFFLINE}}}": (12, 12),
    f'ballast_preemptions_total{{{OFFLINE},reason="memory"}}': (6, 12),
    f"ballast_wasted_tokens_total{{{OFFLINE}}}": (60, 0),
    f'ballast_tenant_service_total{{{OFFLINE},tenant="red"}}': (60, 120),
    f'ballast_tenant_service_total{{{ONLINE},tenant="red"}}': (60, 60),
}
"""Increase in a minute, in two workers."""
GAUGES: dict[str, tuple[float, float]] = {
    f'ballast_slots{{{ONLINE},state="running"}}': (3, 4),
    f'ballast_slots{{{OFFLINE},state="running"}}': (1, 2),
    f'ballast_slots{{{OFFLINE},state="parked"}}': (7, 7),
    "ballast_slots_total{}": (8, 8),
    "ballast_batch_ceiling{}": (6, 5),
    f"ballast_slots_reserved{{{OFFLINE}}}": (1, 1),
    f"ballast_slots_borrowed{{{ONLINE}}}": (0, 1),
    "ballast_lending_ratio{}": (0.8, 0.5),
    "ballast_interference_ratio{}": (0.1, 0.2),
    'ballast_kv_blocks{state="free"}': (40, 50),
    f'ballast_queue_items{{{QUEUE},state="waiting"}}': (5, 4),
    f'ballast_queue_items{{{QUEUE},state="succeeded"}}': (900, 900),
    f"ballast_queue_oldest_seconds{{{QUEUE}}}": (10, 60),
    f"ballast_jobs_at_risk{{{QUEUE}}}": (1, 1),
    f"ballast_dead_letters{{{QUEUE}}}": (2, 3),
    "ballast_offline_reservation_met{}": (1, 0),
    "ballast_redis_up{}": (0, 1),
    "ballast_config_generation{}": (3, 2),
}
"""Values in two workers."""
LATENCIES = (
    "ballast_time_to_first_token_seconds",
    "ballast_time_per_output_token_seconds",
    "ballast_request_latency_seconds",
)
HISTOGRAMS = {
    **{f"{name}_bucket{{{ONLINE}": (9, 6) for name in LATENCIES},
    **{f"{name}_bucket{{{OFFLINE}": (0, 99) for name in LATENCIES},
    "ballast_reclaim_steps_bucket{": (9, 6),
    'ballast_step_seconds_bucket{kind="decode"': (9, 6),
    "ballast_step_prediction_error_ratio_bucket{": (9, 6),
}
"""Increase in a minute of the values up to 1, all in the first worker, and of those between 1 and 2, in the second."""
PERCENTILES = {"p50": {"": 0.833}, "p95": {"": 1.875}, "p99": {"": 1.975}}
WORKERS = tuple(f'namespace="default",service="chat",pod="chat-{i}"' for i in (0, 1))
NEIGHBOURS = ('namespace="default",service="other",pod="other-0"', 'namespace="other",service="chat",pod="chat-0"')
EXPECTED: dict[str, dict[str, dict[str, float]]] = {
    "Time to first token": PERCENTILES,
    "Time per output token": PERCENTILES,
    "Latency": PERCENTILES,
    "SLO attainment": {"{{slo}}": {'slo="ttft"': 0.9}},
    "Ended requests": {"{{outcome}}": {'outcome="stop"': 1.5}},
    "Slots in use": {"{{class}}": {ONLINE: 7, OFFLINE: 3}, "all slots": {"": 16}, "ceiling": {"": 11}},
    "Reserved and borrowed": {"reserved for {{class}}": {OFFLINE: 2}, "borrowed by {{class}}": {ONLINE: 1}},
    "Lending ratio": {"lending ratio": {"": 0.5}, "interference": {"": 0.2}},
    "Tokens": {"{{class}} {{phase}}": {f'{OFFLINE},phase="prefill"': 30, f'{OFFLINE},phase="decode"': 10}},
    "Dollars per million tokens": {"{{class}}": {OFFLINE: 10_000}},
    "Preemptions and wasted tokens": {
        "{{class}} {{reason}}": {f'{OFFLINE},reason="memory"': 0.3},
        "{{class}} wasted tokens": {OFFLINE: 1},
    },
    "Steps an online request waits for its slot": {"p99": {"": 1.975}},
    "Engine step": {"{{kind}} p95": {'kind="decode"': 1.875}},
    "KV blocks": {"{{state}}": {'state="free"': 90}},
    "Items": {"{{queue}} {{state}}": {f'{QUEUE},state="waiting"': 5}},
    "Oldest waiting job": {"{{queue}}": {QUEUE: 60}},
    "Jobs at risk and dead letters": {"jobs at risk": {QUEUE: 1}, "dead letters": {QUEUE: 3}},
    "Service by tenant": {"{{tenant}}": {'tenant="red"': 3}},
    "Offline reservation met": {"{{pod}}": {WORKERS[0]: 1, WORKERS[1]: 0}},
    "Redis": {"{{pod}}": {WORKERS[0]: 0, WORKERS[1]: 1}},
    "Configuration in force": {"{{pod}}": {WORKERS[0]: 3, WORKERS[1]: 2}},
    "Cost model": {"p50": {"": 0.833}},
}
"""Values by panel, legend, and the labels that the legend shows."""


def scraped() -> dict[str, str]:
    """Return the series of two workers, and larger ones of their neighbours."""
    rates = COUNTERS | {f'{name},le="{le}"}}': values for name, (low, high) in HISTOGRAMS.items()
                        for le, values in (("1", (low, 0)), ("2", (low, high)), ("+Inf", (low, high)))}  # fmt: skip
    constants = {series: tuple(f"{value}x40" for value in values) for series, values in GAUGES.items()}
    growing = {series: tuple(f"0+{value}x40" for value in values) for series, values in rates.items()}
    more = dict.fromkeys(constants, "9999x40") | dict.fromkeys(growing, "0+9999x40")
    found = [(series, dict(zip(WORKERS, values, strict=True))) for series, values in (constants | growing).items()]
    return {
        series.replace("{", "{" + target + ",").replace(",}", "}").replace(",,", ","): values
        for series, of in found
        for target, values in (of | dict.fromkeys(NEIGHBOURS, more[series])).items()
    }


@pytest.mark.promtool
def test_a_panel_shows_all_workers_of_one_resource_and_no_other(promtool: str, tmp_path: Path) -> None:
    panels = [panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"]
    queries = {panel["title"]: {each["legendFormat"]: each["expr"] for each in panel["targets"]} for panel in panels}
    asked = [
        asks(
            f"round({query.replace('$namespace', 'default').replace('$deployment', 'chat')}, 0.001)",
            "40m",
            {f"{{{labels}}}": value for labels, value in expected.items()},
        )
        for title, lines in queries.items()
        for legend, query in lines.items()
        for expected in [EXPECTED[title][legend]]
    ]
    run_promtool(promtool, tmp_path, scraped(), promql_expr_test=asked)

    assert {title: set(lines) for title, lines in queries.items()} == {title: set(of) for title, of in EXPECTED.items()}
