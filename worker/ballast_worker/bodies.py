"""The memory and the threads for request bodies, both bounded.

A body of 4 MiB becomes up to a hundred megabytes of Python objects, and takes up to a second to check and to tokenize.
Short bodies are read on the event loop. Longer ones are read on threads, one at a time for each size.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from ballast_worker.errors import Refused

MOST_BODY_BYTES = 64 * 1024 * 1024
"""Memory for the bodies that are being received and read, besides the free bytes of each request."""
FREE_BYTES = 65536
"""The first bytes of each body need no share of the memory, so that large bodies never hold up usual requests."""
SHORT_BYTES = 8192
"""Reading a body up to this size takes about a millisecond, too little for another thread."""
LONG_BYTES = 256 * 1024
"""Bodies above this size have a thread of their own."""

MOST_WAITING = 512
"""Bodies that wait for a thread. More would take every connection, and no probe of Kubernetes would get an answer."""

MOST_REST_SECONDS = 1.0

_T = TypeVar("_T")


class BodyMemory:
    """Bytes of request bodies in memory. Only the event loop uses it; any thread may change the limit."""

    def __init__(self, least: int = MOST_BODY_BYTES) -> None:
        """Start with the limit `least`, which it never falls below."""
        self.limit = self._least = least
        self.used = 0

    def fit(self, max_body_kibibytes: int) -> None:
        """Set the limit so that four bodies of the largest size fit, at least the limit of the start."""
        self.limit = max(self._least, 4 * 1024 * max_body_kibibytes)

    @contextlib.contextmanager
    def share(self) -> Iterator[BodyShare]:
        """Return a share for one body, which ends with the block if nothing ends it before."""
        share = BodyShare(self)
        try:
            yield share
        finally:
            share.end()


class BodyShare:
    """The memory of one body."""

    def __init__(self, memory: BodyMemory) -> None:
        self.size = 0
        self._memory = memory

    def grow(self, num_bytes: int) -> None:
        """Extend the share to a body of `num_bytes`.

        Raises:
            Refused: other bodies use the memory.
        """
        more = self.check(num_bytes)
        self._memory.used += more
        self.size += more

    def end(self) -> None:
        """Return the share to the memory."""
        self._memory.used -= self.size
        self.size = 0

    def check(self, num_bytes: int) -> int:
        """Return how much the share must grow for a body of `num_bytes`. A body that is only announced takes nothing.

        Raises:
            Refused: other bodies use the memory.
        """
        memory = self._memory
        more = max(0, num_bytes - FREE_BYTES - self.size)
        if more and memory.used + more > memory.limit:
            raise _too_many(
                f"The request bodies in the memory of the worker take {memory.used} bytes, the limit is "
                f"{memory.limit} bytes"
            )
        return more


class BodyReaders:
    """One thread for long bodies, and one for those between long and short. Only the event loop uses it."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="ballast-body")
        self._medium, self._long = asyncio.Lock(), asyncio.Lock()
        self._num_waiting = 0

    @contextlib.asynccontextmanager
    async def reader(self, num_bytes: int) -> AsyncIterator[BodyReader]:
        """Wait for the reader of bodies of this size.

        The reader of long bodies then rests for as long as it worked: JSON and chat templates hold the interpreter
        lock, which the engine and the event loop need too.

        Raises:
            Refused: too many bodies wait.
        """
        if num_bytes <= SHORT_BYTES:
            yield BodyReader(None)
            return
        lock = self._medium if num_bytes <= LONG_BYTES else self._long
        await self._wait_for(lock)
        loop = asyncio.get_running_loop()
        begin = loop.time()
        try:
            yield BodyReader(self._threads)
        finally:
            if lock is self._long:
                loop.call_later(min(loop.time() - begin, MOST_REST_SECONDS), lock.release)
            else:
                lock.release()

    async def _wait_for(self, lock: asyncio.Lock) -> None:
        if self._num_waiting >= MOST_WAITING:
            raise _too_many(
                f"{self._num_waiting} request bodies wait to be read, which is the limit", "too_many_bodies"
            )
        self._num_waiting += 1
        try:
            await lock.acquire()
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the threads after their current body."""
        self._threads.shutdown(wait=False, cancel_futures=True)


class BodyReader:
    """Runs the work on one body."""

    def __init__(self, threads: ThreadPoolExecutor | None) -> None:
        self._threads = threads

    async def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, which may run on a thread."""
        if self._threads is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _too_many(found: str, code: str = "too_many_bytes") -> Refused:
    return Refused(
        429,
        f"{found}. Retry after 1 s.",
        code=code,
        kind="rate_limit_error",
        headers={"retry-after": "1", "connection": "close"},
    )
