"""The configuration of Ballast inside vLLM, which needs no vLLM to be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ballast_api.errors import InvalidConfig
from ballast_vllm.configuration import ignored, load, parse

FILE = """
slo: {ttftMilliseconds: 300}
offline: {reservedPercent: 20, tenants: [{name: lab}]}
"""


def test_a_file_needs_no_model_because_vllm_has_one():
    config = parse(FILE, "file", {}, model="llama")

    assert (config.model.uri, config.slo.ttft_milliseconds) == ("llama", 300)


def test_each_field_has_a_variable_that_overrides_the_file():
    environment = {
        "BALLAST_SLO_TTFT_MILLISECONDS": "500",
        "BALLAST_SLOTS": "12",
        "BALLAST_RUNTIME_REDIS_URL": "redis://queue:6379",
        "BALLAST_RUNTIME_WORKER_ID": "007",
        "BALLAST_RUNTIME_API_KEYS_FILE": "/keys.yaml",
        "BALLAST_OFFLINE_TENANTS": "[{name: web, weight: 2}]",
        "BALLAST_OPERATOR_SERVICE_HOST": "10.0.0.1",
    }

    config = parse(FILE, "file", environment)

    assert (config.slo.ttft_milliseconds, config.slots, config.offline.reserved_percent) == (500, 12, 20)
    assert config.runtime.redis_url == "redis://queue:6379"
    assert config.runtime.worker_id == "007"
    assert config.runtime.api_keys_file == Path("/keys.yaml")
    assert [(tenant.name, tenant.weight) for tenant in config.offline.tenants] == [("web", 2)]


def test_variables_alone_are_enough():
    config = load(None, {"BALLAST_OFFLINE_QUEUE": "team/llama", "BALLAST_SLO_LATENCY_MILLISECONDS": "30"})

    assert config.queue_name == "team/llama"
    assert config.slo.milliseconds == {"latency": 30}, "no field states that vLLM runs, and it does"


@pytest.mark.parametrize(
    ("text", "environment", "sentence"),
    [
        ("slo: {ttftMilliseconds: fast}", {}, "slo.ttftMilliseconds"),
        ("", {"BALLAST_LIMITS_MAX_BODY_KIBIBYTES": "-1"}, "limits.maxBodyKibibytes"),
        ("[a]", {}, "found list, expected a mapping"),
        ("a: [", {}, "^file is not a valid configuration"),
        ("slots: 2026-13-01", {}, "^file is not a valid configuration"),
        ("", {"BALLAST_SLOTS": "[1"}, "^BALLAST_SLOTS is not a valid configuration"),
        ("", {"BALLAST_SLOTS": "2026-13-01"}, "^BALLAST_SLOTS is not a valid configuration"),
    ],
)
def test_a_wrong_configuration_is_refused_by_the_name_of_its_field(text, environment, sentence):
    with pytest.raises(InvalidConfig, match=sentence):
        parse(text, "file", environment)


def test_fields_that_vllm_decides_are_named():
    text = "model: {uri: /models/a, dtype: float16}\nengine: {threads: 2}\nruntime: {port: 80, namespace: web}"

    assert ignored(parse(text, "file", {})) == ["model", "engine.threads", "runtime.port"]
    assert ignored(parse(FILE, "file", {})) == []
