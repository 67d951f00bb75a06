"""Polls workers and queues in Redis in the background, so that no reconciliation waits for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ballast_api.conditions import Reason
from ballast_log import Log
from ballast_operator.addresses import Address, Addresses
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import Key
from ballast_operator.poll_result import PollResult, Problem, QueueSource
from ballast_operator.redis_hosts import RedisHosts
from ballast_queue.connection import Connection
from ballast_queue.errors import QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.redis_store import Queue

log = Log(__name__)

TIMEOUT_SECONDS = 3.0
MOST_THREADS = 8


@dataclass(slots=True)
class _Polled:
    """One resource that is polled."""

    source: QueueSource
    result: PollResult | None = None
    worked: Address | None = None
    """The address of the last poll that succeeded."""
    may_be_outdated: bool = False
    """The Secret may have changed since it was read."""
    task: asyncio.Task[None] | None = None
    soon: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to poll before the interval ends."""


class Poller:
    """The last poll of each resource. Belongs to one event loop; the polls run on a few threads."""

    def __init__(
        self,
        addresses: Addresses,
        hosts: RedisHosts,
        *,
        every_seconds: float,
        polled: Callable[[Key], None],
        outdated: Callable[[], None],
    ) -> None:
        """Prepare a poller.

        It calls `polled(key)` after each poll, and `outdated()` if the operator's own Secret may have changed.
        """
        self._addresses = addresses
        self._hosts = hosts
        self._every = every_seconds
        self._polled = polled
        self._outdated = outdated
        self._resources: dict[Key, _Polled] = {}
        self._connections: dict[Address, Connection] = {}
        self._unavailable: dict[Address, tuple[float, QueueError]] = {}
        self._threads = ThreadPoolExecutor(MOST_THREADS, "ballast-poll")

    def last(self, key: Key, source: QueueSource) -> PollResult:
        """Return the last poll of a resource, which may be old. The first call starts the polls."""
        if source.redis is None:
            self.forget(key)
            return _failed(Reason.NO_REDIS, "no Redis is configured, so workers cannot report")
        found = self._resources.get(key)
        if found is None or found.source != source:
            self.forget(key)
            found = self._resources[key] = _Polled(source)
            found.task = asyncio.get_running_loop().create_task(self._keep_polling(key, found))
        found.source = source
        return found.result or _failed(Reason.PENDING, "workers and queue have not been polled yet")

    def hurry(self, key: Key) -> None:
        """Poll a resource now."""
        found = self._resources.get(key)
        if found is not None:
            found.soon.set()

    def forget(self, key: Key) -> None:
        """Stop the polls of a resource that is gone."""
        found = self._resources.pop(key, None)
        if found is not None and found.task is not None:
            found.task.cancel()

    def close(self) -> None:
        """Stop all polls and close the connections."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for key in list(self._resources):
            self.forget(key)
        for connection in self._connections.values():
            connection.close()

    async def _keep_polling(self, key: Key, of: _Polled) -> None:
        while True:
            try:
                of.result = await self._result(key, of)
            except Exception as error:  # noqa: BLE001 - its text may hold what a Secret or Redis contains
                name = type(error).__name__
                log.warning("poll of Redis failed on an unexpected error", resource=str(key), error=name)
                of.result = _unusable(of.source)
            self._polled(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._every):
                    await of.soon.wait()
            of.soon.clear()

    async def _result(self, key: Key, of: _Polled) -> PollResult:
        try:
            address = await self._address(key.namespace, of)
            is_admitted = address is None or await self._is_admitted(key.namespace, address, of)
        except (ClusterUnavailable, ClusterRefused) as error:
            return _failed(Reason.REDIS_UNREACHABLE, str(error))
        if address is None:
            redis = of.source.redis
            assert redis is not None, "only resources with a Redis are polled"
            missing = f"Secret {redis.secret_name} with the key {redis.url_key} does not exist; create it"
            return _failed(Reason.NO_SECRET, missing)
        if not is_admitted:
            self._mark_outdated(of)
            log.warning("the operator does not connect to the Redis of a resource", resource=str(key))
            return _unusable(of.source)
        try:
            result = await self._poll(address, of)
        except QueueError as error:
            if isinstance(error, QueueUnavailable | QueueForbidden):
                self._mark_outdated(of)
                self._connections.pop(address, None)  # not closed, because another poll may still use it
            log.info("poll of Redis failed", resource=str(key), error=type(error).__name__)
            return _unusable(of.source)
        if of.result is not None and of.result.workers and not result.workers:
            self._mark_outdated(of)  # the workers may have followed the Secret to another Redis
        return result

    async def _address(self, namespace: str, of: _Polled) -> Address | None:
        redis = of.source.redis
        assert redis is not None, "only resources with a Redis are polled"
        if of.source.own is not None:
            return Address.of(of.source.own, redis)
        may_be_outdated, of.may_be_outdated = of.may_be_outdated, False
        return await self._addresses.of(namespace, redis, may_be_outdated=may_be_outdated)

    async def _is_admitted(self, namespace: str, address: Address, of: _Polled) -> bool:
        """Return whether the operator may connect. The host is looked up before each new connection."""
        if of.source.own is not None or (address == of.worked and address in self._connections):
            return True
        return await self._hosts.admits(namespace, address.url)

    async def _poll(self, address: Address, of: _Polled) -> PollResult:
        """Poll at the Secret's address. If that fails, poll at the address of the last poll that succeeded."""
        run, before = asyncio.get_running_loop().run_in_executor, of.worked
        try:
            result = await run(self._threads, self._read, address, of.source.queue)
        except QueueError:
            if before is None or before == address or before not in self._connections:
                raise
            of.worked = None
            result = await run(self._threads, self._read, before, of.source.queue)
            of.worked = before
        else:
            of.worked = address
            if before is not None and not any(other.worked == before for other in self._resources.values()):
                self._connections.pop(before, None)
        return result

    def _mark_outdated(self, of: _Polled) -> None:
        if of.source.own is not None:
            self._outdated()
        of.may_be_outdated = True

    def _read(self, address: Address, name: str) -> PollResult:
        """Poll one queue. Runs on a thread."""
        queue = Queue(self._connection(address), name)
        return PollResult(time.monotonic(), workers=tuple(queue.workers.statuses()), queue=queue.stats())

    def _connection(self, address: Address) -> Connection:
        """Return the connection that all resources of a Redis share. An unavailable Redis is not retried by each."""
        unavailable = self._unavailable.get(address)
        if unavailable is not None and time.monotonic() - unavailable[0] < self._every / 2:
            raise unavailable[1]
        found = self._connections.get(address)
        if found is None:
            try:
                found = Connection.open(
                    address.url, username=None, password=address.password, socket_timeout=TIMEOUT_SECONDS
                )
            except (QueueUnavailable, QueueForbidden) as error:
                self._unavailable[address] = time.monotonic(), error
                raise
            self._unavailable.pop(address, None)
            found = self._connections.setdefault(address, found)
        return found


def _unusable(source: QueueSource) -> PollResult:
    """Return one sentence for all failures: a URL must not become a way to find out what answers where."""
    assert source.redis is not None, "only resources with a Redis are polled"
    return _failed(
        Reason.REDIS_UNREACHABLE,
        f"the operator cannot use the Redis of Secret {source.redis.secret_name}: it does not answer, refuses the "
        "login, or lacks the functions of Ballast, or the operator may not connect to the host of the URL. Check the "
        "Secret and the server",
    )


def _failed(reason: Reason, message: str) -> PollResult:
    return PollResult(time.monotonic(), problem=Problem(reason, message))
