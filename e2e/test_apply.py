"""The documented samples, applied unchanged. One serves; the conditions of the others state what the cluster lacks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, is_ready, until
from images import WORKER, is_the_image
from release import Release

SAMPLES = Path(__file__).parents[1] / "docs" / "samples"
ALL_GPUS = 8
"""What each node offers at first."""
WAITING: dict[str, Any] = {
    "apiVersion": "ballast.dev/v1alpha1",
    "kind": "InferenceDeployment",
    "metadata": {"name": "waiting"},
    "spec": {
        "model": {"uri": "file:///opt/ballast/models/ballast-tiny"},
        "template": {"image": WORKER.name, "resources": {"requests": {"memory": "256Mi"}}},
    },
}


@pytest.mark.short
def test_two_replicas_run_the_image_that_was_built_without_a_gpu(
    cluster: Cluster, release: Release, namespace: str, first: str
) -> None:
    pods = cluster.pods(first, namespace=namespace)

    assert [is_ready(pod) for pod in pods] == [True, True]
    for pod in pods:
        (container,), (status,) = pod["spec"]["containers"], pod["status"]["containerStatuses"]
        assert is_the_image(status["imageID"], release.images[WORKER])
        assert container["command"] == ["ballast-worker"]
        assert set(container["resources"]["limits"]) == {"memory"}
        assert container["securityContext"]["readOnlyRootFilesystem"]
        assert "hostNetwork" not in pod["spec"]
        assert not [volume for volume in pod["spec"]["volumes"] if "hostPath" in volume]


def test_all_is_well_and_configured(cluster: Cluster, namespace: str, first: str) -> None:
    def says() -> dict[str, str]:
        kinds = ("Ready", "Progressing", "Degraded", "ConfigApplied")
        found = {kind: cluster.condition(first, kind, namespace=namespace).get("status", "") for kind in kinds}
        return found if found == wanted else {}

    wanted = {"Ready": "True", "Progressing": "False", "Degraded": "False", "ConfigApplied": "True"}
    assert until(says, seconds=60, said=f"conditions are {wanted}") == wanted


LACKS = {
    "cpu": ("Unschedulable", 'persistentvolumeclaim "models" not found|Insufficient cpu'),
    "dra": ("Unschedulable|InvalidPod", "one-gpu|gpu.nvidia.com|resourceclaim|cannot allocate all claims"),
    "encoder": ("ModelNotFound", "BAAI/bge-large-en-v1.5"),
    "everything": ("SecretNotAllowed", "Secret (certificate|hub-token) .* ballast.dev/allow"),
    "minimal": ("ModelNotFound", "Qwen/Qwen3-8B"),
    "model-cache": ("Unschedulable|ModelNotFound", "(?i)persistent ?volume|Qwen/Qwen3-8B"),
    "ray": ("SecretNotAllowed|NoKubeRay", "Secret ray-redis .* ballast.dev/allow|KubeRay"),
    "spot": ("Unschedulable", "node affinity"),
    "tenants": ("SecretNotAllowed", "Secret keys .* ballast.dev/allow"),
    "vllm": ("Unschedulable", 'persistentvolumeclaim "adapters" not found|Insufficient memory'),
}
"""What Degraded says of the samples that need more than this cluster has: a network, claims, Secrets, nodes."""
NEED_VLLM = {"dra", "encoder", "minimal", "model-cache", "scaling", "spot", "vllm"}
"""Samples that the operator refuses as long as the chart names no image with vLLM."""
WITH_IMAGE = {"template": {"image": WORKER.name}}
"""An image that can fetch models. It has no vLLM, and none of these pods comes to the point of serving."""


def test_every_sample_is_applied_somewhere() -> None:
    served = {"laptop", "scaling"}

    assert {path.stem for path in SAMPLES.glob("*.yaml")} == served | LACKS.keys()


@pytest.mark.parametrize("sample", LACKS)
def test_a_sample_that_cannot_run_here_says_what_it_lacks(cluster: Cluster, namespace: str, sample: str) -> None:
    reason, words = LACKS[sample]
    cluster.apply(SAMPLES / f"{sample}.yaml", namespace=namespace)
    text = (SAMPLES / f"{sample}.yaml").read_text()
    (name,) = re.findall(r"kind: InferenceDeployment\nmetadata:\n  name: (\S+)", text)
    try:
        if sample in NEED_VLLM:
            name_an_image(cluster, name, namespace)
        found = cluster.wait_degraded(name, reason, namespace=namespace)
    finally:
        cluster.kubectl("delete", "-n", namespace, "-f", SAMPLES / f"{sample}.yaml")

    assert re.search(words, found["message"])


def name_an_image(cluster: Cluster, name: str, namespace: str) -> None:
    """Wait until the operator asks for an image with vLLM, and name one."""
    found = cluster.wait_degraded(name, "ImagePull", namespace=namespace)
    assert "no image of a worker with vLLM" in found["message"]
    cluster.patch(name, WITH_IMAGE, namespace=namespace)


def test_a_sample_that_scales_from_zero_is_ready_with_no_worker(cluster: Cluster, namespace: str) -> None:
    cluster.apply(SAMPLES / "scaling.yaml", namespace=namespace)
    try:
        name_an_image(cluster, "batch", namespace)
        cluster.patch("batch", {"replicas": 0}, namespace=namespace)
        cluster.wait_ready("batch", namespace=namespace, seconds=60)

        assert cluster.condition("batch", "Ready", namespace=namespace)["reason"] == "ScaledToZero"
    finally:
        cluster.kubectl("delete", "-n", namespace, "-f", SAMPLES / "scaling.yaml")


def test_a_worker_waits_for_a_gpu_in_the_schedulers_words_until_a_node_offers_one(
    cluster: Cluster, namespace: str
) -> None:
    cluster.provider.offer_gpus(0)
    try:
        cluster.apply(WAITING, namespace=namespace)
        found = cluster.wait_degraded("waiting", "Unschedulable", namespace=namespace)
        assert "Insufficient nvidia.com/gpu" in found["message"]

        node = cluster.provider.nodes()[0]
        cluster.provider.offer_gpus(1, node)
        (pod,) = until(lambda: scheduled(cluster, namespace), seconds=60, said="the pod has a node")
        assert pod["spec"]["nodeName"] == node

        # The image of the native engine has no vLLM, and the worker states it.
        crashed = cluster.wait_degraded("waiting", "Crashing", namespace=namespace)
        assert re.search("ballast-vllm: .*not installed", crashed["message"])
    finally:
        cluster.provider.offer_gpus(ALL_GPUS)
        cluster.kubectl("delete", "infd", "waiting", "-n", namespace, "--ignore-not-found")


def scheduled(cluster: Cluster, namespace: str) -> list[dict[str, Any]]:
    """Return the pods of the resource `waiting` that have a node."""
    return [pod for pod in cluster.pods("waiting", namespace=namespace) if pod["spec"].get("nodeName")]
