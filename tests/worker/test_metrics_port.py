"""Series and fields that name tenants have a port of their own."""

from __future__ import annotations

import json

import httpx
import pytest
from queue_objects import make_status
from streamed import BODY

TENANT = {"x-llm-d-inference-fairness-id": "team-secret", "x-ballast-class": "offline"}
TENANTS = {"offline": {"tenants": [{"name": "team-secret", "maxSlots": 2}]}}


def test_the_public_port_names_no_tenant(serve, make_config) -> None:
    with serve(make_config(**TENANTS)) as serving, serving.client() as client:
        assert client.post("/v1/completions", json=BODY, headers=TENANT).status_code == 200
        shown = {path: client.get(path).text for path in ("/metrics", "/ballast/status", "/health", "/ready")}
        whole = serving.worker.tenant_metrics.render().decode()

    assert "ballast_requests_total" in shown["/metrics"]
    assert "vllm:num_requests_running" in shown["/metrics"]
    assert "slots" in json.loads(shown["/ballast/status"])
    assert not [path for path, text in shown.items() if "team-secret" in text or "ballast_tenant" in text]
    assert 'ballast_tenant_service_total{class="offline",tenant="team-secret"}' in whole
    named = {"team-secret": 1}
    assert "team-secret" not in make_status(tenant_slots=named, tenant_requests=named).public()


@pytest.mark.slow
def test_the_metrics_port_names_tenants_and_generates_nothing(run_worker, make_config, tmp_path, eventually) -> None:
    config = make_config(**TENANTS, runtime={"metricsPort": 0, "drainSeconds": 1})
    with run_worker(config, tmp_path) as running, running.client() as client:
        address = eventually(lambda: next(filter(None, map(_metrics_address, running.lines)), ""), "the second port")
        assert client.post("/v1/completions", json=BODY, headers=TENANT).status_code == 200
        with httpx.Client(base_url=address, timeout=60) as owner:
            metrics, status = owner.get("/metrics").text, owner.get("/ballast/status").json()
            generated = owner.post("/v1/completions", json=BODY).status_code
        public = client.get("/metrics").text

    assert 'tenant="team-secret"' in metrics
    assert "vllm:num_requests_running" in metrics
    assert status["tenant_slots"] == {"team-secret": 2}
    assert generated == 404
    assert "team-secret" not in public


def _metrics_address(line: str) -> str:
    entry = json.loads(line) if line.startswith("{") else {}
    return str(entry["address"]) if entry.get("event") == "metrics listening" else ""
