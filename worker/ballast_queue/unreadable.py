"""Values in Redis that this version cannot read: they are skipped, and named once."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from ballast_log import Log
from ballast_queue.errors import UnreadableValue

log = Log(__name__)

UNREADABLE = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""The failures of code that reads a value which another version, or anybody else, stored."""
MOST_PLACES = 1000
_T = TypeVar("_T")


def text_of(value: bytes) -> str:
    """Return text from Redis. Bytes that are not UTF-8 are shown as escapes."""
    return value.decode(errors="backslashreplace")


class Unreadable:
    """The unreadable values that one connection found. One bad value must not stop the work on all others."""

    def __init__(self) -> None:
        self.places: set[str] = set()
        """What could not be read, such as `job ID`; at most 1,000 places."""

    def skip(self, place: str) -> None:
        """Note a value that is skipped, and log it the first time."""
        if place not in self.places and len(self.places) < MOST_PLACES:
            self.places.add(place)
            log.error("value in redis cannot be read, it is skipped", value=place)

    def try_read(self, place: str, read: Callable[[], _T]) -> _T | None:
        """Return what `read` returns, or None if it cannot read the value."""
        try:
            return read()
        except (UnreadableValue, *UNREADABLE):
            self.skip(place)
            return None
