"""Looks at workers and queues in Redis, in the background, so that no turn waits for Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ballast_api.conditions import Reason
from ballast_log import Log
from ballast_operator.addresses import Address, Addresses
from ballast_operator.children.config import Redis
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import Key
from ballast_operator.load import Load, Trouble
from ballast_queue.connection import Connection
from ballast_queue.errors import QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.redis_store import Queue

log = Log(__name__)

TIMEOUT_SECONDS = 3.0
AT_A_TIME = 8


@dataclass(slots=True)
class _View:
    """One resource as the looks go on."""

    redis: Redis
    queue: str
    own: Mapping[str, str] | None
    """Data of the operator's own Secret, where the resource names none."""
    load: Load | None = None
    worked: Address | None = None
    """The address of the last look that succeeded."""
    is_doubted: bool = False
    """The Secret may say something else by now."""
    looking: asyncio.Task[None] | None = None


class Loads:
    """The last look at each resource. Belongs to one event loop; looks run on a few threads."""

    def __init__(
        self, cluster: Cluster, *, every_seconds: float, looked: Callable[[Key], None], doubted: Callable[[], None]
    ) -> None:
        """`looked(key)` is called after each look; `doubted()` where the operator's own Secret may have changed."""
        self._addresses = Addresses(cluster, again_seconds=every_seconds)
        self._every = every_seconds
        self._looked = looked
        self._doubted = doubted
        self._views: dict[Key, _View] = {}
        self._connections: dict[Address, Connection] = {}
        self._away: dict[Address, tuple[float, QueueError]] = {}
        self._threads = ThreadPoolExecutor(AT_A_TIME, "ballast-looks")

    def last(self, key: Key, redis: Redis | None, queue: str, own: Mapping[str, str] | None) -> Load:
        """The last look at a resource, which may be old; the first call begins the looks.

        `own` is the data of the operator's own Secret, for a resource that names none.
        """
        if redis is None:
            self.forget(key)
            return _trouble(Reason.NO_REDIS, "no Redis is configured, so workers tell nothing")
        view = self._views.get(key)
        if view is None or (view.redis, view.queue) != (redis, queue):
            self.forget(key)
            view = self._views[key] = _View(redis, queue, own)
            view.looking = asyncio.get_running_loop().create_task(self._keep_looking(key, view))
        view.own = own
        return view.load or _trouble(Reason.PENDING, "workers and queue have not been looked at yet")

    def forget(self, key: Key) -> None:
        """Stop looking at a resource that is gone."""
        view = self._views.pop(key, None)
        if view is not None and view.looking is not None:
            view.looking.cancel()

    def close(self) -> None:
        """Let the sockets go."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for key in list(self._views):
            self.forget(key)
        for connection in self._connections.values():
            connection.close()

    async def _keep_looking(self, key: Key, view: _View) -> None:
        while True:
            try:
                view.load = await self._load(key, view)
            except Exception as error:
                log.exception("a look at Redis failed by a defect", resource=str(key))
                view.load = _trouble(Reason.REDIS_UNREACHABLE, f"the operator could not look: {error}")
            self._looked(key)
            await asyncio.sleep(self._every)

    async def _load(self, key: Key, view: _View) -> Load:
        try:
            address = await self._address(key.namespace, view)
        except (ClusterUnavailable, ClusterRefused) as error:
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))
        if address is None:
            missing = f"Secret {view.redis.secret_name} with the key {view.redis.url_key} is not there, create it"
            return _trouble(Reason.NO_SECRET, missing)
        try:
            load = await self._look(address, view)
        except (QueueUnavailable, QueueForbidden) as error:
            self._doubt(view)
            self._connections.pop(address, None)  # not closed: others may wait for its answer, and close it with that
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))
        except QueueError as error:
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))
        if view.load is not None and view.load.workers and not load.workers:
            self._doubt(view)  # they may have followed the Secret to another Redis
        return load

    async def _address(self, namespace: str, view: _View) -> Address | None:
        if view.own is not None:
            return Address.of(view.own, view.redis)
        is_doubted, view.is_doubted = view.is_doubted, False
        return await self._addresses.of(namespace, view.redis, is_doubted=is_doubted)

    async def _look(self, address: Address, view: _View) -> Load:
        """Look where the Secret says; while that does not work yet, where the last look succeeded."""
        run, before = asyncio.get_running_loop().run_in_executor, view.worked
        try:
            load = await run(self._threads, self._read, address, view.queue)
        except QueueError:
            if before is None or before == address:
                raise
            view.worked = None
            load = await run(self._threads, self._read, before, view.queue)
            view.worked = before
        else:
            view.worked = address
            if before is not None and not any(other.worked == before for other in self._views.values()):
                self._connections.pop(before, None)
        return load

    def _doubt(self, view: _View) -> None:
        if view.own is not None:
            self._doubted()
        view.is_doubted = True

    def _read(self, address: Address, name: str) -> Load:
        """Look, on a thread."""
        queue = Queue(self._connection(address), name)
        return Load(time.monotonic(), workers=tuple(queue.workers.statuses()), queue=queue.stats())

    def _connection(self, address: Address) -> Connection:
        """One for all resources of a Redis; one that is away is not tried again by each of them in turn."""
        away = self._away.get(address)
        if away is not None and time.monotonic() - away[0] < self._every / 2:
            raise away[1]
        found = self._connections.get(address)
        if found is None:
            try:
                found = Connection.open(
                    address.url, username=None, password=address.password, socket_timeout=TIMEOUT_SECONDS
                )
            except (QueueUnavailable, QueueForbidden) as error:
                self._away[address] = time.monotonic(), error
                raise
            self._away.pop(address, None)
            found = self._connections.setdefault(address, found)
        return found


def _trouble(reason: Reason, message: str) -> Load:
    return Load(time.monotonic(), trouble=Trouble(reason, message))
