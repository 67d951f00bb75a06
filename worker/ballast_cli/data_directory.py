"""The files of a running `ballast up` or `ballast serve`. Only their owner may read them: a URL may hold a password."""

from __future__ import annotations

import os
from pathlib import Path

from ballast_cli.errors import CliError


def make_directory(directory: Path) -> None:
    """Create a directory, unless it exists.

    Raises:
        CliError: it cannot be created.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CliError(
            f"The directory {directory} cannot be created ({error.strerror}). Run the command in a directory where you "
            "may write. `ballast up` also takes another one with --data."
        ) from None


def write_private(file: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees half of it. Only its owner may read it."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)  # its mode would stay
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)
    part.replace(file)
