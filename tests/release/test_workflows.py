"""Rules of the GitHub workflows that actionlint does not check: rights, pinned actions, and what they call."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github" / "workflows").glob("*.yaml")}
JOBS = [(workflow, name) for workflow, content in WORKFLOWS.items() for name in content["jobs"]]
SIGN = {"id-token": "write", "attestations": "write"}
WRITES = {
    ("release", "wheels"): SIGN,
    ("release", "images"): {"packages": "write", **SIGN},
    ("release", "chart"): {"packages": "write", **SIGN},
    ("release", "draft"): {"contents": "write"},
}


def job(workflow: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = WORKFLOWS[workflow]["jobs"][name]
    return found


def steps(workflow: str, name: str, action: str) -> list[dict[str, Any]]:
    """The steps of a job that use an action."""
    return [step for step in job(workflow, name)["steps"] if step.get("uses", "").startswith(f"{action}@")]


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_a_job_has_only_the_rights_that_it_needs(workflow: str, name: str) -> None:
    rights = job(workflow, name)["permissions"]

    assert WORKFLOWS[workflow]["permissions"] == {}
    assert {right: level for right, level in rights.items() if level != "read"} == WRITES.get((workflow, name), {})
    assert all(not step["with"]["persist-credentials"] for step in steps(workflow, name, "actions/checkout"))


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_a_job_ends_and_its_actions_have_a_version(workflow: str, name: str) -> None:
    used = [step["uses"] for step in job(workflow, name)["steps"] if "uses" in step]

    assert job(workflow, name)["timeout-minutes"] <= 180
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", action)] == []


@pytest.mark.parametrize(("workflow", "name"), JOBS)
def test_a_command_takes_no_expression_and_calls_targets_that_exist(workflow: str, name: str) -> None:
    commands = "\n".join(step.get("run", "") for step in job(workflow, name)["steps"])
    targets = re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    called = [word for line in re.findall(r"^ *make (.*)", commands, re.MULTILINE) for word in line.split()]

    assert "${{" not in commands  # a name of a branch would become code
    assert {word for word in called if "=" not in word} <= set(targets)


def test_a_release_requires_a_base_image_with_a_digest() -> None:
    (check,) = [step["run"] for step in job("release", "settings")["steps"] if "run" in step]
    (build,) = steps("release", "images", "docker/build-push-action")

    assert "[[ $BASE =~ ^[^@]+@sha256:[0-9a-f]{64}$ ]] || refuse" in check
    assert WORKFLOWS["release"]["env"]["BASE"] == "${{ vars.BASE_IMAGE }}"
    assert "BASE=${{ vars.BASE_IMAGE }}" in build["with"]["build-args"].splitlines()
    assert all("settings" in job("release", name)["needs"] for name in ("wheels", "images", "chart"))


@pytest.mark.parametrize("name", ["wheels", "images", "chart"])
def test_everything_of_a_release_has_provenance(name: str) -> None:
    (attested,) = steps("release", name, "actions/attest-build-provenance")
    with_sbom = steps("release", name, "actions/attest-sbom")

    assert attested["with"].keys() & {"subject-path", "subject-digest"}
    assert len(with_sbom) == (name == "images")


def test_each_image_of_a_release_has_the_bill_of_materials_of_its_lock() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for image in job("release", "images")["strategy"]["matrix"]["include"]:
        lock = f"{image['image']}/requirements.txt"
        assert (ROOT / lock).exists()
        assert lock in makefile
