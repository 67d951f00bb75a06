"""Run programs with a limit of time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(
    *command: str | Path,
    stdin: str | bytes | None = None,
    check: bool = True,
    seconds: float = 60,
    env: Mapping[str, str] | None = None,
    folder: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. If it fails or takes longer than `seconds`, fail the test with its output."""
    words = [str(word) for word in command]
    given = stdin.decode() if isinstance(stdin, bytes) else stdin
    try:
        done = subprocess.run(
            words,
            input=given,
            stdin=subprocess.DEVNULL if given is None else None,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **(env or {})},
            cwd=folder,
        )
    except subprocess.TimeoutExpired as late:
        said = b"".join(part or b"" for part in (late.stdout, late.stderr))  # bytes, even with text=True
        raise AssertionError(f"not within {seconds:g} s: {' '.join(words)}\n{said.decode()[-4000:]}") from None
    if check and done.returncode:
        raise AssertionError(f"exit {done.returncode}: {' '.join(words)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    return done
