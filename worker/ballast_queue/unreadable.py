"""Values in Redis that this version cannot read: they are skipped, and named once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from ballast_log import Log
from ballast_queue.errors import UnreadableValue

log = Log(__name__)

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The failures of code that reads a value which another version, or anybody else, stored."""
MOST_PLACES = 1000
KEEP_SECONDS = 3600.0
"""How long a place counts after its value was last skipped. By then it may be deleted."""
_T = TypeVar("_T")


def text_of(value: bytes) -> str:
    """Return text from Redis. Bytes that are not UTF-8 are shown as escapes."""
    return value.decode(errors="backslashreplace")


class Unreadable:
    """The unreadable values of a queue that one connection found. One bad value must not stop the work on all others.

    Threads may share it.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._skipped: dict[str, float] = {}
        """When each value was last skipped, in this order."""

    @property
    def places(self) -> set[str]:
        """What could not be read in the last hour, such as `job ID`; at most 1,000 places."""
        with self._lock:
            self._forget_old()
            return set(self._skipped)

    def skip(self, place: str) -> None:
        """Note a value that is skipped, and log it the first time."""
        with self._lock:
            self._forget_old()
            is_new = self._skipped.pop(place, None) is None
            if is_new and len(self._skipped) >= MOST_PLACES:
                return
            self._skipped[place] = self._clock()
        if is_new:
            log.error("value in redis cannot be read, it is skipped", value=place)

    def _forget_old(self) -> None:
        end = self._clock() - KEEP_SECONDS
        while self._skipped and next(iter(self._skipped.values())) <= end:
            del self._skipped[next(iter(self._skipped))]

    def try_read(self, place: str, read: Callable[[], _T]) -> _T | None:
        """Return what `read` returns, or None if it cannot read the value."""
        try:
            return read()
        except (UnreadableValue, *UNREADABLE):
            self.skip(place)
            return None
