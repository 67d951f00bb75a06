"""Print the size of the product, and the modules and functions that are longer than their budget.

A budget (module 400 lines, function 40, test file 600) is a reason to look, not a failure.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Return each function of a module with its number of lines, including the docstring."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            yield node.name, node.end_lineno - node.lineno + 1


def main() -> None:
    """Print one line for each package, and one for each module or function over its budget."""
    total = 0
    for package in sorted(path.parent for path in ROOT.glob("*/ballast_*/__init__.py")):
        lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in package.rglob("*.py"))
        total += lines
        print(f"{package.name:20} {lines:6}")
    print(f"{'product':20} {total:6}")
    for path in sorted([*ROOT.glob("*/ballast_*/**/*.py"), *ROOT.glob("tests/**/*.py")]):
        is_test = path.is_relative_to(ROOT / "tests")
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > (600 if is_test else 400):
            print(f"over budget: {path.relative_to(ROOT)} has {lines} lines")
        for name, length in [] if is_test else functions(path):
            if length > 40:
                print(f"over budget: {path.relative_to(ROOT)}: {name} has {length} lines")


if __name__ == "__main__":
    main()
