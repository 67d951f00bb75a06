"""The configuration of Ballast inside vLLM, which needs no vLLM to be read, and when it is in force."""

from __future__ import annotations

from pathlib import Path

import pytest
from served_vllm import running, wait_until

from ballast_api.errors import InvalidConfig
from ballast_vllm.configuration import ignored, load, parse
from ballast_worker.http_connection import Connections, HttpLimits

pytestmark = pytest.mark.anyio

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


@pytest.mark.parametrize(("asked", "slots"), [("1", 1), ("100", 2)])
async def test_the_policy_of_the_configuration_is_in_force_from_the_start(variables, asked, slots):
    variables("BALLAST_SLOTS", asked)
    variables("BALLAST_SLO_TTFT_MILLISECONDS", "250")
    async with running() as found:
        (message,) = found.engine.configured

    assert (message["slots"], message["ttft"]) == (slots, 0.25)


async def test_a_configuration_is_in_force_only_when_enginecore_took_it_and_is_tried_again(vllm_queue, config_file):
    config_file.write_text("runtime: {generation: 1}")
    async with running() as found:
        await wait_until(lambda: vllm_queue.settings.read().generation == 1)
        core, calls = found.engine.engine_core, []
        call, first = core.call_utility_async, found.server.policy

        async def failing(method, argument):
            if method == "ballast_configure":
                calls.append(argument)
                raise TimeoutError
            return await call(method, argument)

        core.call_utility_async = failing
        config_file.write_text("runtime: {generation: 2}\nslo: {ttftMilliseconds: 250}")
        await wait_until(lambda: len(calls) > 1)
        failed = found.server.status().generation, vllm_queue.settings.read().generation, found.server.policy == first
        core.call_utility_async = call
        await wait_until(lambda: found.server.status().generation == 2)
        await wait_until(lambda: vllm_queue.settings.read().generation == 2)

        assert (failed, found.engine.configured[-1]["ttft"], found.server.policy.ttft) == ((1, 1, True), 0.25, 0.25)


async def test_the_latency_of_a_model_that_returns_vectors_changes_while_it_serves(config_file):
    config_file.write_text("slo: {latencyMilliseconds: 30}")
    async with running(model_config={"runner_type": "pooling"}) as found:
        config_file.write_text("slo: {latencyMilliseconds: 20}")
        await wait_until(lambda: len(found.engine.configured) > 1)

        assert [(message["ttft"], message["tpot"]) for message in found.engine.configured] == [
            (0.03, None),
            (0.02, None),
        ]


async def test_a_model_that_generates_keeps_its_slo_when_a_latency_is_set(config_file):
    config_file.write_text("slo: {ttftMilliseconds: 250}")
    async with running(model_config={"runner_type": "generate"}) as found:
        config_file.write_text("slo: {latencyMilliseconds: 20}")
        await wait_until(lambda: b"ballast_config_invalid 1.0" in found.server.metrics.render())
        slo, num_configured = found.server.config.slo.milliseconds, len(found.engine.configured)

    assert slo["ttft"] == 250
    assert num_configured == 1


async def test_the_price_of_a_worker_is_that_of_all_its_gpus(variables):
    variables("BALLAST_COST_DOLLARS_PER_GPU_HOUR", "2.5")
    async with running() as found:
        assert found.server.dollars_per_hour == 5


async def test_raised_limits_raise_the_memory_for_bodies_and_the_number_of_connections(config_file):
    config_file.write_text("limits: {maxBodyKibibytes: 1024, maxQueuedRequests: 1}")
    async with running() as found:
        connections = found.app.state.connections = Connections(HttpLimits())
        slots, before = found.server.policy.slots, found.server.bodies.limit
        config_file.write_text("limits: {maxBodyKibibytes: 204800, maxQueuedRequests: 101}")
        await wait_until(lambda: found.server.config.limits.max_queued_requests == 101)

        assert (before, found.server.bodies.limit) == (256 * 1024 * 1024, 800 * 1024 * 1024)
        assert connections.limits.connections - HttpLimits.beside(slots).connections == 404
