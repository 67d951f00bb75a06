"""Looks at workers and queues in Redis, in the background, so that no turn waits for Redis."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ballast_api.conditions import Reason
from ballast_operator.children.config import Redis
from ballast_operator.cluster import Cluster
from ballast_operator.errors import ClusterRefused, ClusterUnavailable
from ballast_operator.kinds import SECRET, Key
from ballast_operator.load import Load, Trouble
from ballast_queue.connection import Connection
from ballast_queue.errors import QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.redis_store import Queue
from ballast_worker.log import Log

log = Log(__name__)

TIMEOUT_SECONDS = 3.0
AT_A_TIME = 8
SECRET_AGAIN_SECONDS = 60.0
"""A Redis that cannot be reached has its Secret read again no more often than this."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a Redis is, and how it is opened. Holds the password: never logged."""

    url: str
    password: str | None

    def __repr__(self) -> str:
        return "Address(...)"


@dataclass(slots=True)
class _View:
    """One resource as the looks go on."""

    redis: Redis
    queue: str
    load: Load | None = None
    address: Address | None = None
    read_at: float = -SECRET_AGAIN_SECONDS
    looking: asyncio.Task[None] | None = None


class Loads:
    """The last look at each resource. Belongs to one event loop; looks run on a few threads."""

    def __init__(self, cluster: Cluster, *, every_seconds: float, looked: Callable[[Key], None]) -> None:
        """`looked(key)` is called after each look."""
        self._cluster = cluster
        self._every = every_seconds
        self._looked = looked
        self._views: dict[Key, _View] = {}
        self._connections: dict[Address, Connection] = {}
        self._away: dict[Address, tuple[float, QueueError]] = {}
        self._threads = ThreadPoolExecutor(AT_A_TIME, "ballast-looks")

    def last(self, key: Key, redis: Redis | None, queue: str) -> Load:
        """The last look at a resource, which may be old; the first call begins the looks."""
        if redis is None:
            self.forget(key)
            return _trouble(Reason.NO_REDIS, "no Redis is configured, so workers tell nothing")
        view = self._views.get(key)
        if view is None or (view.redis, view.queue) != (redis, queue):
            self.forget(key)
            view = self._views[key] = _View(redis, queue)
            view.looking = asyncio.get_running_loop().create_task(self._keep_looking(key, view))
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
            if view.address is None:
                view.address = await self._read_address(key.namespace, view)
        except (ClusterUnavailable, ClusterRefused) as error:
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))
        if view.address is None:
            missing = f"Secret {view.redis.secret_name} with the key {view.redis.url_key} is not there, create it"
            return _trouble(Reason.NO_SECRET, missing)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, self._read, view.address, view.queue)
        except (QueueUnavailable, QueueForbidden) as error:
            self._reconsider(view)
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))
        except QueueError as error:
            return _trouble(Reason.REDIS_UNREACHABLE, str(error))

    def _reconsider(self, view: _View) -> None:
        """The password may have been rotated: read the Secret again, but not at every look."""
        if view.address is not None:
            connection = self._connections.pop(view.address, None)
            if connection is not None:
                connection.close()
        if time.monotonic() - view.read_at >= SECRET_AGAIN_SECONDS:
            view.address = None

    async def _read_address(self, namespace: str, view: _View) -> Address | None:
        view.read_at = time.monotonic()
        body = await self._cluster.get(SECRET, Key(namespace, view.redis.secret_name))
        data = {name: base64.b64decode(value).decode() for name, value in ((body or {}).get("data") or {}).items()}
        url = data.get(view.redis.url_key)
        if url is None:
            return None
        password = data.get(view.redis.password_key) if view.redis.password_key else None
        return Address(url.strip(), password.rstrip("\r\n") if password else None)

    def _read(self, address: Address, name: str) -> Load:
        """Look, on a thread."""
        queue = Queue(self._connection(address), name)
        return Load(time.monotonic(), workers=tuple(queue.workers()), queue=queue.stats())

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
