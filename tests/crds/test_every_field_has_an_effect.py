"""No field is accepted and ignored. The tests change each leaf of the schema, and expect an effect.

A field of the resource must change an object or a decision of the operator. A field of the worker's configuration must
change the settings of engine, policy or queue, or name the test that shows its effect.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from every_field import BY_OWN_REDIS, BY_SCALING, EVERYTHING, REFUSED, SPEC, changed, everything, filled
from queue_objects import make_status

from ballast_api import crd
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.replicas import Scaling
from ballast_api.status import ScalingStatus
from ballast_api.structural import leaves, structural
from ballast_api.worker_config import WorkerConfig
from ballast_operator import report
from ballast_operator.conditions.chains import conditions
from ballast_operator.conditions.given import Given
from ballast_operator.context import OperatorContext
from ballast_operator.inference_deployment import plan
from ballast_operator.kinds import DEPLOYMENT, Key
from ballast_operator.plan import ChildrenPlan, ClusterSnapshot
from ballast_operator.poll_result import PollResult
from ballast_operator.resource_status import status
from ballast_operator.scaling import Fleet, History, scale
from ballast_policy.snapshot import PolicyConfig
from ballast_queue.job import RequestCounts
from ballast_queue.status import ClassLoad, QueueStats
from ballast_worker import settings

TESTS = Path(__file__).parents[1]
STATUS = crd.schema()["properties"]["status"]
CONFIG = structural(WorkerConfig)

TO_VLLM = "vllm/messages/test_arguments.py::test_a_field_changes_the_arguments_of_vllm"
SHOWN_BY: dict[str, str] = {
    "engine.backend": "vllm/messages/test_arguments.py::test_each_server_refuses_the_backend_of_the_other",
    "engine.quantization": TO_VLLM,
    "engine.kvDtype": TO_VLLM,
    "engine.speculative.draftTokens": TO_VLLM,
    "engine.speculative.draftUri": TO_VLLM,
    "engine.vllm.args": "vllm/test_serve_arguments.py::test_an_argument_of_the_resource_reaches_vllm",
    "model.adapters[].name": TO_VLLM,
    "model.adapters[].uri": TO_VLLM,
    "model.adapters[].tenants": "vllm/messages/test_adapters.py::test_an_adapter_exists_only_for_its_tenants",
    "slo.objectivePercent": "alerts/test_rules.py::test_the_thresholds_follow_the_objective",
    "offline.queue": "alerts/test_rules.py::test_a_named_queue_is_the_one_that_is_watched",
    "limits.maxQueuedRequests": "worker/test_limits.py::test_a_full_queue_is_a_429_with_the_time_to_try_again",
    "limits.maxQueueMilliseconds": "worker/test_limits.py::test_a_request_that_would_wait_too_long_is_a_429",
    "cost.dollarsPerGpuHour": "worker/test_metrics.py::test_the_price_of_the_device_is_split_by_service_and_adds_up",
}
"""Leaves of the worker's configuration that neither engine, policy nor queue read."""


def made(spec: dict[str, Any]) -> list[Any]:
    """Return all objects that the operator writes for a new resource."""
    resource = InferenceDeployment.read(EVERYTHING | {"spec": spec}, "here")
    context = OperatorContext(image="worker", kinds=frozenset({"ServiceMonitor", "PrometheusRule", "RayService"}))
    return [step.manifest for step in plan(resource, ClusterSnapshot(uid="1"), context).apply]


@pytest.mark.parametrize("leaf", sorted(set(leaves(SPEC)) - set(REFUSED) - BY_SCALING - BY_OWN_REDIS))
def test_a_field_changes_what_the_operator_makes(leaf: str) -> None:
    before, after = changed(everything(), leaf, SPEC)

    assert before != after
    assert made(before) != made(after)


def polls() -> Iterator[tuple[float, PollResult]]:
    """Yield four hours of load: a rise, a backlog, and the end of both."""
    for minute in range(240):
        online = 40 if 10 <= minute < 60 else 0
        depth = 900 if 90 <= minute < 120 else 0
        loads: dict[str, Any] = {"online": ClassLoad(running=online), "offline_reserved": 2}
        worker = make_status(at=minute * 60, slots=16, **loads)
        counts = RequestCounts(waiting=depth)
        queue = QueueStats(at=0, items=counts, inbox=0, oldest_waiting_seconds=0, dead_letters=0, jobs={})
        for second in (0, 20, 40):
            yield minute * 60 + second, PollResult(at=minute * 60 + second, workers=(worker,), queue=queue)


