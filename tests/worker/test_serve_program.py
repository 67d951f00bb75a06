"""`python -m ballast_serve` without Ray: the configuration of Serve for a cluster, and a file that changes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import yaml
from files import swap

from ballast_serve.__main__ import main
from ballast_worker.errors import NotServed

RAY = {
    "__init__.py": """
import os, pathlib
from types import SimpleNamespace
path = pathlib.Path(os.environ["CHANGED"])
path.write_text(path.read_text() + "slo: {ttftMilliseconds: 7}")
def init(*_, **__): return SimpleNamespace(dashboard_url="")
def shutdown(): pass
def cluster_resources(): return {}
""",
    "_private/node.py": "class Node:\n    def dead_processes(self): return []\n",
    "_private/worker.py": "from ray._private.node import Node\n_global_node = Node()\n",
    "serve/__init__.py": """
from types import SimpleNamespace
applications = {}
def status(): return SimpleNamespace(applications=applications)
def delete(name, **_): applications.pop(name)
def shutdown(): pass
""",
    "serve/schema.py": """
from enum import Enum
ApplicationStatus = Enum("ApplicationStatus", ["RUNNING", "DEPLOY_FAILED"])
""",
    "dashboard/modules/serve/sdk.py": """
import re
from types import SimpleNamespace
from ray import serve
from ray.serve.schema import ApplicationStatus
class ServeSubmissionClient:
    def __init__(self, _): pass
    def deploy_applications(self, document):
        (application,) = document["applications"]
        serve.applications[application["name"]] = SimpleNamespace(status=ApplicationStatus.RUNNING)
        found = re.findall(r"ttftMilliseconds: ([0-9]+)", application["deployments"][0]["user_config"]["config"])
        ttft = (found or ["none"])[0]
        if ttft == "6": raise RuntimeError("busy")
        print("deployed", ttft, application["args"]["cold_fields"], flush=True)
""",
}
"""A Ray that runs nothing. Its import, which takes seconds in the real one, changes the configuration file."""

SECTIONS = {
    "native": {},
    "vllm": {"engine": {"backend": "vllm"}},
    "two nodes": {"engine": {"backend": "vllm"}, "runtime": {"tensorParallel": 16, "nodes": 2}},
}


@pytest.fixture
def show(tmp_path, capsys):
    """Run the program in this process: gives its exit code, the deployment, and what it said."""

    def run(kind: str, *options: str, shows: bool = True):
        path = tmp_path / "worker.yaml"
        path.write_text(yaml.safe_dump({"model": {"uri": "/models/m"}} | SECTIONS[kind]))
        try:
            code = main(["--config", str(path), *(("--show",) if shows else ()), *options])
        except SystemExit as ended:
            code = ended.code
        said = capsys.readouterr()
        assert "&" not in said.out, "an anchor of YAML"
        deployment = yaml.safe_load(said.out)["applications"][0]["deployments"][0] if said.out else None
        return code, deployment, said.err

    return run


@pytest.mark.parametrize(("kind", "gpus"), [("native", 0), ("vllm", 1), ("two nodes", 8)])
def test_a_replica_has_the_gpus_that_its_engine_uses(show, kind, gpus):
    code, deployment, _ = show(kind)

    assert (code, deployment["ray_actor_options"]["num_gpus"]) == (0, gpus)
    assert deployment == show(kind, "--gpus", str(gpus))[1]


def test_vllm_for_cpus_uses_no_gpu(show):
    code, deployment, _ = show("two nodes", "--gpus", "0")

    assert (code, deployment["ray_actor_options"]["num_gpus"]) == (0, 0)
    assert deployment["placement_group_bundles"] == [{"CPU": 1, "GPU": 0}] * 2


def test_models_with_a_name_each_share_a_ray_cluster(tmp_path, capsys):
    path = tmp_path / "worker.yaml"
    path.write_text("model: {uri: /models/m}")
    found = []
    for options in ([], ["--name", "llama-3"]):
        assert main(["--config", str(path), "--show", *options]) == 0
        found += yaml.safe_load(capsys.readouterr().out)["applications"]

    assert [(each["name"], each["route_prefix"]) for each in found] == [("ballast", "/"), ("llama-3", "/llama-3")]


@pytest.mark.parametrize("target", ["&-", "/dev/full"])
def test_a_configuration_that_cannot_be_printed_is_a_sentence(tmp_path, target):
    path = tmp_path / "worker.yaml"
    path.write_text("model: {uri: /models/m}")
    line = f"{sys.executable} -m ballast_serve --config {path} --show >{target}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)

    assert done.returncode == 1
    assert done.stderr.startswith("ballast_serve: Cannot print the configuration")
    assert done.stderr.count("\n") == 1


WRONG = {
    "gpus of the native engine": ("native", ("--gpus", "1"), "the native engine runs on CPUs"),
    "too few gpus": ("two nodes", ("--gpus", "4"), "a replica uses 8 on each node: runtime.tensorParallel is 16"),
    "negative gpus": ("vllm", ("--gpus", "-1"), "--gpus is -1, and a replica uses 1 on each node"),
    "no replica": ("native", ("--replicas", "0"), "found 0, expected a whole number: a deployment has at least one"),
    "a path for a name": (
        "native",
        ("--name", "/llama"),
        "found /llama, expected lower-case letters, digits and hyphens",
    ),
    "a word for replicas": ("native", ("--replicas", "two"), "found two, expected a whole number"),
}


@pytest.mark.parametrize(("kind", "options", "sentence"), WRONG.values(), ids=WRONG)
def test_wrong_options_are_a_sentence(show, kind, options, sentence):
    code, deployment, said = show(kind, *options)

    assert code != 0
    assert deployment is None
    assert sentence in said


@pytest.mark.parametrize("option", ["--gpus", "--replicas", "--name"])
def test_options_of_a_cluster_are_refused_where_they_have_no_effect(show, option):
    code, _, said = show("native", option, "1", shows=False)

    assert code == 2
    assert "--replicas, --gpus and --name belong to --show" in said


def test_a_model_over_several_nodes_is_refused_on_one_machine(show):
    code, _, said = show("two nodes", shows=False)

    assert code == NotServed.exit_code
    assert "runtime.nodes is 2, and the Ray of this program has one node" in said


def test_a_file_that_changes_is_applied_and_a_wrong_one_leaves_the_last_one_in_force(tmp_path):
    path = tmp_path / "worker.yaml"
    path.write_text("model: {uri: /models/m}\n")
    for name, text in RAY.items():
        module = tmp_path / "ray" / name
        module.parent.mkdir(parents=True, exist_ok=True)
        module.write_text(text)
    environment = os.environ | {
        "CHANGED": str(path),
        "HOME": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]),
    }
    command = [sys.executable, "-m", "ballast_serve", "--config", str(path)]
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def said(words: str) -> str:
            return next(line for line in process.stdout if words in line)

        try:
            deployed = [said("deployed "), said("deployed ")]  # the second while the program imports Ray
            swap(path, "model: [")
            said("invalid configuration file, the old configuration stays in force")
            swap(path, "model: {uri: /models/m}\nslo: {ttftMilliseconds: 6}")
            said("the old configuration stays in force, change the file again")
            swap(path, "model: {uri: /models/other}\nslo: {ttftMilliseconds: 8}")
            deployed.append(said("deployed "))
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()

    _, times, cold = zip(*map(str.split, deployed), strict=True)
    assert times[1:] == ("7", "8")
    assert len(set(cold)) == 1, "Serve would restart the replica for a field that is not hot"
