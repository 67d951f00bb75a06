"""The standard streams of a command: closed ones, ones whose reader has ended, and ones with few characters."""

from __future__ import annotations

import codecs
import io
import os
import select
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import TextIO


class StandardStreams:
    """The standard streams of a command."""

    def __init__(self) -> None:
        self._stdout: int | None = None
        with suppress(OSError):
            self._stdout = os.dup(sys.stdout.fileno())  # rich redirects stdout if a pipe breaks

    @property
    def is_unread(self) -> bool:
        """Return whether stdout is a pipe whose reader has ended, such as `head`."""
        if self._stdout is None:
            return False
        poll = select.poll()
        poll.register(self._stdout, 0)
        return bool(poll.poll(0))

    def close(self) -> None:
        """Close the copy of the descriptor."""
        if self._stdout is not None:
            os.close(self._stdout)


@contextmanager
def standard_streams() -> Iterator[StandardStreams]:
    """Prepare the streams for a command, and drop at its end what they could not write.

    Without this, the interpreter's flush at exit reports the failure once more, and ends with code 120.
    """
    _occupy_closed_descriptors()
    streams = sys.stdout, sys.stderr
    if isinstance(sys.stdout, io.TextIOWrapper) and _fails_on_characters(sys.stdout):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does
    with closing(StandardStreams()) as found:
        try:
            yield found
        finally:
            sys.stdout, sys.stderr = streams  # typer wraps them if a pipe breaks
            for stream in streams:
                _drop_unwritten(stream)


def _fails_on_characters(stream: TextIO) -> bool:
    """Return whether an ordinary character may be one that the stream cannot write.

    In the locale C, Python writes with surrogateescape, which expresses only the bytes that it read in this way.
    """
    is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
    return stream.errors == "strict" or (stream.errors == "surrogateescape" and not is_utf8)


def _occupy_closed_descriptors() -> None:
    """Replace descriptors that the caller has closed (`>&-`): the next file or socket would get their number.

    Messages go nowhere. Data fails as it does at a closed descriptor, and a closed standard input stays None.
    """
    for number, mode in ((0, os.O_WRONLY), (1, os.O_RDONLY), (2, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)  # takes the lowest free number
            os.set_inheritable(number, True)  # noqa: FBT003  processes that the command starts have it too
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _drop_unwritten(stream: TextIO) -> None:
    try:
        stream.flush()
    except OSError:
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
