"""The options, checks and last words that all programs of a worker share. No extra is needed to import it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ballast_worker.errors import MissingWorkerExtra

BAD_CONFIG = 78
INTERRUPTED = 130


def parser(prog: str, description: str, *, config_help: str) -> argparse.ArgumentParser:
    """Return a parser of `--config` and the options of logs."""
    found = argparse.ArgumentParser(prog=prog, description=description)
    found.add_argument("--config", type=Path, required=True, help=f"WorkerConfig as YAML. {config_help}")
    found.add_argument("--log-format", choices=("text", "json"), default="text")
    found.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return found


def end_at_sigterm(prog: str) -> None:
    """End the process at SIGTERM until a server handles it: process 1 of a container ignores it without a handler."""

    def end(number: int, _: object) -> None:
        state_signal(prog, number)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)


def state_signal(prog: str, number: int) -> None:
    """Print, in the handler of a signal, that it ends the start."""
    why = "Kubernetes sends SIGTERM if the start takes longer than rollout.startupSeconds"
    with suppress(OSError):
        os.write(2, f"{prog}: {signal.Signals(number).name} ended the start. {why}\n".encode())


def require(packages: Sequence[str], *, program: str, extra: str) -> None:
    """Raise `MissingWorkerExtra` if a package of an extra is missing."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingWorkerExtra(
            f"{program} needs {', '.join(missing)}, which is not installed: run `pip install 'ballast[{extra}]'`"
        )


def fail(prog: str, message: str, exit_code: int) -> int:
    """Print why a program ends, and return its exit code."""
    sys.stderr.write(f"{prog}: {message}\n")
    return exit_code
