"""A resource moves from the native engine to vLLM, and answers with tools, schemas and logprobs.

The image has vLLM for a CPU. It takes several minutes and several gigabytes to build.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import adapters
import jobs
import pytest
import yaml
from client import Client
from cluster import INFD, Cluster, until
from images import VLLM_WORKER
from programs import ROOT
from reference import greedy
from release import Release
from small_vllm import ARGUMENTS, START_SECONDS, template
from small_vllm import ENGINE as SMALL

NAME = "second"
ITEMS = 500
LONG = 800
"""Items of a job that has long to go when something breaks."""
MANIFEST: dict[str, Any] = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"name": NAME},
    "spec": {
        "model": {"uri": "file:///opt/ballast/models/ballast-tiny", "dtype": "float32", "maxModelLen": 1024},
        "gpu": {"count": 0},
        "slots": 8,
        "rollout": {"drainSeconds": 10},
    },
}
ENGINE = SMALL | {
    "vllm": {
        "args": [
            *ARGUMENTS,
            "--enable-auto-tool-choice",
            "--tool-call-parser=hermes",
            # Without it, a model this small may fill its answer with spaces.
            '--structured-outputs-config={"backend": "xgrammar", "disable_any_whitespace": true}',
        ]
    },
}


@pytest.fixture(scope="module")
def node(cluster: Cluster, release: Release) -> str:
    """Build the image with vLLM. Return the node that has it."""
    return cluster.provider.add(VLLM_WORKER)


@pytest.fixture(scope="module")
def native(cluster: Cluster, node: str, namespace: str) -> dict[str, Any]:
    """Run the resource on the native engine. Return its pod."""
    (pod,) = cluster.start(MANIFEST, namespace=namespace)
    return pod


def with_vllm(node: str, **engine: Any) -> dict[str, Any]:
    return {"engine": ENGINE | engine, "template": template(node)}


@pytest.fixture(scope="module")
def vllm(cluster: Cluster, namespace: str, node: str, native: dict[str, Any]) -> dict[str, Any]:
    """Move the resource to vLLM. Return its pod."""
    cluster.patch(NAME, with_vllm(node), namespace=namespace)
    until(
        lambda: commands(cluster, namespace) == [["ballast-vllm"]] and cluster.ready_pods(NAME, namespace=namespace),
        seconds=START_SECONDS,
        said="one pod with vLLM is ready, and that of the native engine is gone",
    )
    (pod,) = cluster.pods(NAME, namespace=namespace)
    return pod


def commands(cluster: Cluster, namespace: str) -> list[list[str]]:
    return [pod["spec"]["containers"][0]["command"] for pod in cluster.pods(NAME, namespace=namespace)]


@pytest.fixture(scope="module")
def url(cluster: Cluster, namespace: str) -> str:
    return f"{cluster.get(INFD, NAME, namespace=namespace)['status']['endpoint']}/v1"


def test_the_sentence_of_vllm_is_shown_while_the_native_worker_serves_on(
    cluster: Cluster, namespace: str, node: str, native: dict[str, Any]
) -> None:
    cluster.patch(NAME, with_vllm(node, vllm={"args": ["--no-such-argument"]}), namespace=namespace)

    def refused() -> str:
        found = cluster.condition(NAME, "Degraded", namespace=namespace)
        return found["message"] if found.get("reason") == "InvalidSpec" else ""

    said = until(refused, seconds=START_SECONDS, said="Degraded has vLLM's sentence")
    ready = [pod["metadata"]["name"] for pod in cluster.ready_pods(NAME, namespace=namespace)]

    assert "unrecognized arguments: --no-such-argument" in said
    assert ready == [native["metadata"]["name"]]


def test_the_worker_moves_to_vllm_with_a_pod_that_is_restricted(
    cluster: Cluster, namespace: str, vllm: dict[str, Any]
) -> None:
    (container,) = vllm["spec"]["containers"]

    assert container["image"] == VLLM_WORKER.name
    assert container["securityContext"]["readOnlyRootFilesystem"]
    assert container["resources"]["requests"]["memory"] == f"{4096 + ENGINE['kvMemoryMebibytes']}Mi"
    assert cluster.condition(NAME, "Degraded", namespace=namespace)["status"] == "False"
    until(
        lambda: cluster.condition(NAME, "ConfigApplied", namespace=namespace).get("status") == "True",
        seconds=60,
        said="the worker reports its configuration",
    )


def test_a_tool_call_and_a_schema_come_through_the_service(client: Client, url: str, vllm: dict[str, Any]) -> None:
    found = client.script("structured.py", url, "ballast-tiny")

    assert found["tool"] == "weather"
    for answer in (found["arguments"], found["answer"]):
        assert list(answer) == ["city"]
        assert answer["city"] in {"Oslo", "Lima"}


def test_a_job_with_logprobs_and_several_choices_is_complete(
    client: Client, namespace: str, vllm: dict[str, Any]
) -> None:
    queue = f"{namespace}/{NAME}"
    chat = {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    text = {"prompt": "Once", "n": 2}
    lines = [
        {
            "custom_id": f"i{number}",
            "url": "/v1/chat/completions" if number % 2 else "/v1/completions",
            "body": {"model": "ballast-tiny", "max_tokens": 8} | (chat if number % 2 else text),
        }
        for number in range(ITEMS)
    ]

    results = jobs.results(client, lines, queue=queue, seconds=600)

    assert len(results) == ITEMS
    for number in range(ITEMS):
        choices = results[f"i{number}"]["response"]["body"]["choices"]
        if number % 2:
            assert len(choices[0]["logprobs"]["content"][0]["top_logprobs"]) == 2
        else:
            assert len(choices) == 2


def test_a_hot_change_reaches_the_same_pod(cluster: Cluster, namespace: str, vllm: dict[str, Any]) -> None:
    slots = cluster.get(INFD, NAME, namespace=namespace)["status"]["slots"]

    cluster.hot_patch(NAME, {"offline": {"reservedPercent": 50}}, namespace=namespace)
    (pod,) = cluster.ready_pods(NAME, namespace=namespace)

    assert slots == {"online": 7, "offline": 1}
    assert pod["metadata"]["uid"] == vllm["metadata"]["uid"]


EMBEDDER = SMALL | {"vllm": {"args": [*ARGUMENTS, "--runner=pooling", "--convert=embed"]}}
TEXTS = ("a ship", "the harbour", "a storm", "the cargo")


def test_a_second_resource_embeds_the_texts_of_a_job(
    cluster: Cluster, client: Client, namespace: str, node: str
) -> None:
    queue = f"{namespace}/embedder"
    spec = MANIFEST["spec"] | {"engine": EMBEDDER, "template": template(node)}
    cluster.apply(MANIFEST | {"metadata": {"name": "embedder"}, "spec": spec}, namespace=namespace)
    try:
        cluster.wait_ready("embedder", namespace=namespace, seconds=START_SECONDS)
        bodies = [{"model": jobs.MODEL, "input": TEXTS[number % len(TEXTS)]} for number in range(40)]
        lines = [{"custom_id": f"e{i}", "url": "/v1/embeddings", "body": body} for i, body in enumerate(bodies)]
        results = jobs.results(client, lines, queue=queue, seconds=180)
    finally:
        cluster.kubectl("delete", "infd", "embedder", "-n", namespace, "--timeout=60s", seconds=70)
    vectors = [results[f"e{number}"]["response"]["body"]["data"][0]["embedding"] for number in range(40)]

    assert len({tuple(vector) for vector in vectors}) == len(TEXTS)
    for number, vector in enumerate(vectors):
        assert sum(x * x for x in vector) == pytest.approx(1, abs=1e-3)
        assert vector == pytest.approx(vectors[number % len(TEXTS)], abs=1e-5)


def test_adapters_answer_with_their_weights_for_their_tenants(
    cluster: Cluster, client: Client, namespace: str, node: str, tmp_path: Path
) -> None:
    queue = f"{namespace}/adapted"
    folders = {name: adapters.make(tmp_path / name, seed=seed) for seed, name in enumerate(("shared", "contracts"))}
    cluster.apply(*(adapters.config_map(folder) for folder in folders.values()), namespace=namespace)
    listed: list[dict[str, Any]] = [{"name": name, "uri": f"file:///adapters/{name}"} for name in folders]
    listed[1]["tenants"] = ["legal"]
    spec = MANIFEST["spec"] | {
        "model": MANIFEST["spec"]["model"] | {"adapters": listed},
        "engine": SMALL,
        "template": template(node) | adapters.mounted(*folders),
    }
    cluster.apply(MANIFEST | {"metadata": {"name": "adapted"}, "spec": spec}, namespace=namespace)

    def results(models: list[str], tenant: str) -> dict[str, Any]:
        lines = [
            line | {"custom_id": f"{model}-{number}", "body": line["body"] | {"model": model}}
            for model in models
            for number, line in enumerate(jobs.lines(10))
        ]
        return jobs.results(client, lines, queue=queue, options=("--tenant", tenant), seconds=180)

    try:
        cluster.wait_ready("adapted", namespace=namespace, seconds=START_SECONDS)
        url = f"{cluster.get(INFD, 'adapted', namespace=namespace)['status']['endpoint']}/v1"
        legal, research = results([jobs.MODEL, *folders], "legal"), results(["shared", "contracts"], "research")
        online = client.script("chat.py", url, "shared", "Hi")
        refused = client.script("refused.py", url, "contracts", "Hi")
    finally:
        cluster.kubectl("delete", "infd", "adapted", "-n", namespace, "--timeout=60s", seconds=70)

    for found, models in ((legal, (jobs.MODEL, *folders)), (research, ("shared",))):
        for model in models:
            for number in range(10):
                wanted = greedy(jobs.prompt(number), 16, folders.get(model))
                assert found[f"{model}-{number}"]["response"]["body"]["choices"][0]["text"] == wanted
    for number in range(10):
        assert "The model `contracts` does not exist" in json.dumps(research[f"contracts-{number}"]["error"])
    assert online["model"] == "shared"
    assert refused["status"] == 404
    assert "The model `contracts` does not exist" in refused["message"]


KILL = """
import os, pathlib, signal
for found in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    process = int(found.parent.name)
    if process != os.getpid() and b"EngineCore" in found.read_bytes():
        os.kill(process, signal.SIGKILL)
        print(process)
