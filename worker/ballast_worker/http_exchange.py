"""One HTTP request and its response on plain ASGI: limited body, JSON, server-sent events, disconnects.

Starlette's responses start a task group for every stream, which costs more than the tokens of a step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn
from uuid import uuid4

from starlette.types import Message, Receive, Scope, Send

from ballast_openai.errors import describe
from ballast_worker.bodies import BodyShare
from ballast_worker.errors import Refused

JSON = (b"content-type", b"application/json")
CLOSE = (b"connection", b"close")
EVENT_STREAM = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would buffer the tokens
)
PART_BYTES = 65536
TOO_DEEP = "The body is nested too deeply."
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


class ClientGone(Exception):
    """The client closed the connection."""


class HttpExchange:
    """One request and its response."""

    __slots__ = ("_receive", "_send", "headers", "is_last", "is_started", "request_id")

    def __init__(self, scope: Scope, receive: Receive, send: Send, *, is_last: bool = False) -> None:
        """Read the head of a request. With `is_last`, the response closes the connection."""
        self._receive = receive
        self._send = send
        self.headers = by_name(scope["headers"])
        self.request_id = request_id(self.headers)
        self.is_last = is_last
        self.is_started = False

    async def body(self, limit: int, share: BodyShare) -> bytearray:
        """Return the whole body.

        Raises:
            Refused: 413 as soon as the body exceeds `limit` bytes, 429 as soon as it exceeds its share of the memory.
            ClientGone: the client closed the connection before the end of the body.
        """
        digits = self.headers.get(b"content-length", b"").lstrip(b"0")
        length = int(digits[:20]) if digits.isdigit() else 0  # `int` refuses thousands of digits, and 20 are too large
        if length > limit:
            _too_large(limit, f"{length} bytes")
        share.check(length)
        body = bytearray()
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size = len(body) + len(part)
            if size > limit:
                _too_large(limit, f"more than {limit} bytes")
            share.grow(size)
            body += part
            if not message.get("more_body", False):
                return body

    async def gone(self) -> None:
        """Wait until the client closes the connection. Call it after the body is read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (JSON,)) -> None:
        """Send a whole response."""
        length = (b"content-length", b"%d" % len(body))
        await self._start(status, [*headers, length])
        await send_in_parts(self._send, {"type": "http.response.body", "body": body})

    async def refuse(self, refused: Refused) -> None:
        """Send an error in OpenAI's format."""
        extra = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in refused.headers.items()]
        await self.answer(refused.status, refused.as_openai(), [JSON, *extra])

    async def start_events(self) -> None:
        """Start a stream of server-sent events."""
        await self._start(200, list(EVENT_STREAM))

    async def event(self, data: bytes, *, is_last: bool = False) -> None:
        """Send whole events of the stream at once."""
        await self._send({"type": "http.response.body", "body": data, "more_body": not is_last})

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.is_started = True
        headers.append((b"x-request-id", self.request_id))
        if self.is_last and CLOSE not in headers:
            headers.append(CLOSE)
        await self._send({"type": "http.response.start", "status": status, "headers": headers})


def request_id(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the id that the client sent, or a new one."""
    found = headers.get(b"x-request-id", b"")
    return found if _REQUEST_ID.fullmatch(found) else uuid4().hex.encode()


def by_name(lines: Sequence[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the value of each header. Lines of one name that differ are a list, as HTTP defines.

    So a line that a client adds to that of a gateway makes a wrong value, and does not replace it.
    """
    headers = dict(lines)
    if len(headers) < len(lines):
        values: dict[bytes, dict[bytes, None]] = {}
        for name, value in lines:
            values.setdefault(name, {})[value] = None
        headers = {name: b", ".join(found) for name, found in values.items()}
    return headers


async def send_in_parts(send: Send, message: Message) -> None:
    """Send a message, whose body may be large.

    Servers wait for a slow client between two messages. A large one would be in their buffers as a whole, and its
    connection would look idle.
    """
    body: bytes = message.get("body", b"")
    last = (len(body) - 1) // PART_BYTES * PART_BYTES
    if last > 0:
        for start in range(0, last, PART_BYTES):
            await send({**message, "body": body[start : start + PART_BYTES], "more_body": True})
        message = {**message, "body": body[last:]}
    await send(message)


def read_json(raw: bytearray) -> dict[str, object]:
    """Return a body as a JSON object.

    Raises:
        Refused: the body is not UTF-8, not JSON, or not an object.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refused(
            400,
            f"The body is not UTF-8: byte {error.start} is 0x{raw[error.start]:02x}. Send JSON encoded as UTF-8.",
            code="invalid_utf8",
        ) from None
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise Refused(400, TOO_DEEP, code="invalid_json") from None
    except ValueError as error:
        found = f"{text[:40]!r}" if text.strip() else "an empty body"
        raise Refused(
            400, f"The body is not JSON ({error}): found {found}. Send one JSON object.", code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise Refused(400, f"The body is {describe(value)}, expected a JSON object: {{...}}.", code="invalid_json")
    return value


def event(data: Mapping[str, object]) -> bytes:
    """Return a server-sent event."""
    return b"data: " + compact(data) + b"\n\n"


_encode = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
_LINE_ENDS = str.maketrans({"\x85": r"\u0085", "\u2028": r"\u2028", "\u2029": r"\u2029"})


def compact(value: object) -> bytes:
    """Return JSON without blanks, on one line for each reader.

    JSON escapes all ends of lines but three, at which Python's `splitlines`, and so httpx, divides an event.
    """
    text = _encode(value)
    if not text.isascii() and ("\u2028" in text or "\u2029" in text or "\x85" in text):
        text = text.translate(_LINE_ENDS)
    return text.encode()


def _too_large(limit: int, found: str) -> NoReturn:
    raise Refused(
        413,
        f"The body has {found}, the limit is {limit} bytes (limits.maxBodyKibibytes). Send a smaller body, "
        "or submit the work as a job.",
        code="request_too_large",
        headers={"connection": "close"},  # the rest of the body is not read
    )


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
