"""An open-loop load generator over HTTP that is light enough to share two cores with the worker.

It uses raw asyncio transports, a C parser, prepared bodies, and one buffer per answer. Every time counts from the send
time in the trace. So a late client adds to the latency, and hides none.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httptools

from ballast_sim.replay.traffic import Arrival

_LATE = "the answer did not come in time"


@dataclass(frozen=True, slots=True)
class HttpCall:
    """One request that is ready to send."""

    arrival: Arrival
    data: bytes
    """HTTP head and body."""


@dataclass(slots=True)
class Sample:
    """The result of one call. Times are seconds after its scheduled send time."""

    at: float
    """Scheduled send time in seconds after the block began."""
    late: float = 0.0
    """Seconds by which the client sent the request late."""
    first: float | None = None
    last: float | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    failure: str = ""
    """Reason of a failure; empty if the call succeeded."""

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token; None if the call failed."""
        return self.first if not self.failure else None

    @property
    def tpot(self) -> float | None:
        """Seconds for each token after the first; None if the call failed, or if the answer has one token."""
        if self.failure or self.first is None or self.last is None or self.output_tokens < 2:
            return None
        return (self.last - self.first) / (self.output_tokens - 1)


def call(arrival: Arrival, body: dict[str, Any], *, path: str = "/v1/completions") -> HttpCall:
    """Build the bytes of a POST before the measurement starts."""
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: ballast\r\nContent-Type: application/json\r\n"
    return HttpCall(arrival, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)


class Client:
    """An HTTP client that keeps its connections to one worker alive."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def replay(self, calls: Sequence[HttpCall], *, grace: float = 30.0) -> list[Sample]:
        """Send every call at its time, independent of the others, and wait at most `grace` seconds for the answers."""
        began = time.perf_counter()
        tasks = []
        for one in calls:
            due = began + one.arrival.seconds
            if (wait := due - time.perf_counter()) > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.ensure_future(self.send(one, due)))
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace)
            for task in late:
                task.cancel(_LATE)
        return list(await asyncio.gather(*tasks))

    async def saturate(self, calls: Iterator[HttpCall], *, width: int, seconds: float) -> list[Sample]:
        """Keep `width` calls in flight for `seconds`, to measure the capacity of the worker."""
        began = time.perf_counter()
        samples: list[Sample] = []

        async def lane() -> None:
            while (now := time.perf_counter()) < began + seconds:
                sample = await self.send(next(calls), now)
                sample.at = now - began
                samples.append(sample)
                if sample.failure:
                    await asyncio.sleep(0.1)  # do not flood a worker that refuses requests

        await asyncio.gather(*(lane() for _ in range(width)))
        return samples

    async def send(self, one: HttpCall, due: float) -> Sample:
        """Send one call and read its answer to the end."""
        sample = Sample(at=one.arrival.seconds)
        try:
            connection = await self._connection()
            await connection.exchange(one.data, sample, due)
        except OSError as error:
            sample.failure = f"{type(error).__name__}: {error}"
            return sample
        except asyncio.CancelledError as error:
            if error.args != (_LATE,):
                raise  # Ctrl-C
            sample.failure = _LATE
            return sample
        self._free(connection)
        if not sample.failure:
            sample.failure = _read_stream(connection, sample)
        return sample

    async def get(self, path: str) -> bytes:
        """Fetch a page from the worker.

        Raises:
            OSError: the worker did not answer with status 200.
        """
        connection = await self._connection()
        sample = Sample(0.0)
        await connection.exchange(f"GET {path} HTTP/1.1\r\nHost: ballast\r\n\r\n".encode(), sample, 0.0)
        self._free(connection)
        if sample.failure or connection.status != 200:
            raise OSError(f"GET {path}: {sample.failure or connection.status}")
        return connection.body

    async def _connection(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
            self._open.discard(connection)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        self._open.add(connection)
        return connection

    def _free(self, connection: _Connection) -> None:
        if connection.is_open:
            self._idle.append(connection)
        else:
            self._open.discard(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in self._open:
            connection.close()
        self._open.clear()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """A connection that reads one answer at a time."""

    def __init__(self) -> None:
        self.status = 0
        """Status of the last answer."""
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self._sample = Sample(0)
        self._due = 0.0
        self._body: list[bytes] = []
        self._parser = httptools.HttpResponseParser(self)

    @property
    def is_open(self) -> bool:
        """Whether another call can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    @property
    def body(self) -> bytes:
        """Body of the last answer."""
        return b"".join(self._body)

    async def exchange(self, data: bytes, sample: Sample, due: float) -> None:
        """Send a request, and return when its answer or the connection has ended."""
        assert self._transport is not None
        self._sample, self._due, self._body = sample, due, []
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        sample.late = time.perf_counter() - due
        self._transport.write(data)
        try:
            await self._done
        except asyncio.CancelledError:
            self.close()
            raise

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    # Called by asyncio.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"the answer is not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"connection lost: {exc or 'closed by the worker'}")

    # Called by the parser.

    def on_body(self, body: bytes) -> None:
        if self._sample.first is None and b"data:" in body:  # a keep-alive comment is not a token
            self._sample.first = time.perf_counter() - self._due
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._sample.last = time.perf_counter() - self._due
        self.status = self._parser.get_status_code()
        if not self._parser.should_keep_alive():
            self.close()
        self._finish("")

    def _finish(self, failure: str) -> None:
        if self._done is None or self._done.done():
            return
        self._sample.failure = failure
        self._done.set_result(None)


def _read_stream(connection: _Connection, sample: Sample) -> str:
    """Read the token counts from the last event into the sample; return the reason if there are none."""
    body = connection.body
    shown = body[:200].decode(errors="replace")
    if connection.status != 200:
        return f"HTTP {connection.status}: {shown}"
    events = [line[6:] for line in body.splitlines() if line.startswith(b"data: ") and line != b"data: [DONE]"]
    try:
        last = json.loads(events[-1])
    except (IndexError, ValueError):
        return f"the answer does not end with an event in JSON: {shown}"
    if "error" in last:
        return f"the stream ended with an error: {last['error']}"
    usage = last.get("usage")
    if not usage:
        return f"the last event has no usage: {events[-1][:200].decode(errors='replace')}"
    sample.prompt_tokens, sample.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    return ""
