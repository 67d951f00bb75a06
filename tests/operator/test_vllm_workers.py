"""Workers with vLLM: their pods, their files, and what a condition shows of vLLM's refusals."""

from __future__ import annotations

from typing import Any

import pytest
import resources
import yaml
from operated import Cluster, Operator, until

from ballast_api.conditions import ConditionReason
from ballast_api.inference_deployment import InferenceDeployment
from ballast_api.replicas import UNREADY_SECONDS
from ballast_api.worker_config import WorkerConfig
from ballast_operator.blockers import blocked
from ballast_operator.children.backends import BACKENDS
from ballast_operator.children.config import config_texts, version_of, worker_config
from ballast_operator.children.pods import PROBE_SECONDS, deployment
from ballast_operator.context import OperatorContext
from ballast_operator.pod_problem import BAD_ARGUMENTS_EXIT, pod_problem
from ballast_operator.poll_result import Problem
from ballast_operator.sharing import Sharing
from ballast_vllm.__main__ import BAD_ARGUMENTS

VERSION = "ballast.dev/config-version"
VLLM = {"backend": "vllm"}
NATIVE = {"engine": {"backend": "native"}, "gpu": {"count": 0}}
DRAFT = {"method": "draftModel", "draftUri": "hf://a/draft"}


def make_resource(**spec: Any) -> InferenceDeployment:
    return resources.make_resource(**({"model": {"uri": "hf://a/b"}, "engine": VLLM} | spec))


def pod(**spec: Any) -> dict[str, Any]:
    made: dict[str, Any] = deployment(make_resource(**spec), "v", image="vllm:1", own_keys=frozenset())
    return dict(made["spec"]["template"]["spec"])


def worker(**spec: Any) -> dict[str, Any]:
    (found,) = pod(**spec)["containers"]
    return dict(found)


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container["env"]}


def config(**spec: Any) -> WorkerConfig:
    return worker_config(make_resource(**spec), own_keys=frozenset())


BACKENDS_OF: dict[str, tuple[dict[str, Any], str]] = {
    "GPUs": ({"engine": {}}, "vllm"),
    "no GPU": ({"engine": {}, "gpu": {"count": 0}}, "native"),
    "no GPU, and vLLM named": ({"gpu": {"count": 0}}, "vllm"),
}


@pytest.mark.parametrize("case", BACKENDS_OF)
def test_vllm_runs_a_model_on_gpus_and_the_native_engine_runs_it_on_cpus(case: str) -> None:
    spec, backend = BACKENDS_OF[case]
    container = worker(**spec)

    assert make_resource(**spec).spec.backend == backend
    assert config(**spec).engine.backend == backend
    assert container["command"] == [BACKENDS[backend].command]


def test_the_process_reads_the_same_configuration_as_a_native_worker() -> None:
    found, native = worker(), worker(**NATIVE)

    assert (found["command"], native["command"]) == (["ballast-vllm"], ["ballast-worker"])
    assert found["args"] == native["args"]
    assert found["volumeMounts"] == native["volumeMounts"]


def test_a_worker_has_half_an_hour_to_compile_and_load_unless_the_resource_names_a_time() -> None:
    probe, stated = worker()["startupProbe"], worker(rollout={"startupSeconds": 300})["startupProbe"]
    made = deployment(make_resource(), "v", image="vllm:1", own_keys=frozenset())

    assert probe["failureThreshold"] * probe["periodSeconds"] == 1800
    assert stated["failureThreshold"] * stated["periodSeconds"] == 300
    assert made["spec"]["progressDeadlineSeconds"] == 1800 + 2 * PROBE_SECONDS


def test_a_pod_has_time_to_drain_and_to_end_all_processes_of_vllm() -> None:
    given = pod(rollout={"drainSeconds": 40})["terminationGracePeriodSeconds"]

    assert given == 40 + UNREADY_SECONDS + BACKENDS["vllm"].exit_seconds
    assert BACKENDS["vllm"].exit_seconds > BACKENDS["native"].exit_seconds


