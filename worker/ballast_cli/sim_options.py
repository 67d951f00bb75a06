"""Options, checks and output that `ballast bench` and `ballast plan` share."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from ballast_cli.console import print_json, say, say_raw
from ballast_cli.errors import CliError, Usage

_TTFT = "SLO of the time to the first token, in milliseconds."
_TPOT = "SLO of the mean time per token after the first, in milliseconds."
Ttft = Annotated[float | None, typer.Option("--ttft-ms", min=0.001, max=1e9, help=_TTFT, show_default="1000")]
Tpot = Annotated[float | None, typer.Option("--tpot-ms", min=0.001, max=1e9, help=_TPOT, show_default="50")]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="TRACE", help="Online traffic: a CSV or JSONL file with times.", show_default="Azure conversations"
    ),
]
Lengths = Annotated[
    Path | None,
    typer.Option(
        metavar="LENGTHS", help="Offline work: a CSV or JSONL file with lengths.", show_default="arXiv summaries"
    ),
]
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures as JSON to FILE; - is stdout.", show_default=False),
]


def require(command: str, **extras: str) -> None:
    """Check that modules are installed. `extras` names the extra of each module.

    Raises:
        CliError: a module is missing.
    """
    for module, extra in extras.items():
        if find_spec(module) is None:
            raise CliError(f"`{command}` needs {module}: pip install 'ballast[{extra}]'")


def check_output(option: str, path: Path | None) -> None:
    """Check that a file can be written at a path, before work that takes long. Nothing stays of the check.

    Raises:
        Usage: the path is a directory, its directory does not exist, or the file cannot be written.
    """
    if path is None or str(path) == "-":
        return
    if path.is_dir():
        raise Usage(f"{option}: {path} is a directory, expected a file.")
    if not path.parent.is_dir():
        raise Usage(f"{option}: there is no directory {path.parent}. Create it first.")
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # a pipe would end with its first writer
            target = Path(os.path.realpath(path))  # the path may be a link to a file that does not exist yet
            target.open("xb").close()
            target.unlink()
    except OSError as error:
        raise Usage(f"{option}: cannot write {path} ({error.strerror}). Name another file.") from None


def write_json(path: Path | None, figures: Any) -> None:
    """Write figures as JSON to a file, or to stdout if the path is `-`. Without a path, write nothing."""
    if str(path) == "-":
        print_json(figures)
    elif path is not None:
        path.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
        say(f"Figures: {path}")


def progress(done: int, number: int, what: str) -> None:
    """Show on a terminal which run has finished."""
    show_progress(f"{done} of {number}: {what}" if done < number else "")


def show_progress(line: str = "") -> None:
    """Replace the line of progress on a terminal."""
    if sys.stderr.isatty():
        say_raw(f"\r\x1b[K{line}")
