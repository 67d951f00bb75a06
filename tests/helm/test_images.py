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

VLLM = ROOT / "worker" / "Dockerfile.vllm"


def commands(text: str) -> list[str]:
    """The instructions of a Dockerfile, each on one line."""
    joined = re.sub(r" *\\\n *", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE))
    return [line for line in joined.splitlines() if line]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_runs_without_rights_on_a_base_that_can_be_chosen(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    last = text[text.rindex("FROM ") :]

    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.search(r"^USER 65532:65532$", last, re.MULTILINE)


@pytest.mark.parametrize("image", DOCKERFILES)
def test_the_last_stage_adds_only_ballast_and_its_dependencies(image: str) -> None:
    lines = commands(DOCKERFILES[image].read_text())
    last = lines[max(index for index, line in enumerate(lines) if line.startswith("FROM ")) :]

    assert not [line for line in last if line.startswith(("RUN", "ADD"))]
    assert [line for line in last if line.startswith("COPY")] == [
        "COPY --from=build /opt/ballast /opt/ballast",
        "COPY --from=build /new /",
    ]


@pytest.mark.parametrize("image", DOCKERFILES)
def test_pip_installs_what_a_lock_names_or_asks_no_index(image: str) -> None:
    calls = re.findall(r"-m pip [^&\n]*", "\n".join(commands(DOCKERFILES[image].read_text())))

    assert len(calls) == 4
    for call in calls:
        from_lock = "--require-hashes" in call and "--only-binary :all:" in call and "-r /locks/" in call
        assert from_lock or ("--no-index" in call and "--no-deps" in call), call


@pytest.mark.parametrize("image", DOCKERFILES)
def test_an_image_is_built_from_locks_that_exist_and_starts_a_program_that_exists(image: str) -> None:
    text = DOCKERFILES[image].read_text()
    (copied,) = re.findall(r"^COPY (\S+requirements\S*) (requirements-build.txt) \./$", text, re.MULTILINE)
    (program,) = re.findall(r'^CMD \["([^"]+)"', text, re.MULTILINE)

    assert all((ROOT / name).exists() for name in copied)
    assert program in PROJECT["project"]["scripts"]


def test_the_image_with_vllm_runs_without_rights_and_keeps_the_packages_of_its_base() -> None:
    text = VLLM.read_text()
    (call,) = re.findall(r"-m pip install [^&\n]*", "\n".join(commands(text)))
    (program,) = re.findall(r'^CMD \["([^"]+)"', text, re.MULTILINE)

    assert set(re.findall(r"^FROM (\S+)", text, re.MULTILINE)) == {"${BASE}"}
    assert re.findall(r"^USER (\S+)", text, re.MULTILINE)[-1] == "65532:65532"
    assert "--constraint" in call
    assert program in PROJECT["project"]["scripts"]
    assert "ENTRYPOINT []" in text  # the base of vLLM has its own


def test_versions_of_distribution_chart_and_images_are_one() -> None:
    chart = yaml.safe_load((ROOT / "helm" / "ballast" / "Chart.yaml").read_text())
    paths = (*DOCKERFILES.values(), VLLM)
    labels = [re.findall(r"^ARG VERSION=(\S+)", path.read_text(), re.MULTILINE) for path in paths]

    assert chart["version"] == chart["appVersion"] == PROJECT["project"]["version"]
    assert labels == [[PROJECT["project"]["version"]]] * 3


def test_the_build_context_has_what_the_wheel_is_made_of() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line[1:] for line in lines if line.startswith("!")}
    packages = {path.split("/")[0] for path in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    needed = packages | {"pyproject.toml", "requirements-build.txt", PROJECT["project"]["readme"], "LICENSE"}

    assert needed <= kept
    assert all((ROOT / name).exists() for name in kept)
