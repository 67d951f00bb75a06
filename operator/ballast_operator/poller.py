"""Polls workers and queues in Redis in the background, so that no reconciliation waits for Redis."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from ballast_api.conditions import ConditionReason
from ballast_log import Log
from ballast_operator.addresses import Address, Addresses
from ballast_operator.children.config import own_redis
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import Key
from ballast_operator.poll_result import UNPOLLED, FormerQueue, PollResult, Problem, QueueSource
from ballast_operator.redis_hosts import RedisHosts
from ballast_operator.unneeded_workers import unneeded_workers
from ballast_queue.connection import Connection
from ballast_queue.errors import (
    CommandForbidden,
    HostNotAdmitted,
    LibraryUnfit,
    QueueError,
    QueueForbidden,
    QueueUnavailable,
)
from ballast_queue.redis_store import Queue
from ballast_queue.status import QueueStats, WorkerStatus
from ballast_queue.unused import UnusedQueues, run_timers

log = Log(__name__)

TIMEOUT_SECONDS = 3.0
MOST_REPLY_BYTES = 4 * 1024 * 1024
"""Memory of one reply. The functions of Ballast answer the operator with less."""
MOST_THREADS = 8
"""Threads for the operator's own Redis."""
NAMESPACE_THREADS = 2
"""Threads for the Redis of each namespace, so that slow servers of one namespace do not delay the polls of another."""
REOPEN_SECONDS = 60.0
"""How often a server on which a queue has no workers gets a new connection: its address may lead elsewhere by now."""


class Server(NamedTuple):
    """A Redis, and the namespace whose Secret leads there; empty for the operator's own. Namespaces share nothing."""

    namespace: str
    address: Address


