"""Waiting for what other threads and processes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAIT_SECONDS = 30


def until(what: Callable[[], Any], *, seconds: float = WAIT_SECONDS, said: str = "", pause: float = 0.03) -> Any:
    """Wait until `what` returns something true; what a cluster does has no other signal.

    An object or a key that is absent counts as not yet: the objects of one resource do not change in one instant.
    """
    end = time.monotonic() + seconds
    found: Any = None
    while time.monotonic() < end:
        try:
            found = what()
        except (LookupError, TypeError) as absent:
            found = absent
        else:
            if found:
                return found
        time.sleep(pause)
    raise AssertionError(f"not within {seconds} s: {said or what}; last found {found!r}")


def until_gone(*pids: int) -> None:
    """Wait until these processes have ended."""
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), seconds=120, said=f"processes {pids} end")
