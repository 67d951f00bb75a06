"""The locks of the images have what pyproject.toml asks for, in the versions of constraints.txt, each with hashes."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
WORKER = (*PYPROJECT["project"]["dependencies"], *EXTRAS["worker"], *EXTRAS["fetch"])
LOCKS = {
    "requirements-build.txt": tuple(PYPROJECT["build-system"]["requires"]),
    "operator/requirements.txt": (*PYPROJECT["project"]["dependencies"], *EXTRAS["operator"]),
    "worker/requirements.txt": WORKER,
}
IMAGES = [name for name in LOCKS if name != "requirements-build.txt"]
UNNAMED = re.compile(r"async-timeout|setuptools")
"""Packages that constraints.txt does not name."""


@dataclass(frozen=True)
class Pin:
    """A package of a lock."""

    version: Version
    hashes: tuple[str, ...]


def pins(text: str) -> dict[str, Pin]:
    """The packages of a lock; a line that is none of `name==version` and its hashes is an error."""
    found = {}
    for line in re.sub(r" *\\\n *", " ", re.sub(r"^ *#.*\n", "", text, flags=re.MULTILINE)).splitlines():
        match = re.fullmatch(r"(\S+)==(\S+)((?: --hash=sha256:[0-9a-f]{64})+)", line)
        assert match, line
        hashes = tuple(match[3].split())
        assert len(set(hashes)) == len(hashes), line
        found[match[1]] = Pin(Version(match[2]), hashes)
    return found


def disagreements(lock: dict[str, Pin], wanted: tuple[str, ...], constraints: dict[str, Version]) -> list[str]:
    """What a lock lacks, has in another version, or has without a reason."""
    problems = []
    for requirement in map(Requirement, wanted):
        pin = lock.get(canonicalize_name(requirement.name))
        if pin is None:
            problems.append(f"{requirement.name} is missing")
        elif not requirement.specifier.contains(pin.version):
            problems.append(f"{requirement.name} {pin.version} is not in {requirement.specifier}")
    for name, pin in lock.items():
        if name in constraints and Version(pin.version.public) != constraints[name]:
            problems.append(f"{name} {pin.version}, but constraints.txt has {constraints[name]}")
        if name not in constraints and not UNNAMED.fullmatch(name):
            problems.append(f"{name} is not in constraints.txt")
    return problems


@pytest.fixture(scope="module")
def constraints() -> dict[str, Version]:
    lines = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): Version(version) for name, version in lines}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_agrees_with_the_ranges_and_the_constraints(name: str, constraints: dict[str, Version]) -> None:
    assert disagreements(pins((ROOT / name).read_text()), LOCKS[name], constraints) == [], "run `make lock`"


def test_a_lock_that_disagrees_would_be_found() -> None:
    lock = {"redis": Pin(Version("9.1"), ()), "stray": Pin(Version("1"), ()), "torch": Pin(Version("2.13.0+cpu"), ())}
    constraints = {"redis": Version("8.1.0"), "torch": Version("2.13.0")}

    assert disagreements(lock, ("redis>=6.0,<9", "typer>=0.29", "torch>=2.6"), constraints) == [
        "redis 9.1 is not in <9,>=6.0",
        "typer is missing",
        "redis 9.1, but constraints.txt has 8.1.0",
        "stray is not in constraints.txt",
    ]


def test_the_worker_has_torch_for_cpus() -> None:
    assert pins((ROOT / "worker/requirements.txt").read_text())["torch"].version.local == "cpu"


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_no_host(name: str) -> None:
    assert "://" not in (ROOT / name).read_text()