@dataclass(slots=True)
class _Polled:
    """One resource that is polled."""

    source: QueueSource
    result: PollResult | None = None
    worked: Server | None = None
    """The server of the last poll that succeeded."""
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
        keep_seconds: float,
        polled: Callable[[Key], None],
        outdated: Callable[[], None],
    ) -> None:
        """Prepare a poller.

        It keeps an unused queue of the operator's own Redis for `keep_seconds`. It calls `polled(key)` after each poll,
        and `outdated()` if the operator's own Secret may have changed.
        """
        self._addresses = addresses
        self._hosts = hosts
        self._every = every_seconds
        self._keep_seconds = keep_seconds
        self._polled = polled
        self._outdated = outdated
        self._resources: dict[Key, _Polled] = {}
        self.connections: dict[Server, Connection] = {}
        """The open connections. Resources of one Redis share a connection."""
        self._unavailable: dict[Server, tuple[float, QueueError]] = {}
        self._reopened: dict[Server, float] = {}
        """When each server without workers last got a new connection."""
        self._shared_queues: set[str] = set()
        self.loop: asyncio.AbstractEventLoop | None = None
        """The event loop of the polls; None before the first poll."""
        self._threads = {"": ThreadPoolExecutor(MOST_THREADS, "ballast-poll")}

    def last(self, key: Key, source: QueueSource) -> PollResult:
        """Return the last poll of a resource, which may be old. The first call starts the polls."""
        if source.redis is None:
            self.forget(key)
            return _failed(ConditionReason.NO_REDIS, "no Redis is configured, so workers cannot report")
        found = self._resources.get(key)
        # Both may have the same name of a Secret, and only the operator's own leads to a host that needs no check.
        if found is None or found.source != source or found.source.is_own != source.is_own:
            self.forget(key)
            found = self._resources[key] = _Polled(source)
            found.task = asyncio.get_running_loop().create_task(self._keep_polling(key, found))
        found.source = source
        return found.result or UNPOLLED

    def hurry(self, key: Key) -> None:
        """Poll a resource now."""
        found = self._resources.get(key)
        if found is not None:
            found.soon.set()

    def leave(self, key: Key) -> None:
        """Stop the polls of a resource that is gone, and remove its settings from its queue."""
        found = self._resources.get(key)
        self.forget(key)
        if found is not None and found.worked is not None:
            self._threads_of(found.worked).submit(self._drop_settings, found.worked, found.source)

    def _drop_settings(self, server: Server, source: QueueSource) -> None:
        """Remove the settings of a resource. Runs on a thread."""
        try:
            Queue(self._connection(server), source.queue).settings.drop(source.owner)
        except QueueError as error:
            log.info("settings of a deleted resource not removed", resource=source.owner, error=type(error).__name__)

    def forget(self, key: Key) -> None:
        """Stop the polls of a resource."""
        found = self._resources.pop(key, None)
        if found is not None and found.task is not None:
            found.task.cancel()

    def _threads_of(self, server: Server) -> ThreadPoolExecutor:
        found = self._threads.get(server.namespace)
        if found is None:
            found = ThreadPoolExecutor(NAMESPACE_THREADS, f"ballast-poll-{server.namespace}")
            self._threads[server.namespace] = found
        return found

    def forget_unused(self) -> None:
        """Forget the threads, connections and Secrets that no polled resource of a namespace uses any more."""
        polled = {"", *(key.namespace for key in self._resources)}
        for namespace in self._threads.keys() - polled:
            self._threads.pop(namespace).shutdown(wait=False)  # after the settings of its resources are removed
        used = {each.worked for each in self._resources.values()}
        for server in list(self.connections):
            if server.namespace and server not in used:
                self.connections.pop(server, None)  # not closed, because a poll may still use it
        for server, (at, _) in list(self._unavailable.items()):
            if time.monotonic() - at >= self._every:
                self._unavailable.pop(server, None)
        for server, at in list(self._reopened.items()):
            if time.monotonic() - at >= REOPEN_SECONDS:
                self._reopened.pop(server, None)
        self._addresses.forget(polled)

    def close(self) -> None:
        """Stop all polls and close the connections."""
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
        for key in list(self._resources):
            self.forget(key)
        for connection in self.connections.values():
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
        except (ClusterUnavailable, ClusterRefused) as error:
            return _failed(ConditionReason.REDIS_UNREACHABLE, str(error))
        if address is None:
            redis = of.source.redis
            assert redis is not None, "only resources with a Redis are polled"
            missing = f"Secret {redis.secret_name} with the key {redis.url_key} does not exist; create it"
            return _failed(ConditionReason.NO_SECRET, missing)
        server = Server("" if of.source.is_own else key.namespace, address)
        try:
            result = await self._poll(server, of)
        except QueueError as error:
            self._mark_outdated(of)
            if isinstance(error, QueueUnavailable | QueueForbidden):
                self.connections.pop(server, None)  # not closed, because another poll may still use it
            # Of a Redis of others, the text would help to find out what answers where.
            because = {"because": str(error)} if of.source.is_own else {}
            log.info("poll of Redis failed", resource=str(key), error=type(error).__name__, **because)
            return _unusable(of.source, str(error) if isinstance(error, LibraryUnfit) else "")
        if not result.workers:
            now = time.monotonic()
            is_due = now - self._reopened.setdefault(server, now) >= REOPEN_SECONDS
            if has_lost_workers := of.result is not None and bool(of.result.workers):
                self._mark_outdated(of)  # the workers may have followed the Secret to another Redis
            # They may also have followed the address, which a resolver may show to them before it does to the operator.
            if has_lost_workers or is_due:
                self._reopened[server] = now
                self.connections.pop(server, None)
        return result

    async def _address(self, namespace: str, of: _Polled) -> Address | None:
        redis = of.source.redis
        assert redis is not None, "only resources with a Redis are polled"
        if of.source.own is not None:
            return Address.of(of.source.own, redis)
        may_be_outdated, of.may_be_outdated = of.may_be_outdated, False
        return await self._addresses.of(namespace, redis, may_be_outdated=may_be_outdated)

    async def _poll(self, server: Server, of: _Polled) -> PollResult:
        """Poll the Secret's server. If that fails, poll the server of the last poll that succeeded."""
        self.loop = asyncio.get_running_loop()
        run, before = asyncio.get_running_loop().run_in_executor, of.worked
        try:
            result = await run(self._threads_of(server), self._read, server, of.source)
        except QueueError:
            if before is None or before == server or before not in self.connections:
                raise
            of.worked = None
            result = await run(self._threads_of(before), self._read, before, of.source)
            of.worked = before
        else:
            of.worked = server
            if before is not None and not any(other.worked == before for other in self._resources.values()):
                self.connections.pop(before, None)
        return result

    def _mark_outdated(self, of: _Polled) -> None:
        if of.source.is_own:
            self._outdated()
        of.may_be_outdated = True

    def _read(self, server: Server, source: QueueSource) -> PollResult:
        """Poll one queue. Runs on a thread."""
        connection = self._connection(server)
        connection.load_again()
        queue = Queue(connection, source.queue)
        settings = queue.settings.renew(source.owner)
        if not (workers := tuple(queue.workers.statuses())):
            run_timers(queue)  # otherwise the workers do that
        stats = queue.stats()
        return PollResult(
            time.monotonic(),
            workers=workers,
            queue=stats,
            unneeded=_unneeded(queue, workers, stats) if source.is_scaled else None,
            has_deadlines=bool(workers) or _has_deadlines(queue, stats),
            former=tuple(_former(Queue(connection, name), source.owner) for name in source.former),
            settings=settings,
            has_newer_functions=connection.has_newer_library(),
            has_older_functions=connection.is_outdated,
        )

    async def update_queues(
        self, redis: Mapping[str, str], used: AbstractSet[str], *, release: str, namespaces: Sequence[str]
    ) -> list[str]:
        """Note which queues of the operator's own Redis are used. Return those that were removed.

        Args:
            redis: the Secret of this Redis.
            used: the queues that resources use.
            release: the release of the operator.
            namespaces: only queues of these namespaces are removed; empty for all.

        Raises:
            QueueError: the queues could not be read or removed.
        """
        address = Address.of(redis, own_redis("", redis))
        if address is None:
            return []

        def update() -> list[str]:
            connection = self._connection(Server("", address))
            queues = UnusedQueues(connection, release, self._keep_seconds, tuple(namespaces), self._shared_queues)
            return queues.update(used)

        return await asyncio.get_running_loop().run_in_executor(self._threads[""], update)

    def admits(self, namespace: str, host: str) -> bool:
        """Return whether the operator may connect to a host. Runs on a thread, before each connection."""
        loop = self.loop
        assert loop is not None, "polls begin on the event loop"
        answer: Future[bool] = Future()

        async def ask() -> None:
            try:
                answer.set_result(await self._hosts.admits(namespace, host))
            except Exception as error:  # noqa: BLE001 - raised again in the thread that asks
                answer.set_exception(error)

        # The loop creates the coroutine. One that is created here would never be awaited if the loop ended meanwhile.
        try:
            loop.call_soon_threadsafe(lambda: loop.create_task(ask()))
        except RuntimeError:  # the loop is closed
            return False
        try:
            return answer.result(TIMEOUT_SECONDS)
        except (ClusterUnavailable, ClusterRefused, TimeoutError):
            return False

    def _connection(self, server: Server) -> Connection:
        """Return the connection that all resources of a Redis share. An unavailable Redis is not retried by each."""
        unavailable = self._unavailable.get(server)
        if unavailable is not None and time.monotonic() - unavailable[0] < self._every / 2:
            raise unavailable[1]
        found = self.connections.get(server)
        if found is None:
            try:
                found = Connection.open(
                    server.address.url,
                    password=server.address.password,
                    ca=server.address.ca,
                    socket_timeout=TIMEOUT_SECONDS,
                    most_reply_bytes=MOST_REPLY_BYTES,
                    loads_functions=not server.namespace,
                    admits=partial(self.admits, server.namespace) if server.namespace else None,
                )
            except (QueueUnavailable, QueueForbidden, HostNotAdmitted) as error:
                self._unavailable[server] = time.monotonic(), error
                raise
            self._unavailable.pop(server, None)
            found = self.connections.setdefault(server, found)
        return found


