"""The documented samples, applied unchanged. One serves; the conditions of the others state what the cluster lacks."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from cluster import Cluster, is_ready, until
from images import WORKER, is_the_image
from release import Release

SAMPLES = Path(__file__).parents[1] / "docs" / "samples"
INVALID = sorted((SAMPLES / "invalid").glob("*.yaml"))
ALL_GPUS = 8
"""What each node offers at first."""


@pytest.mark.short
def test_two_replicas_run_the_image_that_was_built_and_ask_for_a_gpu_each(
    cluster: Cluster, release: Release, namespace: str, first: str
) -> None:
    pods = cluster.pods(first, namespace=namespace)

    assert [is_ready(pod) for pod in pods] == [True, True]
    for pod in pods:
        (container,), (status,) = pod["spec"]["containers"], pod["status"]["containerStatuses"]
        assert is_the_image(status["imageID"], release.images[WORKER])
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "hostNetwork" not in pod["spec"]
        assert not [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]


@pytest.mark.short
def test_ready_says_that_workers_without_a_device_serve_on_the_cpu(
    cluster: Cluster, namespace: str, first: str
) -> None:
    def said() -> str:
        found = cluster.condition(first, "Ready", namespace=namespace)
        return found["message"] if found.get("reason") == "ServingOnCPU" else ""

    assert "run on the CPU: a worker found no GPU" in until(said, seconds=30, said="Ready says ServingOnCPU")


def test_all_is_well_and_configured(cluster: Cluster, namespace: str, first: str) -> None:
    def says() -> dict[str, str]:
        kinds = ("Ready", "Progressing", "Degraded", "ConfigApplied")
        found = {kind: cluster.condition(first, kind, namespace=namespace).get("status", "") for kind in kinds}
        return found if found == wanted else {}

    wanted = {"Ready": "True", "Progressing": "False", "Degraded": "False", "ConfigApplied": "True"}
    assert until(says, seconds=60, said=f"conditions are {wanted}") == wanted


@pytest.mark.parametrize("sample", INVALID, ids=lambda path: path.stem)
def test_an_invalid_sample_is_refused_with_its_sentence(cluster: Cluster, namespace: str, sample: Path) -> None:
    lines = [line.removeprefix("# ") for line in sample.read_text().splitlines() if line.startswith("# ")]
    said = dict(line.split(": ", 1) for line in lines)

    refused = cluster.kubectl("apply", "-n", namespace, "-f", sample, check=False)

    assert refused.returncode == 1
    assert said.get("server", said["error"]) in refused.stderr


LACKS = {
    "cpu": ("Unschedulable", 'persistentvolumeclaim "models" not found|Insufficient cpu'),
    "dra": ("Unschedulable|InvalidPod", "one-gpu|gpu.nvidia.com|resourceclaim|cannot allocate all claims"),
    "everything": ("SecretNotAllowed", "Secret hub-token .* ballast.dev/allow"),
    "minimal": ("ModelNotFound", "Qwen/Qwen3-8B"),
    "model-cache": ("Unschedulable|ModelNotFound", "(?i)persistent ?volume|Qwen/Qwen3-8B"),
    "spot": ("InvalidPod|Unschedulable", 'PriorityClass|priority class|node affinity|"inference"'),
    "tenants": ("SecretNotAllowed", "Secret keys .* ballast.dev/allow"),
}
"""What Degraded says of the samples that need more than this cluster has: a network, claims, Secrets, nodes."""


def test_every_sample_is_applied_somewhere() -> None:
    served = {"first", "laptop", "scaling"}  # the second by the tutorial

    assert {path.stem for path in SAMPLES.glob("*.yaml")} == served | LACKS.keys()


@pytest.mark.parametrize("sample", LACKS)
def test_a_sample_that_cannot_run_here_says_what_it_lacks(cluster: Cluster, namespace: str, sample: str) -> None:
    reason, words = LACKS[sample]
    cluster.apply(SAMPLES / f"{sample}.yaml", namespace=namespace)
    text = (SAMPLES / f"{sample}.yaml").read_text()
    (name,) = re.findall(r"kind: InferenceDeployment\nmetadata:\n  name: (\S+)", text)
    try:
        found = until(degraded(cluster, name, namespace), seconds=120, said=f"{name} is Degraded")
    finally:
        cluster.kubectl("delete", "-n", namespace, "-f", SAMPLES / f"{sample}.yaml")

    assert re.search(reason, found["reason"])
    assert re.search(words, found["message"])


def test_a_sample_that_scales_from_zero_is_ready_with_no_worker(cluster: Cluster, namespace: str) -> None:
    cluster.apply(SAMPLES / "scaling.yaml", namespace=namespace)
    try:
        cluster.kubectl("patch", "infd/batch", "-n", namespace, "--type=merge", "-p", '{"spec": {"replicas": 0}}')
        cluster.wait_ready("batch", namespace=namespace, seconds=60)

        assert cluster.condition("batch", "Ready", namespace=namespace)["reason"] == "ScaledToZero"
    finally:
        cluster.kubectl("delete", "-n", namespace, "-f", SAMPLES / "scaling.yaml")


def test_one_gpu_too_many_is_degraded_in_the_schedulers_words_and_recovers(
    cluster: Cluster, namespace: str, first: str
) -> None:
    nodes, pods = cluster.provider.nodes(), cluster.pods(first, namespace=namespace)
    used = Counter(pod["spec"]["nodeName"] for pod in pods)
    for node in nodes:
        cluster.provider.offer_gpus(used[node], node)
    try:
        cluster.kubectl("scale", f"infd/{first}", "-n", namespace, "--replicas=3")
        found = until(degraded(cluster, first, namespace), seconds=60, said="Degraded")
        assert found["reason"] == "Unschedulable"
        assert "Insufficient nvidia.com/gpu" in found["message"]
        assert "2 of 3 workers are ready" in cluster.condition(first, "Ready", namespace=namespace)["message"]

        cluster.provider.offer_gpus(used[nodes[0]] + 1, nodes[0])
        cluster.wait_pods(first, 3, namespace=namespace)
        until(lambda: not degraded(cluster, first, namespace)(), seconds=60, said="no longer Degraded")
        cluster.wait_ready(first, namespace=namespace)
    finally:
        cluster.provider.offer_gpus(ALL_GPUS)
        cluster.kubectl("scale", f"infd/{first}", "-n", namespace, "--replicas=2")
    cluster.wait_pods(first, 2, namespace=namespace)


def degraded(cluster: Cluster, name: str, namespace: str) -> Callable[[], dict[str, str]]:
    """Return the condition `Degraded` if it is True."""

    def found() -> dict[str, str]:
        condition = cluster.condition(name, "Degraded", namespace=namespace)
        return condition if condition.get("status") == "True" else {}

    return found
