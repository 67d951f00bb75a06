"""Connect to a server, check or load the function library, and translate failures into errors of this package.

A connection repeats a call only after it had to load the library. A broken connection is an error for the caller, which
decides whether to repeat the call. Leases cover the effects of a lost reply.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, Self, TypeVar

import redis
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError
from redis.retry import Retry

from ballast_queue.address import RedisAddress, parse_address
from ballast_queue.errors import (
    HostNotAdmitted,
    InvalidAddress,
    LibraryUnfit,
    QueueError,
    QueueForbidden,
    QueueUnavailable,
    ServerUnfit,
)
from ballast_queue.failures import STRICT, failure_of, is_refused_command
from ballast_queue.reply_limits import ReplyLimits, limited
from ballast_queue.unreadable import Unreadable

Argument = bytes | str | int | float
Call = tuple[str, Sequence[bytes], Sequence[Argument]]
"""Function (without its prefix), KEYS and ARGV."""
_T = TypeVar("_T")
_INIT = "run `ballast queue init` as a user of Redis that may load functions"
_MISSING = f"Redis has no functions of Ballast, or those of an older version: {_INIT}"

SOURCE = files("ballast_queue").joinpath("ballast.lua").read_text(encoding="utf-8")
REVISION = int(re.findall(r"^local REVISION = (\d+)$", SOURCE, re.MULTILINE)[0])
"""The revision of the function library in `SOURCE`."""
PREFIX = "ballast1_"
LOAD_AGAIN_SECONDS = 60.0
"""Time between two tries to load the functions into a full Redis."""
_READS = frozenset(re.findall(r"^register\('(\w+)', \w+, {'no-writes'}\)$", SOURCE, re.MULTILINE))
"""Functions registered with no-writes."""
Admits = Callable[[str], bool]
"""Return whether a connection to this host is allowed."""


class Connection:
    """A thread-safe connection to one server or cluster that has the function library.

    No error of a connection contains a part of the URL, or a byte that the server answered.
    """

    def __init__(
        self,
        client: redis.Redis | RedisCluster,
        *,
        socket_timeout: float,
        loads_functions: bool = False,
        is_strict: bool = False,
    ) -> None:
        self.client: Any = client  # the two client classes have the same commands and no common base class
        """The client of redis-py. Its errors are not translated, so only this module and tests call it."""
        self.unreadable: dict[str, Unreadable] = {}
        """The unreadable values of each queue."""
        self.is_outdated = False
        """Whether Redis has no memory for the functions of this version, so that calls run those of an older one."""
        self._load_again_at = 0.0
        self._longest_wait = socket_timeout / 2
        self._loads_functions = loads_functions
        self._is_strict = is_strict
        self._is_known = False  # the server has answered a command of this user

    @classmethod
    def open(
        cls,
        url: str,
        *,
        password: str | None,
        socket_timeout: float,
        loads_functions: bool = True,
        admits: Admits | None = None,
        ca: str | None = None,
        most_reply_bytes: int | None = None,
        checks_functions: bool = True,
    ) -> Self:
        """Connect, and check the function library. An administrator's connection loads a missing or older one.

        If Redis is full, the connection uses an older one (`is_outdated`).

        A submitter may not call functions: `checks_functions` is false then, and the first command connects.

        `admits` makes the connection strict, for a URL of somebody else: it uses `redis` and `rediss` only, connects
        only to hosts that `admits` accepts, also where a cluster redirects it, and raises one and the same error for
        every failure before authentication. `ca` has the certificates (PEM) of authorities that are trusted at a
        `rediss://` address, besides those of the system. `most_reply_bytes` limits the memory of each reply, and the
        time from its first byte to its last one to `socket_timeout`.

        Raises:
            InvalidAddress, HostNotAdmitted: the URL is malformed, or its host is not admitted.
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses the user.
            LibraryUnfit: the server lacks the library, and this connection may not load it.
            QueueFull: the server lacks the library, and has no memory for it.
        """
        address = parse_address(url, is_strict=admits is not None)
        if admits is not None and not admits(address.host):
            raise HostNotAdmitted
        limits = None if most_reply_bytes is None else ReplyLimits(most_reply_bytes, socket_timeout)
        options = _options(address, socket_timeout, admits, limits)
        if ca is not None and address.is_tls:
            options["ssl_ca_data"] = _checked(ca)
        if password:
            options["password"] = password
        client = _client(address, options)
        settings: dict[str, Any] = {"loads_functions": loads_functions, "is_strict": admits is not None}
        connection = cls(client, socket_timeout=socket_timeout, **settings)
        if not checks_functions:
            return connection
        try:
            if connection._is_cluster():
                client.close()
                # `rediss` in its URL would replace the class of connections, which is one for TLS already.
                plain = address.url.replace("rediss:", "redis:", 1)
                cluster = connection._translated(lambda: RedisCluster.from_url(plain, retry=_never(), **options))
                connection = cls(cluster, socket_timeout=socket_timeout, **settings)
            connection._translated(connection._require_library)
        except QueueError:
            connection.close()
            raise
        return connection

    def log_in(self) -> None:
        """Connect to a single server, and log in. Otherwise the first command does.

        Raises:
            QueueUnavailable, QueueForbidden: the server does not answer, or refuses the user.
        """
        pool = self.client.connection_pool
        self._translated(lambda: pool.release(pool.get_connection()))

    def close(self) -> None:
        """Close the sockets."""
        self.client.close()

    def call(self, function: str, keys: Sequence[bytes] = (), arguments: Sequence[Argument] = ()) -> Any:
        """Call one function of the library."""
        return self._with_library(lambda: self._call(self.client, function, keys, arguments))

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions in one round trip, each atomic on its own. Run all calls before a failure is raised.

        A cluster needs a round trip for each call.
        """
        if len(calls) == 1:
            return [self.call(*calls[0])]
        if not calls:
            return []
        replies: list[Any] = self._with_library(lambda: self._pipeline(calls))
        return replies

    def hash_field(self, key: bytes, field: str) -> bytes | None:
        """Return one field of a hash, or None if it is missing."""
        value: bytes | None = self._translated(lambda: self.client.hget(key, field))
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
        page: tuple[int, dict[bytes, bytes]] = self._translated(lambda: self.client.hscan(key, cursor, count=500))
        return page

    def set_hash_field(self, key: bytes, field: str, value: str) -> None:
        """Set one field of a hash."""
        self._translated(lambda: self.client.hset(key, field, value))

    def remove_hash_field(self, key: bytes, field: str) -> None:
        """Remove one field of a hash."""
        self._translated(lambda: self.client.hdel(key, field))

    def members(self, key: bytes, first: int, last: int) -> list[bytes]:
        """Return the members of a sorted set between two positions."""
        members: list[bytes] = self._translated(lambda: self.client.zrange(key, first, last))
        return members

    def append(self, key: bytes, entries: Sequence[Mapping[str, bytes | str]]) -> None:
        """Add entries to a stream, in one round trip."""

        def attempt() -> None:
            pipeline = self.client.pipeline(transaction=False)
            for entry in entries:
                pipeline.xadd(key, dict(entry))
            pipeline.execute()

        self._translated(attempt)

    def wait_for_entry(self, key: bytes, after: bytes, seconds: float) -> None:
        """Wait until a stream has an entry after `after`, for at most `seconds` and half the timeout."""
        milliseconds = max(1, int(1000 * min(seconds, self._longest_wait)))
        self._translated(lambda: self.client.xread({key: after}, count=1, block=milliseconds))

    @property
    def is_cluster(self) -> bool:
        """Return whether this is a Redis Cluster."""
        return isinstance(self.client, RedisCluster)

    @property
    def has_database(self) -> bool:
        """Return whether the URL names another database than 0."""
        return not self.is_cluster and bool(self.client.get_connection_kwargs().get("db"))

    def administer(self, commands: Sequence[Sequence[str]]) -> list[list[Any]]:
        """Run commands of an administrator, in a cluster on every node that it had when this connection was opened.

        Return the replies of each node. If some nodes do not answer, the commands run on the others before the error is
        raised.
        """
        if not commands:
            return []
        replies: list[list[Any]] = self._translated(lambda: self._administer(commands))
        return replies

    def _administer(self, commands: Sequence[Sequence[str]]) -> list[list[Any]]:
        if not self.is_cluster:
            pipeline = self.client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            # Otherwise redis-py writes the command before the text of an error.
            replies = pipeline.execute(raise_on_error=False)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return [replies]
        found, failure = [], None
        for node in self.client.get_nodes():
            try:
                found.append([self.client.execute_command(*command, target_nodes=node) for command in commands])
            except (redis.ConnectionError, redis.TimeoutError) as error:
                failure = error
        if failure is not None:
            raise failure
        return found

    def info(self, section: str) -> dict[str, Any]:
        """Return one section of INFO."""
        reply: dict[str, Any] = self._translated(lambda: self.client.info(section))
        return reply

    @staticmethod
    def _call(
        client: Any, function: str, keys: Sequence[bytes], arguments: Sequence[Argument], node: object = None
    ) -> Any:
        command = "FCALL_RO" if function in _READS else "FCALL"
        if keys and isinstance(client, RedisCluster):
            # Without a node, redis-py sends all arguments to the server twice more, which finds the keys in them.
            node = client.get_node_from_key(keys[0])  # type: ignore[no-untyped-call]
        options = {} if node is None else {"target_nodes": node}
        return client.execute_command(command, PREFIX + function, len(keys), *keys, *arguments, **options)

    def _replies(self, calls: Sequence[Call]) -> list[Any]:
        """Return a reply or an error for each call. The pipeline of a cluster would repeat calls without a reply."""
        if self.is_cluster:
            return [self._reply(call) for call in calls]
        pipeline = self.client.pipeline(transaction=False)
        for call in calls:
            self._call(pipeline, *call)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _reply(self, call: Call) -> Any:
        try:
            return self._call(self.client, *call)
        except ResponseError as error:
            return error

    def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        replies = self._replies(calls)
        missing = [i for i, reply in enumerate(replies) if _is_missing(reply)]
        if missing and len(missing) < len(calls):
            # Another client flushed the functions during the pipeline. Repeat only the calls that did not run.
            self._require_library(lacks_function=True)
            for i in missing:
                replies[i] = self._reply(calls[i])
                if _is_missing(replies[i]):
                    raise LibraryUnfit(_MISSING)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies

    def _with_library(self, attempt: Callable[[], _T]) -> _T:
        def attempt_twice() -> _T:
            for _ in range(2):
                try:
                    return attempt()
                except ResponseError as error:
                    if not _is_missing(error):
                        raise
                self._require_library(lacks_function=True)
            raise LibraryUnfit(_MISSING)  # in a cluster, other shards may be fit

        return self._translated(attempt_twice)

    def has_newer_library(self) -> bool:
        """Return whether the server has the library of a newer version of Ballast, which serves this one too."""
        return max(self._translated(self._revisions)) > REVISION

    def _require_library(self, *, lacks_function: bool = False) -> None:
        """Load the library, or raise `LibraryUnfit`, if it is missing or older. A newer one serves older clients.

        If Redis has no memory for it, an older one does, unless it `lacks_function` that was called.
        """
        revisions = self._revisions()
        found = min(revisions)
        if not self._loads_functions:
            if max(revisions) < REVISION:  # the shard of the queue may be fit although another one is not
                raise LibraryUnfit(_MISSING)
            return
        try:
            if found < REVISION:
                self._load()
            self.is_outdated = False
        except OutOfMemoryError:
            if not found or lacks_function:
                raise
            self.is_outdated, self._load_again_at = True, time.monotonic() + LOAD_AGAIN_SECONDS

    def load_again(self) -> None:
        """Try again to load the functions of this version if Redis was too full for them, at most once a minute."""
        if self.is_outdated and time.monotonic() >= self._load_again_at:
            self._translated(self._require_library)

    def _revisions(self) -> list[int]:
        """Return the revision of the library of each primary that answers."""
        if not self.is_cluster:
            return [self._revision()]
        found, failure = [], None
        for node in self.client.get_primaries():
            try:
                found.append(self._revision(node))
            except (redis.ConnectionError, redis.TimeoutError) as error:
                failure = error
        if failure is not None and not found:
            raise failure
        return found

    def _revision(self, node: object = None) -> int:
        """Return the revision of a server's library, or 0 if it has none or one that is not Ballast's."""
        try:
            found = self._call(self.client, "revision", (), (), node)
        except ResponseError as error:
            is_old = "unknown command" in str(error).lower()
            if not is_old and not _is_missing(error):
                raise
            found = None
        else:
            is_old = False
        if is_old:
            raise ServerUnfit(["Redis: found a server without functions, wanted 7 or newer: upgrade it"])
        return found if isinstance(found, int) else 0

    def _load(self) -> None:
        try:
            # REPLACE: another process may have loaded this revision or an older one in the meantime.
            self.client.function_load(SOURCE, replace=True)
        except NoPermissionError:
            pass
        else:
            return
        raise LibraryUnfit(f"{_MISSING}. This user may not load functions")

    def _is_cluster(self) -> bool:
        try:
            found = self.info("cluster").get("cluster_enabled")
        except QueueForbidden:
            return False  # a user without +info counts as one of a single server
        if found is None and self._is_strict:
            raise QueueUnavailable(STRICT)  # no Redis answers INFO without it
        return bool(found)

    def _translated(self, attempt: Callable[[], _T]) -> _T:
        """Run `attempt` and raise its failure as an error of this package, without the texts of the server."""
        try:
            reply = attempt()
        except (HostNotAdmitted, LibraryUnfit):
            raise
        except QueueError as error:
            failure = error if self._is_known or not self._is_strict else QueueUnavailable(STRICT)
        except Exception as error:  # noqa: BLE001  what answers may be no Redis, and the parser of its reply may fail
            failure = self._failure(error)
        else:
            self._is_known = True
            return reply
        raise failure  # here, and not above: its context would quote the server

    def _failure(self, error: Exception) -> QueueError:
        self._is_known = self._is_known or is_refused_command(error)
        failure = failure_of(error)
        is_reply = isinstance(error, ResponseError) and self._is_known
        return failure if is_reply or not self._is_strict else QueueUnavailable(STRICT)


