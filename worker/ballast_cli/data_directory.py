"""The files of a running `ballast up` or `ballast serve`. Only their owner may read them: a URL may hold a password."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from ballast_cli.errors import CliError, NotNow

_LOCK = "up.lock"
"""A running `ballast up` holds the lock of this file. The kernel releases it when the process ends."""
_TRY_SECONDS = 1.0
"""Longest time that `is_held` of other processes can hold the lock."""


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


def is_held(directory: Path) -> bool:
    """Return whether a `ballast up` runs in a data directory."""
    try:
        with (directory / _LOCK).open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


def in_use(directory: Path) -> str:
    """Return the message about a data directory that another `ballast up` holds."""
    return (
        f"`ballast up` is already running in {directory.resolve()}. Stop it with Ctrl-C, or choose another directory "
        "with --data."
    )


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Hold a data directory.

    Raises:
        NotNow: another `ballast up` runs in it.
    """
    with (directory / _LOCK).open("ab") as lock:
        if not try_lock(lock, seconds=_TRY_SECONDS):
            raise NotNow(in_use(directory))
        yield


def try_lock(file: IO[Any], *, seconds: float) -> bool:
    """Lock a file until it is closed. Return False if another process still has the lock after this time."""
    until = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        else:
            return True


def write_private(file: Path, text: str) -> None:
    """Write a file atomically, so that no reader sees half of it. Only its owner may read it."""
    part = file.with_name(f"{file.name}.part")
    part.unlink(missing_ok=True)  # its mode would stay
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)
    part.replace(file)
