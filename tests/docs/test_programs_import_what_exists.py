"""Programs outside the packages use only names that packages have, also those that need vLLM or Ray, and options."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = [ROOT / "worker", ROOT / "operator", ROOT / "crds"]
PROGRAMS = sorted(path for folder in ("benchmarks", "docs", "e2e") for path in (ROOT / folder).rglob("*.py"))


@cache
def file_of(module: str) -> Path | None:
    parts = module.split(".")
    places = [source.joinpath(*parts) for source in SOURCES]
    found = [place.with_suffix(".py") for place in places] + [place / "__init__.py" for place in places]
    return next((path for path in found if path.exists()), None)


@cache
def names_in(module: str) -> set[str]:
    """Return the names that a module binds outside its functions and classes."""
    found: set[str] = set()
    path = file_of(module)
    assert path is not None, f"there is no module {module}"
    pending: list[ast.stmt] = list(ast.parse(path.read_text()).body)
    while pending:
        node = pending.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Import() | ast.ImportFrom():
                found |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case _:
                found |= {name.id for name in ast.walk(node) if isinstance(name, ast.Name)}
                pending += [child for child in ast.walk(node) if isinstance(child, ast.stmt) and child is not node]
    return found


def imported(path: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ballast_"):
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_imported_name_exists(path: Path):
    missing = [
        f"{module}.{name}"
        for module, name in imported(path)
        if not file_of(f"{module}.{name}") and name not in names_in(module)
    ]

    assert not missing


def test_each_program_of_make_bench_has_the_options_of_its_quick_run():
    found = runpy.run_path(str(ROOT / "benchmarks" / "all.py"))
    quick = {
        path: found["QUICK"].get(path.name, ("--quick",))
        for path in (ROOT / "benchmarks").glob("*.py")
        if path.name not in found["LEFT_OUT"]
    }
    lacking = {
        path.name: option
        for path, options in quick.items()
        for option in options
        if option not in path.read_text() and option[:2] == "--"
    }

    assert not lacking, "add the option, or its own arguments to QUICK of benchmarks/all.py, or its name to LEFT_OUT"


def test_a_name_that_does_not_exist_is_noticed():
    assert "most_ahead" in names_in("ballast_sim.replay.fairness")
    assert "no_such_name" not in names_in("ballast_sim.replay.fairness")
