from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest

from ballast_cli.demo.load import Client, HttpCall, Sample, call
from ballast_sim.replay.traffic import Arrival

T = TypeVar("T")
EVENT = b'data: {"choices": [{"text": "a"}]}\n\n'
END = (
    b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 2, "prompt_tokens_details": '
    b'{"cached_tokens": 1}}}\n\ndata: [DONE]\n\n'
)


class Worker:
    """A real HTTP server on loopback that answers as its script says."""

    def __init__(self, *parts: bytes, status: int = 200, gate: asyncio.Event | asyncio.Barrier | None = None) -> None:
        self.parts, self.status, self.gate = parts, status, gate
        self.connections = 0
        self.bodies: list[bytes] = []

    async def __aenter__(self) -> Client:
        self.server = await asyncio.start_server(self.answer, "127.0.0.1", 0)
        self.client = Client(*self.server.sockets[0].getsockname()[:2])
        return self.client

    async def __aexit__(self, *_: object) -> None:
        self.client.close()
        self.server.close()
        await self.server.wait_closed()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                self.bodies.append(await reader.readexactly(length))
                if self.gate:
                    await self.gate.wait()
                writer.write(f"HTTP/1.1 {self.status} x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
                for part in (*self.parts, b""):
                    writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
                    await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def make_call(at: float = 0.0) -> HttpCall:
    return call(Arrival(at, 3, 2), {"prompt": "x"})


def talk(worker: Worker, say: Callable[[Client], Awaitable[T]]) -> T:
    """Return what a client of the worker gets."""

    async def scene() -> T:
        async with worker as client:
            return await say(client)

    return asyncio.run(scene())


def replay(*parts: bytes, status: int = 200) -> Sample:
    """Return the sample of one call that the worker answers with these parts."""
    (sample,) = talk(Worker(*parts, status=status), lambda client: client.replay([make_call()]))
    return sample


def test_an_answer_gives_its_times_and_its_counts():
    sample = replay(EVENT, EVENT, END)

    assert sample.failure == ""
    assert (sample.prompt_tokens, sample.output_tokens) == (3, 2)
    assert 0 < sample.ttft <= sample.last
    assert sample.tpot == sample.last - sample.first


def test_connections_are_kept_and_used_again():
    worker = Worker(EVENT, END)

    async def ask_five_times(client: Client) -> None:
        for _ in range(5):
            await client.replay([make_call()])

    talk(worker, ask_five_times)

    assert worker.connections == 1
    assert [json.loads(body) for body in worker.bodies] == [{"prompt": "x"}] * 5


def test_calls_go_out_at_their_time_though_none_was_answered_yet():
    # Nobody gets an answer before all ten have asked.
    worker = Worker(EVENT, END, gate=asyncio.Barrier(10))
    samples = talk(worker, lambda client: client.replay([make_call(0.001 * i) for i in range(10)]))

    assert [sample.failure for sample in samples] == [""] * 10


def test_time_counts_from_the_scheduled_send_and_not_from_the_late_one():
    sample = talk(Worker(EVENT, END), lambda client: client.send(make_call(), time.perf_counter() - 5))

    assert sample.late > 5
    assert sample.ttft > 5


def test_a_comment_that_keeps_the_connection_alive_is_no_first_token():
    sample = replay(b": keepalive\n\n")

    assert sample.first is None
    assert "does not end with an event" in sample.failure


@pytest.mark.parametrize(
    ("parts", "status", "said"),
    [
        ((b'{"error": {"message": "full"}}',), 429, "HTTP 429"),
        ((EVENT, b'data: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n'), 200, "stream ended with an error"),
        ((EVENT, b"data: [DONE]\n\n"), 200, "no usage"),
        ((EVENT, b"data: {oops\n\n"), 200, "does not end with an event"),
    ],
)
def test_a_failed_answer_says_why_and_counts_no_time(parts: tuple[bytes, ...], status: int, said: str):
    sample = replay(*parts, status=status)

    assert said in sample.failure
    assert sample.ttft is None
    assert sample.tpot is None


def test_a_worker_that_is_gone_is_a_failure_of_each_call():
    samples = asyncio.run(Client("127.0.0.1", 1).replay([make_call(), make_call()]))

    assert all("ConnectionRefusedError" in sample.failure for sample in samples)


def test_an_answer_that_never_comes_ends_with_the_patience():
    worker = Worker(EVENT, gate=asyncio.Event())
    (sample,) = talk(worker, lambda client: client.replay([make_call()], grace=0.01))

    assert sample.failure == "the answer did not come in time"


def test_saturation_keeps_so_many_under_way_and_no_more():
    worker = Worker(EVENT, END)
    samples = talk(worker, lambda client: client.saturate(itertools.repeat(make_call()), width=3, seconds=0.05))

    assert worker.connections == 3
    assert len(samples) >= 3
    assert all(sample.failure == "" for sample in samples)


def test_a_page_of_the_worker_is_fetched_whole():
    assert talk(Worker(b"one ", b"two"), lambda client: client.get("/metrics")) == b"one two"
    with pytest.raises(OSError, match="404"):
        talk(Worker(b"no", status=404), lambda client: client.get("/nothing"))
