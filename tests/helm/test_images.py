"""Properties of the Dockerfiles that need no build."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILES = {"operator": ROOT / "operator" / "Dockerfile", "worker": ROOT / "worker" / "Dockerfile"}


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_runs_without_rights_on_a_base_that_can_be_chosen(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    last = text[text.rindex("FROM ") :]

    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.search(r"^USER 65532:65532$", last, re.MULTILINE)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_installs_extras_and_starts_a_program_that_exist(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    extras = re.findall(r'extras\["([a-z]+)"\]', text)
    (program,) = re.findall(r'^CMD \["([^"]+)"', text, re.MULTILINE)

    assert extras
    assert set(extras) <= set(PROJECT["project"]["optional-dependencies"])
    assert program in PROJECT["project"]["scripts"]


def test_versions_of_distribution_chart_and_images_are_one() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "ballast" / "Chart.yaml").read_text())
    labels = [re.findall(r"^ARG VERSION=(\S+)", path.read_text(), re.MULTILINE) for path in DOCKERFILES.values()]

    assert chart["version"] == chart["appVersion"] == PROJECT["project"]["version"]
    assert labels == [[PROJECT["project"]["version"]]] * 2


def test_the_build_context_has_what_the_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = {path.split("/")[0] for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    needed = packages | {"pyproject.toml", "constraints.txt", PROJECT["project"]["readme"], "LICENSE"}

    assert needed <= kept
    assert all((ROOT / name).exists() for name in kept)
