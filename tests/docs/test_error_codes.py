"""The table of error codes has each code that Ballast gives to an item, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from ballast_queue.job import JobState

ROOT = Path(__file__).parents[2]
WORKER = ROOT / "worker"
ONLINE = {
    *(f"ballast_worker/{name}.py" for name in ("api", "bodies", "http_connection", "http_exchange", "queue_limit")),
    *("ballast_worker/tenancy.py", "ballast_vllm/middleware.py"),
}
"""Modules that answer HTTP requests only. Every other module is searched."""
POSITIONS = {"InvalidBody": 2, "ItemFailure": 1, "_refuse": 1}
"""Of the code among the arguments of a call."""


def texts_of(*nodes: ast.AST | None) -> Iterator[str]:
    found = (each for node in nodes if node is not None for each in ast.walk(node))
    return (each.value for each in found if isinstance(each, ast.Constant) and isinstance(each.value, str))


def names_of(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def codes_of(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            at = POSITIONS.get(name, len(node.args))
            yield from texts_of(*node.args[at : at + 1], *(word.value for word in node.keywords if word.arg == "code"))
        elif isinstance(node, ast.Assign) and "code" in names_of(node.targets[0]):
            yield from texts_of(node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value)
        elif isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            yield from texts_of(*(value for key, value in pairs if [*texts_of(key)] == ["code"]))
        elif isinstance(node, ast.FunctionDef):
            last = [*node.args.args, *node.args.kwonlyargs][-1:]
            if [argument.arg for argument in last] == ["code"]:
                yield from texts_of(*node.args.defaults[-1:])


def test_the_table_has_each_error_code_of_an_item() -> None:
    sources = {str(file.relative_to(WORKER)): file for file in WORKER.glob("ballast_*/**/*.py")}
    searched = [file for name, file in sources.items() if name not in ONLINE]
    texts = {text for file in searched for text in codes_of(file.read_text(encoding="utf-8"))}
    found = {text for text in texts if re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)+", text)}
    functions = (WORKER / "ballast_queue" / "ballast.lua").read_text(encoding="utf-8")
    found |= set(re.findall(r"(?:error_of\(|\bcode = )'(\w+)'", functions))
    found |= {JobState.CANCELLED, JobState.EXPIRED}
    page = (ROOT / "docs" / "job-lifecycle.md").read_text(encoding="utf-8")
    table = page.partition("### Error codes\n")[2].partition("\n## ")[0]
    listed = [
        code for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for code in re.findall(r"`(\w+)`", row)
    ]

    assert sources.keys() >= ONLINE
    assert (sorted(found - set(listed)), sorted(set(listed) - found)) == ([], [])