def _unneeded(queue: Queue, workers: tuple[WorkerStatus, ...], stats: QueueStats) -> int | None:
    """Return the workers without which no job would be at risk, either; None if a job is at risk, or no work is left.

    It is not computed for a single worker, which stays while offline work is left.
    """
    if len(workers) < 2 or stats.claimable_at_risk or not stats.claimable_depth + stats.items.leased:
        return None
    weights = {tenant.name: tenant.weight for tenant in queue.settings.read().tenants}
    return unneeded_workers(queue.jobs.active(), workers, stats.at, weights)


def _has_deadlines(queue: Queue, stats: QueueStats) -> bool:
    """Return whether a job may have a deadline. Those with a deadline come first, and an inbox may contain some."""
    first = queue.jobs.active(1)
    return stats.inbox > 0 or not first or first[0].deadline is not None


def _unusable(source: QueueSource, known: str = "") -> PollResult:
    """Return one sentence for all failures: a URL must not become a way to find out what answers where.

    `known` is a fixed sentence about a server that admitted the operator.
    """
    assert source.redis is not None, "only resources with a Redis are polled"
    if known:
        return _failed(ConditionReason.REDIS_UNREACHABLE, f"{known} (Secret {source.redis.secret_name})")
    return _failed(
        ConditionReason.REDIS_UNREACHABLE,
        f"the operator cannot use the Redis of Secret {source.redis.secret_name}: it does not answer, refuses the "
        "login, or the operator may not connect to the host of the URL. Check the Secret and the server",
    )


def _former(queue: Queue, owner: str) -> FormerQueue:
    """Poll a queue that a resource left. Remove the settings of the resource from it after the last worker left.

    A failure leaves this queue unknown. It is not raised, because the poll has read the present queue already.
    """
    try:
        stats, is_served = queue.stats(), bool(queue.workers.statuses())
        if not is_served:
            queue.settings.drop(owner)
    except QueueError as error:
        log.info("poll of a former queue failed", queue=queue.name, resource=owner, error=type(error).__name__)
        return FormerQueue(queue.name, is_forbidden=isinstance(error, CommandForbidden))
    return FormerQueue(queue.name, stats.depth + stats.items.leased, is_served=is_served)


def _failed(reason: ConditionReason, message: str) -> PollResult:
    return PollResult(time.monotonic(), problem=Problem(reason, message))
