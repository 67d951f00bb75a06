"""A module that calls itself PURE is in a contract that checks it."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
IMPURE = {"asyncio", "os", "random", "redis", "threading", "time"}


def checked_by(contracts: list[dict]) -> set[str]:
    """Return the modules that may not import a clock, randomness, or I/O."""
    return {
        module
        for each in contracts
        if set(each.get("forbidden_modules", ())) >= IMPURE
        for module in each["source_modules"]
    }


def test_each_module_that_calls_itself_pure_is_in_a_contract():
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    checked = checked_by(linter["contracts"])
    pure = {
        ".".join(path.relative_to(ROOT).parts[1:]).removesuffix(".py").removesuffix(".__init__")
        for folder in ("crds", "operator", "worker")
        for path in (ROOT / folder).rglob("*.py")
        if "PURE" in (ast.get_docstring(ast.parse(path.read_text())) or "")
    }

    assert pure
    assert not {name for name in pure if not any(f"{name}.".startswith(f"{module}.") for module in checked)}