def test_a_service_named_vllm_sets_no_variable_that_vllm_reads() -> None:
    assert pod()["enableServiceLinks"] is False
    assert "enableServiceLinks" not in pod(**NATIVE)


MEMORY: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "one GPU": ({}, {"memory": "4096Mi"}),
    "four GPUs": ({"gpu": {"count": 4}}, {"memory": "10240Mi"}),
    "the CPU": ({"gpu": {"count": 0}}, {"memory": "4096Mi"}),
    "the CPU with KV": (
        {"gpu": {"count": 0}, "engine": VLLM | {"kvMemoryMebibytes": 512}},
        {"memory": "4608Mi"},
    ),
    "stated": ({"template": {"resources": {"requests": {"memory": "9Gi"}}}}, {"memory": "9Gi"}),
    "a limit alone": ({"template": {"resources": {"limits": {"memory": "9Gi"}}}}, {}),
    "native": (NATIVE, {}),
}


@pytest.mark.parametrize("case", MEMORY)
def test_the_memory_of_the_processes_is_requested_unless_the_template_names_memory(case: str) -> None:
    spec, expected = MEMORY[case]
    requests = worker(**spec)["resources"]["requests"]

    assert {name: value for name, value in requests.items() if name == "memory"} == expected


def test_several_gpus_share_the_model_in_one_pod() -> None:
    made = pod(gpu={"count": 4})
    (shared,) = [each for each in made["volumes"] if each["name"] == "shared-memory"]

    assert config(gpu={"count": 4}).runtime.tensor_parallel == 4
    assert made["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert shared["emptyDir"]["sizeLimit"] == "4096Mi"
    assert variables(made["containers"][0])["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_DISABLE" not in variables(worker())


def test_a_variable_of_the_template_replaces_that_of_the_operator() -> None:
    own = [{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "HOME", "value": "/data"}]
    env = worker(gpu={"count": 2}, template={"env": own})["env"]

    assert [each for each in env if each["name"] in {"NCCL_DEBUG", "HOME"}] == own


FILES: dict[str, tuple[dict[str, Any], list[list[str]], str, dict[str, str]]] = {
    "all are fetched": (
        {"model": {"uri": "hf://a/b", "adapters": [{"name": "sql", "uri": "s3://c/sql"}]},
         "engine": VLLM | {"speculative": DRAFT}},
        [
            ["ballast", "fetch", "hf://a/b", "/models/model"],
            ["ballast", "fetch", "s3://c/sql", "/models/adapter-0", "--adapter"],
            ["ballast", "fetch", "hf://a/draft", "/models/draft"],
        ],
        "file:///models/adapter-0",
        {"/models": "models"},
    ),
    "the model is in a claim": (
        {"model": {"uri": "pvc://weights/b", "adapters": [{"name": "sql", "uri": "s3://c/sql"}]}},
        [["ballast", "fetch", "s3://c/sql", "/fetched/adapter-0", "--adapter"]],
        "file:///fetched/adapter-0",
        {"/models": "models", "/fetched": "fetched"},
    ),
    "the adapter is in the same claim": (
        {"model": {"uri": "pvc://weights/b", "adapters": [{"name": "sql", "uri": "pvc://weights/sql/"}]}},
        [],
        "file:///models/sql",
        {"/models": "models"},
    ),
    "the adapter is in another claim": (
        {"model": {"uri": "file:///b", "adapters": [{"name": "sql", "uri": "pvc://adapters/sql"}]}},
        [],
        "file:///claims/adapters/sql",
        {"/claims/adapters": "claim-0"},
    ),
    "all are in the image": (
        {"model": {"uri": "file:///b", "adapters": [{"name": "sql", "uri": "file:///sql"}]}},
        [],
        "file:///sql",
        {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_adapters_and_draft_model_come_as_the_model_does(case: str) -> None:
    spec, commands, uri, mounts = FILES[case]
    made = pod(**spec)
    (container,) = made["containers"]
    paths = {each["mountPath"]: each["name"] for each in container["volumeMounts"]}

    assert [each["command"] for each in made.get("initContainers", [])] == commands
    assert [(adapter.name, adapter.uri) for adapter in config(**spec).model.adapters] == [("sql", uri)]
    assert {path: name for path, name in paths.items() if path.startswith(("/models", "/fetched", "/claims"))} == mounts
    assert set(mounts.values()) <= {each["name"] for each in made["volumes"]}


OF_A_CLAIM: dict[str, Any] = {"uri": "pvc://weights/b", "credentialsSecret": "token"}
PRIVATE: dict[str, Any] = {"adapters": [{"name": "sql", "uri": "hf://a/private"}]}
TEMPLATE: dict[str, Any] = {"spec": {"accessModes": ["ReadWriteOnce"]}}
FETCHED_BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "an adapter": ({"model": OF_A_CLAIM | PRIVATE}, {"emptyDir": {}}),
    "a draft model": ({"model": OF_A_CLAIM, "engine": VLLM | {"speculative": DRAFT}}, {"emptyDir": {}}),
    "up to a size": ({"model": OF_A_CLAIM | PRIVATE | {"sizeLimitGibibytes": 2}}, {"emptyDir": {"sizeLimit": "2Gi"}}),
    "to a claim": (
        {"model": OF_A_CLAIM | PRIVATE | {"cache": {"volumeClaimTemplate": TEMPLATE}}},
        {"ephemeral": {"volumeClaimTemplate": TEMPLATE}},
    ),
    "to a cache": ({"model": OF_A_CLAIM | PRIVATE | {"cachePath": "/cache"}}, {"emptyDir": {}}),
}


@pytest.mark.parametrize("case", FETCHED_BESIDE)
def test_private_files_are_fetched_beside_a_model_in_a_claim(case: str) -> None:
    spec, volume = FETCHED_BESIDE[case]
    made = pod(**spec)
    (fetch,) = made["initContainers"]

    assert fetch["envFrom"] == [{"secretRef": {"name": "token"}}]
    assert {"name": "fetched"} | volume in made["volumes"]
    assert ("--cache" in fetch["command"]) == (case == "to a cache")


def test_the_draft_model_is_named_by_its_path_in_the_pod() -> None:
    speculative = config(engine=VLLM | {"speculative": DRAFT}).engine.speculative

    assert speculative is not None
    assert speculative.draft_uri == "file:///models/draft"


def test_arguments_of_a_stored_resource_that_change_nothing_reach_no_new_worker_and_stay_with_older_ones() -> None:
    args = ["--hf-token", "x", "--enforce-eager", "--revision=v2", "--download_dir", "--seed=1", "2"]
    stored = resources.make_resource(engine=VLLM | {"vllm": {"args": args}}, is_stored=True)
    wanted = worker_config(stored, own_keys=frozenset())
    older = wanted.model_copy(update={"engine": stored.spec.engine})
    running, slower = version_of(older), wanted.slo.model_copy(update={"ttft_milliseconds": 7})
    texts = config_texts(wanted.model_copy(update={"slo": slower}), {running: older.dump()}, {running})
    kept = WorkerConfig.parse(texts[running], "test", is_stored=True)

    assert wanted.engine.vllm.args == ("--enforce-eager", "--seed=1", "2")
    assert (kept.engine.vllm.args, kept.slo) == (tuple(args), slower)


def test_a_native_worker_keeps_its_version() -> None:
    before = WorkerConfig.model_validate({"model": {"uri": "file:///m"}})

    assert version_of(before) == version_of(before.model_copy(update={"slo": before.slo}))
    assert version_of(config()) != version_of(config(**NATIVE))


def test_without_an_image_for_vllm_the_children_wait_and_a_condition_names_the_value() -> None:
    known = OperatorContext(image="worker:1", vllm_image="vllm:1")
    assert known.image_of(make_resource()) == "vllm:1"
    assert known.image_of(make_resource(**NATIVE)) == "worker:1"

    unknown = OperatorContext(image="worker:1")
    assert blocked(make_resource(template={"image": "own:1"}), unknown, Sharing()) is None
    found = blocked(make_resource(), unknown, Sharing())
    assert found is not None
    assert (found.status, found.reason) == ("True", ConditionReason.IMAGE_PULL)
    assert "image.vllmWorker" in found.message


ENDED = "ballast-vllm: EngineCore of vLLM ended."
REFUSED = "ballast-vllm: engine.vllm.args: vLLM refuses its arguments: unrecognized arguments: --no-such"


@pytest.mark.parametrize(
    ("code", "output", "expected"),
    [
        (BAD_ARGUMENTS, f"model loaded\n{REFUSED}\n", Problem(ConditionReason.INVALID_SPEC, REFUSED)),
        (70, f"{ENDED}\nnanobind: leaked 3 instances!\nSee https://example.org\n",
         Problem(ConditionReason.CRASHING, f"exit code 70, 2 restarts: {ENDED}")),
    ],
    ids=["a refused argument", "what libraries write at the end"],
)  # fmt: skip
def test_a_worker_that_ends_is_shown_with_its_own_last_line(code: int, output: str, expected: Problem) -> None:
    ended = {"exitCode": code, "reason": "Error", "message": output}
    status = {"name": "worker", "restartCount": 2, "state": {"waiting": {}}, "lastState": {"terminated": ended}}

    assert BAD_ARGUMENTS == BAD_ARGUMENTS_EXIT
    assert pod_problem({"metadata": {"name": "p"}, "status": {"containerStatuses": [status]}}) == expected


@pytest.mark.envtest
def test_a_change_of_the_backend_rolls_the_pods_and_a_hot_change_does_not(operator: Operator, cluster: Cluster) -> None:
    cluster.make(slo={"ttftMilliseconds": 500})
    native = template_of(cluster)
    assert native["spec"]["containers"][0]["image"] == "worker:1"

    cluster.patch("inferencedeployments", "llm", {"spec": {"engine": {"backend": "vllm"}}})
    vllm = until(lambda: changed_template(cluster, native))
    container = vllm["spec"]["containers"][0]
    assert (container["image"], container["command"]) == ("vllm-worker:1", ["ballast-vllm"])
    version = vllm["metadata"]["annotations"][VERSION]
    assert version != native["metadata"]["annotations"][VERSION]

    cluster.patch("inferencedeployments", "llm", {"spec": {"slo": {"ttftMilliseconds": 250}}})
    until(lambda: file_of(cluster, version)["slo"]["ttftMilliseconds"] == 250)
    assert template_of(cluster) == vllm


@pytest.mark.envtest
def test_the_sentence_of_vllms_parser_appears_in_degraded(operator: Operator, cluster: Cluster) -> None:
    cluster.make(engine={"backend": "vllm", "vllm": {"args": ["--no-such"]}})
    pod = until(cluster.pods)[0]
    ended = {
        "exitCode": BAD_ARGUMENTS, "reason": "Error", "message": REFUSED, "startedAt": "2026-01-01T00:00:00Z",
        "finishedAt": "2026-01-01T00:00:09Z",
    }  # fmt: skip
    crashed = {
        "name": "worker", "image": "vllm-worker:1", "imageID": "", "ready": False, "restartCount": 1,
        "state": {"waiting": {"reason": "CrashLoopBackOff"}}, "lastState": {"terminated": ended},
    }  # fmt: skip
    cluster.set_pod(pod["metadata"]["name"], containerStatuses=[crashed])

    found = cluster.says("Degraded", "True")
    assert found["reason"] == "InvalidSpec"
    assert REFUSED in found["message"]


def template_of(cluster: Cluster) -> Any:
    return until(lambda: cluster.get("deployments", "llm")["spec"]["template"])


def changed_template(cluster: Cluster, before: Any) -> Any:
    found = template_of(cluster)
    return found if found != before else None


def file_of(cluster: Cluster, version: str) -> Any:
    return yaml.safe_load(cluster.get("configmaps", "llm-ballast-config")["data"][f"worker-{version}.yaml"])
