"""The load of a chaos run: jobs that are submitted with a key, and online requests that know which worker had them."""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from urllib.parse import urlsplit

from stacks import Stack, WorkerLife

from ballast_queue.errors import JobStateConflict, QueueError
from ballast_queue.redis_store import Queue

MODEL = "ballast-tiny"
BACKLOG = 400
"""Waiting items below which the next job is submitted."""
ANSWER_SECONDS = 120.0


def line(name: str, tokens: int) -> bytes:
    """Return one line of a job."""
    body = {"model": MODEL, "prompt": f"Chapter {name}. The harbour", "max_tokens": tokens, "temperature": 0}
    item = {"custom_id": name, "method": "POST", "url": "/v1/completions", "body": body | {"ignore_eos": True}}
    return json.dumps(item).encode()


@dataclass(slots=True)
class SubmittedJob:
    """A job that Redis has acknowledged."""

    key: str
    job_id: str
    custom_ids: list[str]
    is_cancelled: bool = False


@dataclass(slots=True)
class Jobs:
    """Submit jobs until it is stopped. A job whose submission broke off is submitted again with the same key."""

    redis_url: Callable[[], str | None]
    queue: str
    rng: random.Random
    most_items: int = 120
    submitted: list[SubmittedJob] = field(default_factory=list)
    finished: int = 0
    """Items with a result at the last look."""
    _number: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Finish the submission that is under way, and end the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    @property
    def num_items(self) -> int:
        """Return the items of all submitted jobs."""
        return sum(len(job.custom_ids) for job in self.submitted)

    def _run(self) -> None:
        queue: Queue | None = None
        pending: tuple[str, list[str], list[bytes]] | None = None
        while not (self._stop.is_set() and pending is None):
            try:
                if queue is None:
                    queue = self._connect()
                if queue is None:
                    time.sleep(0.2)
                    continue
                items = queue.stats().items
                self.finished = items.succeeded + items.failed + items.cancelled + items.expired
                if pending is None and items.waiting < BACKLOG:
                    pending = self._draw()
                if pending is not None:
                    key, names, lines = pending
                    made = queue.submissions.submit(lines, tenant=f"tenant-{self._number % 5}", key=key)
                    self.submitted.append(SubmittedJob(key, made.job_id, names))
                    pending = None
                    self._cancel_some(queue)
            except QueueError:
                if queue is not None:
                    queue.close()
                queue = None
                time.sleep(0.2)
            else:
                time.sleep(0.1)
        if queue is not None:
            queue.close()

    def _connect(self) -> Queue | None:
        url = self.redis_url()
        return Queue.connect(url, self.queue) if url else None

    def _draw(self) -> tuple[str, list[str], list[bytes]]:
        self._number += 1
        names = [f"job-{self._number}-{i}" for i in range(self.rng.randint(1, self.most_items))]
        return f"key-{self._number}", names, [line(name, self.rng.randint(1, 24)) for name in names]

    def _cancel_some(self, queue: Queue) -> None:
        if self.rng.random() < 0.03:
            job = self.submitted[-1]
            with suppress(JobStateConflict):
                queue.jobs.cancel(job.job_id)
                job.is_cancelled = True


class Outcome(StrEnum):
    """The outcome of an online request."""

    ANSWERED = "answered"
    REFUSED = "refused"
    """No worker accepted it: no connection, 429, 503, or a worker that was ending when the request came."""
    EXCUSED = "lost with its killed worker"
    LOST = "LOST"


@dataclass(slots=True)
class Online:
    """Clients that ask one worker after the other, and note which worker had each request."""

    stacks: Sequence[Stack]
    lanes: int = 2
    """Clients per worker."""
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="online", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the requests that are under way, and end the thread."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    async def _run(self) -> None:
        await asyncio.gather(*(self._lane(stack, lane) for stack in self.stacks for lane in range(self.lanes)))

    async def _lane(self, stack: Stack, lane: int) -> None:
        number = 0
        while not self._stop.is_set():
            life = stack.life
            if life is None:
                await asyncio.sleep(0.2)
                continue
            number += 1
            outcome, said = await self.ask(life, f"{stack.name} {lane} {number}", is_streamed=bool(number % 3))
            self.outcomes[outcome] += 1
            if outcome is Outcome.LOST:
                self.lost.append(f"{stack.name}, worker {life.pid}: {said}")
            await asyncio.sleep(0.1 if outcome is Outcome.ANSWERED else 0.3)

    async def ask(self, life: WorkerLife, name: str, *, is_streamed: bool) -> tuple[Outcome, str]:
        """Send one request to a worker, and return its outcome with what came instead of an answer."""
        answer = b""
        try:
            reader, writer = await asyncio.open_connection(*_place(life.address))
        except OSError as error:
            return Outcome.REFUSED, str(error)
        sent = time.monotonic()
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                try:
                    writer.write(_request(name, is_streamed=is_streamed))
                    while data := await reader.read(65536):
                        answer += data
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            said = f"{type(error).__name__} after {time.monotonic() - sent:.1f} s and {len(answer)} bytes"
        else:
            said = f"closed after {time.monotonic() - sent:.1f} s: {answer[:40]!r} ... {answer[-120:]!r}"
        if _is_whole(answer, is_streamed=is_streamed):
            return Outcome.ANSWERED, ""
        if life.is_killed:
            return Outcome.EXCUSED, said
        if answer.startswith((b"HTTP/1.1 503", b"HTTP/1.1 429")):
            return Outcome.REFUSED, said
        # A request that came before the worker began to end is the worker's, even if it never read it.
        came_late = life.ending_since is not None and sent >= life.ending_since
        if not answer and came_late:
            return Outcome.REFUSED, said
        return Outcome.LOST, said


def _place(address: str) -> tuple[str, int]:
    parts = urlsplit(address)
    return str(parts.hostname), int(parts.port or 0)


def _request(name: str, *, is_streamed: bool) -> bytes:
    body = {"model": MODEL, "prompt": f"{name}: the ship", "max_tokens": 12, "ignore_eos": True, "stream": is_streamed}
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: chaos\r\nconnection: close\r\ncontent-length: {len(data)}\r\n\r\n"
    return head.encode() + data


def _is_whole(answer: bytes, *, is_streamed: bool) -> bool:
    if not answer.startswith(b"HTTP/1.1 200"):
        return False
    if is_streamed:
        return b"data: [DONE]" in answer and b'"finish_reason":"length"' in answer
    try:
        body = json.loads(answer.partition(b"\r\n\r\n")[2])
    except ValueError:
        return False
    return bool(body["usage"]["completion_tokens"] == 12)