"""


def test_the_death_of_enginecore_restarts_the_worker_and_loses_no_item(
    cluster: Cluster, client: Client, namespace: str, vllm: dict[str, Any]
) -> None:
    name = vllm["metadata"]["name"]
    job = jobs.submit(client, f"{namespace}/{NAME}", LONG, most=128)
    job.wait_leased()

    killed = cluster.exec(name, "python3", "-c", KILL, namespace=namespace).stdout.split()

    assert killed
    assert job.counts["succeeded"] < job.count, "the job was over before"
    cluster.wait_restarted(name, 1, namespace=namespace, seconds=START_SECONDS)
    job.finish(seconds=900, compared=6)


def test_a_pod_that_is_deleted_gives_its_items_back(
    cluster: Cluster, client: Client, namespace: str, vllm: dict[str, Any]
) -> None:
    # If an attempt was spent, the counts of the job would show a lost item.
    cluster.hot_patch(NAME, {"offline": {"maxAttempts": 1}}, namespace=namespace)
    job = jobs.submit(client, f"{namespace}/{NAME}", LONG, most=128)
    job.wait_leased()

    cluster.kubectl("delete", "pod", vllm["metadata"]["name"], "-n", namespace, "--wait=false")

    assert job.counts["succeeded"] < job.count, "the job was over before"
    job.finish(seconds=900, compared=6)
    (pod,) = cluster.wait_pods(NAME, 1, namespace=namespace, seconds=START_SECONDS)
    assert pod["metadata"]["uid"] != vllm["metadata"]["uid"]


GUIDE = ROOT / "docs" / "how-to" / "vllm.md"
PLAIN = "plain"
"""The namespace of the Deployment in the guide."""


@pytest.fixture
def plain(cluster: Cluster, release: Release, node: str) -> Iterator[str]:
    """Apply the Deployment and the Service of the guide. Return the URL of the Service.

    Image, model, Redis and device are those of this cluster, and the pod may use the Valkey of the chart.
    """
    found = re.search(r"```yaml\n(apiVersion: apps/v1\n.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    deployment, service = yaml.safe_load_all(found.group(1))
    pod = deployment["spec"]["template"]
    pod["metadata"]["labels"]["ballast.dev/queue-client"] = "true"
    pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": node}
    pod["spec"]["volumes"][0] = {"name": "models", "emptyDir": {}}
    (container,) = pod["spec"]["containers"]
    container["image"] = VLLM_WORKER.name
    own = {"/models/llama-3.2-1b": "/opt/ballast/models/ballast-tiny", "llama": jobs.MODEL}
    container["command"] = [*(own.get(word, word) for word in container["command"]), *FOR_CPU]
    container["resources"] = {}
    container["env"] += [
        {"name": name, "value": value}
        for name, value in {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            # If an attempt was spent, the counts of a job would show a lost item.
            "BALLAST_OFFLINE_MAX_ATTEMPTS": "1",
            **({"BALLAST_RUNTIME_REDIS_CA_FILE": "/etc/ballast/redis/ca.crt"} if release.redis_ca else {}),
        }.items()
    ]
    url = release.redis_url.replace("://", f"://:{release.redis_password}@")
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "ballast-redis"},
        "stringData": {"url": url, "ca.crt": release.redis_ca},
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": PLAIN}}
    try:
        cluster.apply(namespace, namespace="default")
        cluster.apply(secret, deployment, service, namespace=PLAIN)
        wait_rolled_out(cluster)
        yield f"http://llama.{PLAIN}:8000/v1"
    finally:
        cluster.kubectl("delete", "namespace", PLAIN, "--ignore-not-found", "--timeout=120s", seconds=130)


FOR_CPU = (*ARGUMENTS, "--dtype=float32", "--max-model-len=1024", "--max-num-seqs=8")


def wait_rolled_out(cluster: Cluster) -> None:
    words = ("rollout", "status", "deployment/llama", "-n", PLAIN, f"--timeout={START_SECONDS}s")
    cluster.kubectl(*words, seconds=START_SECONDS + 10)


def test_the_deployment_of_the_guide_serves_and_keeps_each_item_of_a_job_over_a_rollout(
    cluster: Cluster, client: Client, plain: str
) -> None:
    answer = client.script("chat.py", plain, jobs.MODEL, "Hi")
    job = jobs.submit(client, "team/llama", LONG, most=128)
    job.wait_leased()

    cluster.kubectl("rollout", "restart", "deployment/llama", "-n", PLAIN)
    wait_rolled_out(cluster)

    assert answer["usage"]["completion_tokens"] == 16
    assert job.counts["succeeded"] < job.count, "the job was over before"
    job.finish(seconds=900, compared=6)