def decided(spec: dict[str, Any]) -> list[int]:
    scaling = Scaling.model_validate(spec)
    replicas, history, decisions = 1, History(), []
    for now, poll in polls():
        decision = scale(scaling, Fleet(replicas, min(replicas, 1)), poll=poll, now=now, history=history)
        replicas, history = decision.replicas, decision.history
        decisions.append(replicas)
    return decisions


@pytest.mark.parametrize("leaf", sorted(BY_SCALING))
def test_a_field_changes_how_replicas_follow_the_load(leaf: str) -> None:
    base = {
        "minReplicas": 0, "maxReplicas": 6, "headroomPercent": 0, "offlineMaxReplicas": 3,
        "scaleUpSeconds": 60, "scaleDownSeconds": 300, "idleSeconds": 900,
    }  # fmt: skip
    step = {
        "headroomPercent": 50,
        "scaleUpSeconds": 120,
        "scaleDownSeconds": 600,
        "idleSeconds": 1800,
        "maxReplicas": 4,
    }
    name = leaf.removeprefix("scaling.")

    assert decided(base) != decided(base | {name: step.get(name, base[name] + 1)})


def derived(values: dict[str, Any]) -> tuple[Any, ...]:
    """Return the settings of engine, policy and queue."""
    config = WorkerConfig.model_validate(values)
    folder = Path("/models/qwen3")
    return (
        settings.engine_options(config, folder),
        settings.policy_config(config, PolicyConfig(slots=8, num_blocks=64)),
        settings.queue_settings(config, ("model",)),
        settings.model_revision(config, folder),
        settings.served_names(config, folder),
    )


def worker_leaves() -> list[str]:
    """Return the leaves of the sections that resource and worker share. Only the operator writes `runtime`."""
    return [
        leaf
        for leaf in leaves(CONFIG)
        if leaf not in REFUSED and leaf not in SHOWN_BY and leaf.partition(".")[0] not in {"runtime", "ray"}
    ]


@pytest.mark.parametrize("leaf", [leaf for leaf in worker_leaves() if leaf != "model.uri"])
def test_a_field_changes_the_settings_of_a_worker(leaf: str) -> None:
    shared = {name: value for name, value in everything().items() if name in CONFIG["properties"]}
    shared["model"] = {n: v for n, v in shared["model"].items() if n in CONFIG["properties"]["model"]["properties"]}
    before, after = changed(shared, leaf, CONFIG)

    assert derived(before) != derived(after)


def test_the_model_is_read_from_its_uri(tmp_path: Path) -> None:
    config = WorkerConfig.model_validate({"model": {"uri": f"file://{tmp_path}"}})

    assert settings.model_directory(config) == tmp_path


@pytest.mark.parametrize("test", sorted(set(SHOWN_BY.values())))
def test_a_test_that_shows_an_effect_exists(test: str) -> None:
    path, _, name = test.partition("::")
    functions = [node.name for node in ast.walk(ast.parse((TESTS / path).read_text())) if hasattr(node, "name")]

    assert name in functions


def test_every_exception_names_a_field() -> None:
    known = {*leaves(SPEC), *leaves(CONFIG)}

    assert set(REFUSED) | set(SHOWN_BY) <= known


def test_equal_resources_have_equal_objects() -> None:
    assert made(everything()) == made(everything())


def test_every_field_of_the_status_is_reported() -> None:
    about = {"metadata": {"name": "all", "generation": 3}, "status": {"queue": "before"}}
    resource = InferenceDeployment.read(EVERYTHING | about, "here")
    counts = {"replicas": 2, "readyReplicas": 2, "updatedReplicas": 1, "observedGeneration": 1}
    deployment = {"metadata": {"generation": 1, "ownerReferences": [{"uid": "1"}]}, "spec": {}, "status": counts}
    now, poll = next((now, poll) for now, poll in polls() if now >= 600)
    snapshot = ClusterSnapshot("1", {Key(DEPLOYMENT, "default", "all"): deployment})
    given = Given(resource, snapshot, ChildrenPlan(files={"v": "abc"}, version="v"), poll, now)
    found = report.conditions(conditions(given), resource.status, generation=3, now=now)
    wanted = status(given, found, ScalingStatus(replicas=4, because="load"))
    wanted = wanted.model_copy(update={"operator": "ballast/ballast-operator"})  # each reconciliation sets it
    reported = report.status_manifest(resource.metadata, wanted)["status"]

    assert set(leaves(STATUS)) == {leaf for leaf, value in filled(reported, STATUS) if value}
