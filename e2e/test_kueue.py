"""Workers under a quota of Kueue, with the manifests of docs/how-to/kueue.md."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from children import wait_tidy
from client import Client
from cluster import Cluster, is_ready, until
from images import VLLM_WORKER
from jobs import MODEL
from programs import ROOT, run
from small_vllm import ENGINE, START_SECONDS, template

PAGE = ROOT / "docs" / "how-to" / "kueue.md"
BLOCK = re.compile(r"<!-- kueue: (\w+) -->\n +```yaml\n(.*?)```", re.DOTALL)


@pytest.fixture(scope="module")
def manifests() -> dict[str, str]:
    """Return the manifests of the page by name."""
    return {name: dedent(text) for name, text in BLOCK.findall(PAGE.read_text())}


@pytest.fixture(scope="module")
def kueue(cluster: Cluster) -> Iterator[None]:
    """Install Kueue, unless the cluster has it."""
    with cluster.addon("kueue", "clusterqueues.kueue.x-k8s.io"):
        yield


@pytest.fixture(scope="module")
def shared(cluster: Cluster, namespace: str, kueue: None, manifests: dict[str, str]) -> Iterator[str]:
    """Apply the page: a quota of one GPU, and two workers that request one each. vLLM finds none, and uses the CPU."""
    quota = list(yaml.safe_load_all(manifests["quota"]))

    def is_applied() -> bool:
        words = ("apply", "-n", namespace, "-f", "-")
        return cluster.kubectl(*words, stdin=yaml.safe_dump_all(quota), check=False).returncode == 0

    until(is_applied, seconds=60, said="the webhooks of Kueue answer")
    resource = yaml.safe_load(manifests["resource"])
    node = cluster.provider.add(VLLM_WORKER)
    resource["spec"] |= {"engine": ENGINE, "template": resource["spec"]["template"] | template(node)}
    cluster.apply(resource, namespace=namespace)
    yield "shared"
    cluster.kubectl("delete", "infd", "shared", "-n", namespace, "--ignore-not-found", "--timeout=60s", seconds=70)
    wait_tidy(cluster, namespace)
    for kind, name in (("localqueue", "inference"), ("clusterqueue", "inference"), ("resourceflavor", "gpus")):
        cluster.kubectl("delete", kind, name, "-n", namespace, "--timeout=60s", seconds=70)


def test_one_worker_serves_and_the_conditions_explain_the_other(
    cluster: Cluster, client: Client, namespace: str, shared: str
) -> None:
    until(
        lambda: cluster.ready_pods(shared, namespace=namespace),
        seconds=START_SECONDS,
        said="a worker that Kueue admitted",
    )
    until(lambda: reason(cluster, "Ready", namespace) == "SchedulingGated", seconds=60, said="Ready explains it")
    (held,) = (pod for pod in cluster.pods(shared, namespace=namespace) if not is_ready(pod))
    name = held["metadata"]["name"]
    sentence = f"pod {name} waits until Kueue admits it within its quota: see kubectl get workloads -n {namespace}"
    until(
        lambda: (
            cluster.condition(shared, "Ready", namespace=namespace)["message"]
            == f"1 of 2 workers are ready; {sentence}"
        ),
        seconds=60,
        said="Ready counts the worker that serves",
    )
    explained = explain(cluster, shared, namespace)
    answers = client.script("replay.py", f"{shared}.{namespace}.svc", "8000", MODEL, "burst", "8")

    assert {"name": "kueue.x-k8s.io/admission"} in held["spec"]["schedulingGates"]
    assert reason(cluster, "Progressing", namespace) == "SchedulingGated"
    assert cluster.condition(shared, "Progressing", namespace=namespace)["message"].endswith(sentence)
    assert cluster.condition(shared, "Degraded", namespace=namespace)["status"] == "False"
    assert explained.count(sentence) >= 2, "events may have it as well"
    assert "! Ready: False (SchedulingGated)" in explained
    assert answers["failures"] == []


def test_more_quota_admits_the_other_worker(cluster: Cluster, namespace: str, shared: str) -> None:
    path = "/spec/resourceGroups/0/flavors/0/resources/2/nominalQuota"
    patch = f'[{{"op": "replace", "path": "{path}", "value": 2}}]'

    cluster.kubectl("patch", "clusterqueue", "inference", "--type=json", "-p", patch)

    cluster.wait_pods(shared, 2, namespace=namespace, seconds=START_SECONDS)
    cluster.wait_ready(shared, namespace=namespace)
    until(lambda: reason(cluster, "Progressing", namespace) == "Complete", seconds=60, said="the rollout is complete")


def test_deletion_leaves_nothing_of_kueue_behind(cluster: Cluster, namespace: str, shared: str) -> None:
    cluster.kubectl("delete", "infd", shared, "-n", namespace, "--timeout=60s", seconds=70)

    wait_tidy(cluster, namespace)
    until(lambda: not cluster.get("workloads.kueue.x-k8s.io", namespace=namespace), seconds=60, said="no workload")


def reason(cluster: Cluster, kind: str, namespace: str) -> str:
    return str(cluster.condition("shared", kind, namespace=namespace).get("reason", ""))


def explain(cluster: Cluster, name: str, namespace: str) -> str:
    """Return what `ballast explain` prints to a user with access to the cluster."""
    program = Path(sys.executable).with_name("ballast")
    env = {**os.environ, "KUBECONFIG": str(cluster.provider.kubeconfig), "COLUMNS": "400"}
    return run(program, "explain", name, "-n", namespace, env=env).stdout
