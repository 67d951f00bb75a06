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


HOT = {
    "slo": {"slo": {"ttftMilliseconds": 321}},
    "tenants": {"offline": {"tenants": [{"name": "research"}]}},
    "generation": {"runtime": {"generation": 7, "created": 3}},
    "limits": {"limits": {"maxQueuedRequests": 9}},
}
COLD = {
    "slots": {"slots": 3},
    "model": {"model": {"uri": "/models/other"}},
    "port": {"runtime": {"port": 8001}},
    "queue": {"offline": {"queue": "team/other"}},
}


@pytest.mark.parametrize("changes", HOT.values(), ids=HOT)
def test_a_change_of_hot_fields_changes_no_argument_so_that_serve_restarts_nothing(changes):
    before, after = application(make_config()), application(make_config(**changes))

    assert before["args"] == after["args"]
    assert before["deployments"][0]["user_config"] != after["deployments"][0]["user_config"]


@pytest.mark.parametrize("changes", COLD.values(), ids=COLD)
def test_a_change_of_another_field_changes_an_argument_so_that_serve_restarts_the_replicas(changes):
    assert application(make_config())["args"] != application(make_config(**changes))["args"]


def test_a_scale_changes_no_argument():
    assert application(make_config())["args"] == application(make_config(), replicas=5)["args"]


def test_serve_holds_no_request_back_that_the_worker_would_queue_or_refuse():
    config = make_config(slots=8, limits={"maxQueuedRequests": 20})

    assert most_requests(config) > 8 + 2 * 20


def test_a_replica_has_time_to_drain():
    config = make_config(runtime={"unreadySeconds": 5, "drainSeconds": 60})

    assert application(config)["deployments"][0]["graceful_shutdown_timeout_s"] > 65
