"""HTTP connections with limits on headers, bodies, time, and their number.

uvicorn's httptools protocol limits neither headers nor time. Its h11 protocol limits the size of headers only, and
parses in Python. hypercorn also parses with h11. granian has such limits, but runs the app in processes of its own,
while the app of a worker shares the process with the engine. So `HttpConnection` adds limits to the httptools protocol.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import inf
from typing import Any, NoReturn, cast

import httptools
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from ballast_worker.errors import Refused
from ballast_worker.http_exchange import by_name, request_id
from ballast_worker.open_files import allow_files
from ballast_worker.responses import stopping

SWEEP_SECONDS = 0.5
"""Time between two checks of the deadlines."""
LINGER_SECONDS = 2
"""How long the server waits for an answered client to close. A close with unread data would discard the answer."""
LINGER_BYTES = 1024 * 1024
"""Bytes that the server still reads from a client after the answer."""
NOT_HTTP = Refused(400, "The request is not HTTP/1.1.", code="invalid_http")


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What clients may send, and for how long."""

    connections: int = 1024
    """Most open connections; see `Connections.opened`."""
    head_bytes: int = 65536
    """Request line, headers and trailers of a request."""
    head_seconds: float = 10
    """Time for the headers of a request, also before the first byte of a connection."""
    body_seconds: float = 60
    idle_seconds: float = 75
    """Load balancers drop idle connections after a minute. This is longer, so that they close first."""
    write_seconds: float = 60
    """Time without progress while the client does not read its answer."""
    pipelined: int = 8
    """Requests of a connection that wait for the answer to an earlier one."""

    @classmethod
    def beside(cls, num_requests: int) -> HttpLimits:
        """Return limits with a connection for each request that may run or wait, and the usual number beside."""
        return cls(connections=cls().connections + num_requests)


class Closed(StrEnum):
    """Why the server closed a connection before its client did; the label of `ballast_http_closed_total`."""

    CROWDED = "too_many_connections"
    HEAD_SIZE = "head_too_large"
    HEAD_TIME = "head_too_slow"
    BODY_TIME = "body_too_slow"
    IDLE = "idle"
    WRITE_TIME = "answer_not_read"
    PIPELINED = "too_many_pipelined"


class _Phase(StrEnum):
    """What a connection waits for."""

    HEAD = "head"
    BODY = "body"
    ANSWER = "answer"
    IDLE = "idle"
    CLOSING = "closing"
    """The server has sent its last byte, and waits for the client."""


_LATE = {_Phase.HEAD: Closed.HEAD_TIME, _Phase.BODY: Closed.BODY_TIME, _Phase.IDLE: Closed.IDLE}


class Connections:
    """The open connections of one server. Only its event loop uses them, except for `fit`."""

    def __init__(self, limits: HttpLimits) -> None:
        self.limits = replace(limits, connections=allow_files(limits.connections))
        self.closed = dict.fromkeys(Closed, 0)
        """Connections that the server closed."""
        self._open: set[HttpConnection] = set()
        self._waiting: dict[HttpConnection, None] = {}
        """Connections that wait for their client, the longest waiting first."""

    def fit(self, num_requests: int) -> None:
        """Change the number of connections to that of `HttpLimits.beside`. Any thread may call it."""
        self.limits = replace(self.limits, connections=allow_files(HttpLimits.beside(num_requests).connections))

    @property
    def by_phase(self) -> dict[str, int]:
        """The number of open connections, by what they wait for."""
        counts = Counter(connection.phase for connection in list(self._open))
        return {phase.value: counts[phase] for phase in _Phase}

    def protocol(self) -> type[asyncio.Protocol]:
        """Return what makes the protocol of a new connection, as `http_protocol_class` of uvicorn's configuration."""
        return cast("type[asyncio.Protocol]", partial(HttpConnection, self))

    def opened(self, connection: HttpConnection) -> None:
        """Add a connection. If there are too many, close the one that waits longest for its client, or this one."""
        self._open.add(connection)
        self.moved(connection)
        if len(self._open) > self.limits.connections:
            longest = next(iter(self._waiting), connection)
            if longest is connection:
                message = "The worker has too many open connections. Retry after 1 s."
                refused = Refused(503, message, code="too_many_connections", headers={"retry-after": "1"})
                connection.refuse(Closed.CROWDED, refused)
            else:
                self.closed[Closed.CROWDED] += 1
                self.forget(longest)
                longest.transport.abort()

    def moved(self, connection: HttpConnection) -> None:
        """Note that the phase of a connection changed."""
        self._waiting.pop(connection, None)
        if connection.phase is not _Phase.ANSWER and connection in self._open:
            self._waiting[connection] = None

    def forget(self, connection: HttpConnection) -> None:
        """Remove a connection."""
        self._open.discard(connection)
        self._waiting.pop(connection, None)

    def sweep(self, now: float) -> None:
        """Close the connections whose time is over."""
        for connection in list(self._open):
            connection.check_time(now)