def _options(
    address: RedisAddress, socket_timeout: float, admits: Admits | None, limits: ReplyLimits | None
) -> dict[str, Any]:
    options: dict[str, Any] = {"socket_timeout": socket_timeout, "protocol": 2}
    if not address.is_local:
        options |= {"socket_connect_timeout": socket_timeout, "socket_keepalive": True}
        kind: type[redis.Connection] = redis.SSLConnection if address.is_tls else redis.Connection
        kind = kind if admits is None else _admitting(kind, admits)
        options["connection_class"] = kind if limits is None else limited(kind, limits)
    return options


def _checked(ca: str) -> str:
    """Return the certificates. The client of Redis would leave a socket open for each attempt with wrong ones.

    Raises:
        QueueForbidden: they are not PEM.
    """
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=ca)
    except (ValueError, ssl.SSLError):
        pass  # the text quotes what was found
    else:
        return ca
    raise QueueForbidden("The certificates of authorities for Redis are not PEM. Write -----BEGIN CERTIFICATE----- ...")


def _never() -> Retry:
    return Retry(NoBackoff(), 0)


def _client(address: RedisAddress, options: dict[str, Any]) -> redis.Redis:
    try:
        return redis.Redis.from_url(address.url, retry=_never(), **options)
    except (ValueError, TypeError):
        pass  # the text quotes the URL
    raise InvalidAddress("Redis URL: an option after ? is unknown or has a wrong value: remove it")


def _admitting(kind: type[redis.Connection], admits: Admits) -> type[redis.Connection]:
    """Return a class of connections that connect to admitted hosts only, also where a cluster redirects the client."""

    class Admitted(kind):  # type: ignore[misc, valid-type]
        def _connect(self) -> Any:
            if not admits(self.host):
                raise HostNotAdmitted
            return super()._connect()

    return Admitted


def _is_missing(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)
