"""Connect to the server, load the function library, and translate failures into errors of this package.

This module retries a call only after it had to load the library. A broken connection is an error for the caller, which
decides whether to repeat the call. Leases cover the effects of a lost reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from importlib.resources import files
from typing import Any, Self, TypeVar

import redis
from redis import exceptions as refusals
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import NoPermissionError, RedisError, ResponseError
from redis.retry import Retry

from ballast_queue.errors import InvalidAddress, QueueError, QueueForbidden, QueueFull, QueueUnavailable, ServerUnfit

Argument = bytes | str | int | float
Call = tuple[str, Sequence[bytes], Sequence[Argument]]
"""Function (without its prefix), KEYS and ARGV."""
_T = TypeVar("_T")

SOURCE = files("ballast_queue").joinpath("ballast.lua").read_text(encoding="utf-8")
_REVISION = int(re.findall(r"^local REVISION = (\d+)$", SOURCE, re.MULTILINE)[0])
PREFIX = "ballast1_"
_READS = frozenset({"demand", "look", "read", "heads", "due", "audit", "stats", "statuses", "now", "revision"})
"""Functions registered with no-writes."""
_PASSING = ("LOADING", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "BUSY", "UNBLOCKED", "NOREPLICAS", "MISCONF")
"""Codes of replies that mean a passing condition."""


class Connection:
    """A thread-safe connection to one server or cluster that has the function library."""

    def __init__(self, client: redis.Redis | RedisCluster, where: str, socket_timeout: float) -> None:
        self._client: Any = client  # the two client classes have the same commands and no common base class
        self._longest_wait = socket_timeout / 2
        self.where = where

    @classmethod
    def open(cls, url: str, *, username: str | None, password: str | None, socket_timeout: float) -> Self:
        """Connect, and load the library if the server has none or an older one.

        Raises:
            InvalidAddress: the URL is malformed.
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses the user.
        """
        if not url.startswith(("redis://", "rediss://", "unix://")):
            # The URL may hold a password: show its scheme only.
            scheme = url.partition("://")[0] if "://" in url else url
            raise InvalidAddress(
                f"Redis URL: found {scheme[:40]!r}, wanted redis://host:port, rediss://host:port (TLS) or unix:///path"
            )
        options: dict[str, Any] = {
            "socket_timeout": socket_timeout,
            "socket_connect_timeout": socket_timeout,
            "socket_keepalive": True,
            "protocol": 2,
        }
        options |= {name: value for name, value in (("username", username), ("password", password)) if value}
        if url.startswith("unix://"):
            del options["socket_keepalive"], options["socket_connect_timeout"]
        try:
            client = redis.Redis.from_url(url, retry=Retry(NoBackoff(), 0), **options)
        except (ValueError, TypeError) as error:
            raise InvalidAddress(
                f"Redis URL: found a malformed URL ({error}), wanted redis://user:password@host:port/database"
            ) from None
        connection = cls(client, _where(client), socket_timeout)
        if connection._is_cluster():
            client.close()
            cluster = connection._guard(lambda: RedisCluster.from_url(url, **options))
            connection = cls(cluster, connection.where, socket_timeout)
        try:
            connection._load()
        except QueueError:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Close the sockets."""
        self._client.close()

    def call(self, function: str, keys: Sequence[bytes] = (), arguments: Sequence[Argument] = ()) -> Any:
        """Call one function of the library."""
        return self._with_library(lambda: self._call(self._client, function, keys, arguments))

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions in one round trip, each atomic on its own. Run all calls before a failure is raised."""
        if len(calls) == 1:
            return [self.call(*calls[0])]
        if not calls:
            return []
        replies: list[Any] = self._with_library(lambda: self._pipeline(calls))
        return replies

    def hash_field(self, key: bytes, field: str) -> bytes | None:
        """Return one field of a hash, or None if it is missing."""
        value: bytes | None = self._guard(lambda: self._client.hget(key, field))
        return value

    def hash_pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the fields of a hash, page by page, each once. Fields written during the scan may be missing."""
        cursor, seen = 0, set[bytes]()
        while True:
            cursor, page = self._hash_page(key, cursor)
            for field, value in page.items():
                if field not in seen:  # a scan repeats fields while Redis resizes the table
                    seen.add(field)
                    yield field, value
            if not cursor:
                return

    def _hash_page(self, key: bytes, cursor: int) -> tuple[int, dict[bytes, bytes]]:
        page: tuple[int, dict[bytes, bytes]] = self._guard(lambda: self._client.hscan(key, cursor, count=500))
        return page

    def members(self, key: bytes, first: int, last: int) -> list[bytes]:
        """Return the members of a sorted set between two positions."""
        members: list[bytes] = self._guard(lambda: self._client.zrange(key, first, last))
        return members

    def entries(self, key: bytes, after: bytes, count: int) -> list[tuple[bytes, dict[bytes, bytes]]]:
        """Return entries of a stream after the entry `after` (`0` is before the first)."""
        page: list[tuple[bytes, dict[bytes, bytes]]] = self._guard(
            lambda: self._client.xrange(key, b"(" + after, "+", count=count)
        )
        return page

    def wait_for_entry(self, key: bytes, after: bytes, seconds: float) -> None:
        """Wait until a stream has an entry after `after`, for at most `seconds` and half the timeout."""
        milliseconds = max(1, int(1000 * min(seconds, self._longest_wait)))
        self._guard(lambda: self._client.xread({key: after}, count=1, block=milliseconds))

    def info(self, section: str) -> dict[str, Any]:
        """Return one section of INFO."""
        reply: dict[str, Any] = self._guard(lambda: self._client.info(section))
        return reply

    @staticmethod
    def _call(client: Any, function: str, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        command = "FCALL_RO" if function in _READS else "FCALL"
        return client.execute_command(command, PREFIX + function, len(keys), *keys, *arguments)

    def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        pipeline = self._client.pipeline(transaction=False)
        for function, keys, arguments in calls:
            self._call(pipeline, function, keys, arguments)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        missing = [i for i, reply in enumerate(replies) if _is_missing(reply)]
        if missing and len(missing) < len(calls):
            # Another client flushed the functions during the pipeline. Repeat only the calls that did not run.
            self._load()
            for i in missing:
                replies[i] = self._call(self._client, *calls[i])
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _with_library(self, attempt: Callable[[], _T]) -> _T:
        def attempt_twice() -> _T:
            try:
                return attempt()
            except ResponseError as error:
                if not _is_missing(error):
                    raise
            self._load()
            return attempt()

        return self._guard(attempt_twice)

    def _load(self) -> None:
        def load() -> None:
            try:
                known = int(self._call(self._client, "revision", (), ()))
            except ResponseError as error:
                if "unknown command" in str(error).lower():
                    raise ServerUnfit(
                        [f"Redis at {self.where}: found a server without functions, wanted 7 or newer: upgrade it"]
                    ) from error
                if not _is_missing(error):
                    raise
                known = 0
            if known >= _REVISION:
                return
            try:
                # REPLACE: another process may have loaded this revision or an older one since the call above.
                self._client.function_load(SOURCE, replace=True)
            except NoPermissionError as error:
                raise QueueForbidden(
                    f"Redis at {self.where} has no functions of Ballast yet, and this user may not load them "
                    f"({error}): start a worker first, or allow +function|load"
                ) from error

        self._guard(load)

    def _is_cluster(self) -> bool:
        try:
            return bool(self.info("cluster").get("cluster_enabled"))
        except QueueForbidden:
            return False  # a user without +info counts as one of a single server

    def _guard(self, attempt: Callable[[], _T]) -> _T:
        """Run `attempt` and raise its failure as an error of this package."""
        try:
            return attempt()
        except QueueError:
            raise
        except (refusals.AuthenticationError, refusals.AuthorizationError, NoPermissionError) as error:
            raise QueueForbidden(
                f"Redis at {self.where} refused this user ({error}): check user name, password and its ACL rules"
            ) from error
        except refusals.OutOfMemoryError as error:
            raise self._full(f" ({error})") from error
        except (refusals.ConnectionError, refusals.TimeoutError, refusals.ReadOnlyError, OSError) as error:
            raise self._unavailable(error) from error
        except ResponseError as error:
            text = str(error)
            if text.startswith("OOM"):
                raise self._full() from error
            if text.startswith(_PASSING):
                raise self._unavailable(error) from error
            if "NOPERM" in text or "permission" in text.lower():
                raise QueueForbidden(
                    f"Redis at {self.where} refused a command to this user ({text}): check its ACL rules"
                ) from error
            raise QueueError(f"Redis at {self.where} refused a call: {text}") from error
        except RedisError as error:
            raise self._unavailable(error) from error

    def _full(self, details: str = "") -> QueueFull:
        return QueueFull(
            f"Redis at {self.where} has no memory left{details}: raise maxmemory, or wait until Ballast deletes the "
            "results of old jobs"
        )

    def _unavailable(self, error: Exception) -> QueueUnavailable:
        return QueueUnavailable(
            f"Redis at {self.where} is unavailable ({_reason(error)}): check that it runs and is reachable from here; "
            "nothing is lost, so repeat the call"
        )


def _is_missing(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)


def _reason(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200].rstrip(".")


def _where(client: redis.Redis) -> str:
    options = client.connection_pool.connection_kwargs
    if "path" in options:
        return str(options["path"])
    return f"{options.get('host', 'localhost')}:{options.get('port', 6379)}"