class HttpConnection(HttpToolsProtocol):
    """One connection within the limits."""

    def __init__(self, connections: Connections, **options: Any) -> None:
        super().__init__(**options)
        self.phase = _Phase.HEAD
        self._connections = connections
        self._limits = connections.limits
        self._deadline = self._write_deadline = inf
        self._in_head = True
        """Whether the headers of the next request have begun, or must begin soon on a new connection."""
        self._in_body = False
        self._has_begun = False
        """Whether a byte of the next request has arrived."""
        self._head_bytes = self._body_bytes = 0
        self._other_bytes = 0
        """Bytes of the request that are not parsed yet, and the framing of chunks."""
        self._parsed_bytes = 0
        """Bytes of heads and bodies of all requests."""
        self._waiting_bytes = 0
        """Bytes that arrived while requests wait for the answer to an earlier one."""
        self._running: RequestResponseCycle | None = None
        """The request that the app answers. uvicorn's `cycle` is the last one that arrived, which may wait."""
        self._error: tuple[Closed | None, Refused] | None = None
        """The limit that stopped the parser."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(cast("asyncio.Transport", _PatientTransport(transport, self)))
        self._enter(_Phase.HEAD)
        self._connections.opened(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        self.phase = _Phase.CLOSING
        self._disconnect()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.phase is _Phase.CLOSING:
            self._other_bytes += len(data)
            if self._other_bytes > LINGER_BYTES:
                self.flow.pause_reading()  # a flood costs nothing more, and its client waits
            return
        before = self._parsed_bytes
        self._feed(data)
        if self.pipeline:
            self._read_on(len(data))
        if self._in_head or self._in_body:
            self._has_begun = True
            self._other_bytes += len(data) - (self._parsed_bytes - before)
            # A chunk has a few bytes of framing, however small it is.
            if self._head_bytes + self._other_bytes > self._limits.head_bytes + 8 * self._body_bytes:
                self.refuse(*self._too_large())
        self._update()

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002 -- Ballast answers in the format of OpenAI
        if self._error is not None:
            self.refuse(*self._error)
        else:
            self.refuse(None, NOT_HTTP)

    # Calls of the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = self._has_begun = True
        self._head_bytes = self._body_bytes = self._other_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + 4)
        if self._in_head:  # the app would take a trailer for a header
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            if self.parser.get_method() == b"CONNECT":
                self._stop_parser(None, NOT_HTTP)
            return  # `_feed` parses the request again
        if len(self.pipeline) >= self._limits.pipelined:
            message = f"More than {self._limits.pipelined} requests of the connection wait for an earlier answer."
            self._stop_parser(Closed.PIPELINED, Refused(429, message, code="too_many_pipelined"))
        self._in_head, self._in_body = False, True
        num_waiting = len(self.pipeline)
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.__class__ = _UnframedCycle
        if len(self.pipeline) == num_waiting:
            self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._parsed_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._in_body = self._has_begun = False
        super().on_message_complete()

    def on_response_complete(self) -> None:
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._running = following
        if not self.pipeline:
            self._waiting_bytes = 0
        self._update()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_deadline = self.loop.time() + self._limits.write_seconds

    def resume_writing(self) -> None:
        super().resume_writing()
        self._write_deadline = inf

    def shutdown(self) -> None:
        """Close the connection as soon as it is idle. A request that has not arrived is refused."""
        if self._has_begun and self.phase in _LATE:
            self.refuse(None, stopping())
        else:
            super().shutdown()

    # Limits

    def check_time(self, now: float) -> None:
        """Close the connection if its client took too long."""
        if now >= self._write_deadline:
            self._connections.closed[Closed.WRITE_TIME] += 1
            self.transport.abort()
        elif now < self._deadline:
            return
        elif self.phase is _Phase.CLOSING:
            self.transport.abort()
        elif self.phase is _Phase.IDLE or not self._has_begun:
            self._connections.closed[_LATE[self.phase]] += 1
            self.transport.close()
        else:
            seconds = self._limits.head_seconds if self.phase is _Phase.HEAD else self._limits.body_seconds
            message = f"The {self.phase} of the request did not arrive within {seconds:g} s."
            self.refuse(_LATE[self.phase], Refused(408, message, code="request_timeout"))

    def refuse(self, why: Closed | None, refused: Refused) -> None:
        """Answer with an error, unless another answer has begun, and close the connection."""
        if self.phase is _Phase.CLOSING:
            return
        if why is not None:
            self._connections.closed[why] += 1
        cycle = self.cycle
        if cycle is None or (cycle.response_complete if self._in_head else not cycle.response_started):
            body = refused.as_openai()
            fixed = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
            fixed["x-request-id"] = request_id(by_name(self.headers or ())).decode()
            headers = "".join(f"{name}: {value}\r\n" for name, value in (fixed | dict(refused.headers)).items())
            self.transport.write(STATUS_LINE[refused.status] + headers.encode("latin-1") + b"\r\n" + body)
        self.close_patiently()

    def close_patiently(self) -> None:
        """Send what is written, and close when the client does, or after some seconds."""
        if self.phase is _Phase.CLOSING:
            return
        self._enter(_Phase.CLOSING)
        self._other_bytes = 0
        self._disconnect()
        if self._has_begun and self.transport.can_write_eof():
            self.flow.resume_reading()
            self.transport.write_eof()
        else:
            self._deadline = self.loop.time() + self._limits.write_seconds
            self.transport.close_now()  # type: ignore[attr-defined]

    def _disconnect(self) -> None:
        """End the request that the app answers: its client is gone, or gets no more."""
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _too_large(self) -> tuple[Closed, Refused]:
        message = f"The headers of the request have more than {self._limits.head_bytes} bytes."
        return Closed.HEAD_SIZE, Refused(431, message, code="headers_too_large")

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        self._parsed_bytes += size
        if self._head_bytes > self._limits.head_bytes:
            self._stop_parser(*self._too_large())

    def _feed(self, data: bytes) -> None:
        """Parse what arrived. A request that offers another protocol, as each first one of Java does, is HTTP/1.1."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as offer:
            # The parser takes what follows the headers for the other protocol. Without the offer, it is the body.
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._feed(b"\r\n".join([*lines, b"", data[offer.args[0] :]]))

    def _read_on(self, num_bytes: int) -> None:
        """Continue to read while requests wait, up to a limit. uvicorn would not see that the client leaves."""
        self._waiting_bytes += num_bytes
        if self._waiting_bytes <= self._limits.head_bytes:
            self.flow.resume_reading()
        else:
            self.flow.pause_reading()

    def _stop_parser(self, why: Closed | None, refused: Refused) -> NoReturn:
        """Make the parser call `send_400_response`."""
        self._error = why, refused
        raise refused

    def _update(self) -> None:
        """Derive the phase from what has arrived and what is answered."""
        if self.phase is _Phase.CLOSING:
            return
        if self._in_body and not self.pipeline:
            phase = _Phase.BODY
        elif self.cycle is not None and not self.cycle.response_complete:
            phase = _Phase.ANSWER
        else:
            phase = _Phase.HEAD if self._in_head else _Phase.IDLE
        if phase is not self.phase:
            self._enter(phase)

    def _enter(self, phase: _Phase) -> None:
        seconds = {
            _Phase.HEAD: self._limits.head_seconds,
            _Phase.BODY: self._limits.body_seconds,
            _Phase.ANSWER: inf,
            _Phase.IDLE: self._limits.idle_seconds,
            _Phase.CLOSING: LINGER_SECONDS,
        }
        self.phase = phase
        self._deadline = self.loop.time() + seconds[phase]
        self._connections.moved(self)


class _UnframedCycle(RequestResponseCycle):
    """An answer to HTTP/1.0, which knows no chunks. A stream ends with its connection."""

    async def send(self, message: Any) -> None:
        self.chunked_encoding = False
        self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _PatientTransport:
    """A transport that does not discard an answer while the client still sends its body."""

    def __init__(self, transport: asyncio.Transport, connection: HttpConnection) -> None:
        self._transport = transport
        self._connection = connection
        self.write = transport.write

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        return self._connection.phase is _Phase.CLOSING or self._transport.is_closing()

    def close(self) -> None:
        self._connection.close_patiently()

    def close_now(self) -> None:
        self._transport.close()
