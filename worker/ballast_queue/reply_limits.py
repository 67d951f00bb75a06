"""Connections that refuse a reply which is too large or too slow, for a server that may be hostile.

redis-py reads a reply of any size into memory. It limits the wait for each part of a reply, and not the whole.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import redis
from redis._parsers.resp2 import _RESP2Parser
from redis._parsers.socket import SocketBuffer
from redis.exceptions import InvalidResponse

ELEMENT_BYTES = 64
"""Memory of one element of a list, besides its bytes. Four bytes of a reply can announce an empty list."""


class ReplyTooLarge(InvalidResponse):
    """A reply takes more memory than the connection admits."""


@dataclass(frozen=True, slots=True)
class ReplyLimits:
    """What one reply may take."""

    most_bytes: int
    """Memory: its bytes, and `ELEMENT_BYTES` for each element."""
    seconds: float
    """Time from its first byte to its last one."""


def limited(kind: type[redis.Connection], limits: ReplyLimits) -> type[redis.Connection]:
    """Return a class of connections that close on a reply beyond the limits."""

    class Limited(kind):  # type: ignore[misc, valid-type]
        def set_parser(self, parser_class: Any) -> None:
            # The client of a cluster sets a parser that knows more errors.
            known = {"EXCEPTION_CLASSES": parser_class.EXCEPTION_CLASSES, "limits": limits}
            super().set_parser(type("LimitedParser", (_Parser,), known))

    return Limited


class _Parser(_RESP2Parser):
    limits: ReplyLimits
    _buffer: _Buffer

    def on_connect(self, connection: Any) -> None:
        super().on_connect(connection)  # type: ignore[no-untyped-call]
        self._buffer = _Buffer(self.limits, self._sock, self.socket_read_size, connection.socket_timeout)

    def read_response(self, *arguments: Any, **options: Any) -> Any:
        if self._buffer is not None:  # the connection is open
            self._buffer.begin()
        return super().read_response(*arguments, **options)

    def _read_response(self, *arguments: Any, **options: Any) -> Any:
        if self._buffer is not None:
            self._buffer.take(ELEMENT_BYTES)
        return super()._read_response(*arguments, **options)


class _Buffer(SocketBuffer):
    """Counts what the present reply has taken."""

    def __init__(self, limits: ReplyLimits, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._limits = limits
        self.begin()

    def begin(self) -> None:
        """Begin to count for the next reply."""
        self._left = self._limits.most_bytes
        self._end: float | None = None  # the server may take its time until the first byte

    def take(self, size: int) -> None:
        """Count memory.

        Raises:
            ReplyTooLarge: the reply takes more than it may.
        """
        self._left -= size
        if self._left < 0:
            raise ReplyTooLarge

    def read(self, length: int, *arguments: Any, **options: Any) -> bytes:
        if length > self._left and length - self.unread_bytes() > self._left:  # before more is received
            raise ReplyTooLarge
        data: bytes = super().read(length, *arguments, **options)
        return data

    def _read_from_socket(self, length: int | None = None, *arguments: Any, **options: Any) -> bool:
        missing = length or 1
        while missing > 0:
            if self._end is not None and time.monotonic() > self._end:
                raise redis.TimeoutError
            before = self.unread_bytes()
            if not super()._read_from_socket(None, *arguments, **options):
                return False
            received = self.unread_bytes() - before
            self.take(received)
            missing -= received
            self._end = self._end or time.monotonic() + self._limits.seconds
        return True
