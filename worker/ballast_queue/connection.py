"""Connect to a server, run commands and functions on it, and translate failures into errors of this package.

A broken connection is an error for the caller, which decides whether to repeat the call. Leases cover the effects of a
lost reply.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

import redis
from redis.cluster import RedisCluster
from redis.exceptions import ResponseError

from ballast_queue import clients
from ballast_queue.address import parse_address
from ballast_queue.clients import Admits
from ballast_queue.errors import HostNotAdmitted, LibraryUnfit, QueueError, QueueForbidden, QueueUnavailable
from ballast_queue.failures import STRICT, failure_of, is_refused_command
from ballast_queue.function_library import REVISION, Argument, Call, FunctionLibrary
from ballast_queue.reply_limits import ReplyLimits
from ballast_queue.unreadable import Unreadable

_T = TypeVar("_T")


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
        """The client of redis-py. Its errors are not translated, so only this module, its library and tests call it."""
        self.unreadable: dict[str, Unreadable] = {}
        """The unreadable values of each queue."""
        self._library = FunctionLibrary(client, loads_functions=loads_functions)
        self._longest_wait = socket_timeout / 2
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
        options = clients.options_of(
            address, password=password, socket_timeout=socket_timeout, admits=admits, ca=ca, limits=limits
        )
        client = clients.single(address, options)
        settings: dict[str, Any] = {"loads_functions": loads_functions, "is_strict": admits is not None}
        connection = cls(client, socket_timeout=socket_timeout, **settings)
        if not checks_functions:
            return connection
        try:
            if connection._is_cluster():
                client.close()
                cluster = connection._translated(lambda: clients.clustered(address, options))
                connection = cls(cluster, socket_timeout=socket_timeout, **settings)
            connection._translated(connection._library.require)
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
        return self.call_many([(function, keys, arguments)])[0]

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions in one round trip, each atomic on its own. Run all calls before a failure is raised.

        A cluster needs a round trip for each call.
        """
        return self._translated(lambda: self._library.call_many(calls)) if calls else []

    def hash_field(self, key: bytes, field: str) -> bytes | None:
        """Return one field of a hash, or None if it is missing."""
        value: bytes | None = self._translated(lambda: self.client.hget(key, field))
        return value

    def hash_pairs(self, key: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the fields of a hash, page by page, each once. Fields written during the scan may be missing."""
        pairs, seen = self.client.hscan_iter(key, count=500), set[bytes]()
        while (pair := self._translated(lambda: next(pairs, None))) is not None:
            if pair[0] not in seen:  # a scan repeats fields while Redis resizes the table
                seen.add(pair[0])
                yield pair

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
    def is_outdated(self) -> bool:
        """Return whether Redis has no memory for the functions of this version. Calls run those of an older one."""
        return self._library.is_outdated

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

    def is_read_only(self) -> bool:
        """Return whether a single server is a replica that accepts no writes. False if the user may not know."""
        try:
            found = self.info("replication")
        except QueueForbidden:
            return False
        return found.get("role") == "slave" and bool(found.get("slave_read_only"))

    def has_newer_library(self) -> bool:
        """Return whether the server has the library of a newer version of Ballast, which serves this one too."""
        return max(self._translated(self._library.revisions)) > REVISION

    def load_again(self) -> None:
        """Try again to load the functions of this version if Redis was too full for them, at most once a minute."""
        if self._library.is_due:
            self._translated(self._library.require)

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
