"""The configuration of Ray Serve follows from that of a worker."""

from __future__ import annotations

import pytest

from ballast_api.serve_config import most_requests, serve_config
from ballast_api.worker_config import WorkerConfig


def make_config(**changes) -> WorkerConfig:
    return WorkerConfig.model_validate({"model": {"uri": "/models/m"}} | changes)


def application(config: WorkerConfig, **terms):
    [found] = serve_config(config, config.dump(), **({"replicas": 1, "gpus": 0} | terms))["applications"]
    return found


CHANGES = {
    "slo": ({"slo": {"ttftMilliseconds": 321}}, True),
    "tenants": ({"offline": {"tenants": [{"name": "research"}]}}, True),
    "generation": ({"runtime": {"generation": 7, "created": 3}}, True),
    "limits": ({"limits": {"maxQueuedRequests": 9}}, True),
    "slots": ({"slots": 3}, False),
    "model": ({"model": {"uri": "/models/other"}}, False),
    "port": ({"runtime": {"port": 8001}}, False),
    "queue": ({"offline": {"queue": "team/other"}}, False),
}


@pytest.mark.parametrize(("changes", "is_hot"), CHANGES.values(), ids=CHANGES)
def test_a_change_changes_an_argument_so_that_serve_restarts_the_replicas_unless_it_is_hot(changes, is_hot):
    before, after = application(make_config()), application(make_config(**changes))

    assert (before["args"] == after["args"]) is is_hot
    assert before["deployments"][0]["user_config"] != after["deployments"][0]["user_config"]


def test_a_change_of_a_field_that_only_vllm_has_changes_an_argument():
    """The default backend, which is the native one, refuses these fields."""
    adapters = [{"name": "a", "uri": "file:///models/a"}]
    engine = {"backend": "vllm"}
    configs = [
        make_config(engine=engine),
        make_config(engine=engine, model={"uri": "/models/m", "adapters": adapters}),
        make_config(engine=engine | {"vllm": {"args": ["--enforce-eager"]}}),
    ]

    assert len({application(config)["args"]["cold_fields"] for config in configs}) == 3


def test_a_scale_changes_no_argument():
    assert application(make_config())["args"] == application(make_config(), replicas=5)["args"]


def test_serve_holds_no_request_back_that_the_worker_would_queue_or_refuse():
    config = make_config(slots=8, limits={"maxQueuedRequests": 20})
    without_slots = make_config(engine={"backend": "vllm"}, limits={"maxQueuedRequests": 20})

    assert most_requests(config) > 8 + 2 * 20
    assert most_requests(without_slots) > 1024 + 2 * 20  # the slots of vLLM 0.32 on a GPU of 80 GB


def test_a_replica_has_time_to_drain():
    config = make_config(runtime={"unreadySeconds": 5, "drainSeconds": 60})

    assert application(config)["deployments"][0]["graceful_shutdown_timeout_s"] > 65


@pytest.mark.parametrize(
    ("runtime", "most"),
    [({}, 1), ({"port": 0}, None), ({"port": 0, "metricsPort": 9400}, 1), ({"port": 0, "metricsPort": 0}, None)],
)
def test_replicas_with_one_port_run_on_a_node_each(runtime, most):
    assert application(make_config(runtime=runtime))["deployments"][0].get("max_replicas_per_node") == most


def test_a_model_over_several_nodes_has_a_bundle_on_each_of_them():
    config = make_config(engine={"backend": "vllm"}, runtime={"nodes": 2, "tensorParallel": 16})

    deployment = application(config, gpus=8)["deployments"][0]

    assert deployment["placement_group_bundles"] == [{"CPU": 1, "GPU": 8}] * 2
    assert deployment["placement_group_strategy"] == "STRICT_SPREAD"
    assert deployment["ray_actor_options"] == {"num_cpus": 1, "num_gpus": 8}


def test_the_gpus_of_a_model_must_be_the_same_number_on_each_node():
    with pytest.raises(ValueError, match=r"must be a multiple of runtime\.nodes"):
        make_config(engine={"backend": "vllm"}, runtime={"nodes": 3, "tensorParallel": 16})
