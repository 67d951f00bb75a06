"""Shared memory that ended processes of vLLM leave in /dev/shm. It stays there until another process removes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker

import psutil  # type: ignore[import-untyped]  # vLLM installs it

TRACKER, TRACKER_SECONDS = "resource_tracker import main", 10.0
"""What the command of a tracker contains, and the time that it has for its end."""


@contextmanager
def released() -> Iterator[None]:
    """Remove what the ended children of this process left, at the end of the context.

    At the end of a container or of a replica of Ray, the tracker of multiprocessing may be killed before it does so.
    """
    resource_tracker.ensure_running()  # a child of this process, whichever process needs it first
    try:
        yield
    finally:
        release()


def release() -> None:
    """Wait until the trackers of multiprocessing have removed what the ended children of this process left.

    A tracker does so when each process that holds its pipe has ended or, as this process here, has closed it.
    """
    if trackers := [child for child in psutil.Process().children(recursive=True) if is_tracker(child)]:
        with suppress(Exception):
            if (pipe := resource_tracker.getfd()) is not None:
                # The module writes to this number again. If it were free, that could reach another file.
                os.dup2(os.open(os.devnull, os.O_WRONLY), pipe)
        psutil.wait_procs(trackers, timeout=TRACKER_SECONDS)


def is_tracker(process: psutil.Process) -> bool:
    """Return whether a process is a tracker of shared memory, which ends by itself."""
    with suppress(psutil.Error):
        return TRACKER in " ".join(process.cmdline())
    return False
