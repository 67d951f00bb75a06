"""The functions of `ballast.lua` on a server or cluster: call them, and load them if they are missing or older.

A newer library serves older clients. A call is repeated only after it had to load the library.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import redis
from redis.cluster import RedisCluster
from redis.exceptions import NoPermissionError, OutOfMemoryError, ResponseError

from ballast_queue.errors import LibraryUnfit, ServerUnfit

Argument = bytes | str | int | float
Call = tuple[str, Sequence[bytes], Sequence[Argument]]
"""Function (without its prefix), KEYS and ARGV."""
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


class FunctionLibrary:
    """The library behind a client of redis-py. `Connection` translates the errors of the client, which it raises."""

    def __init__(self, client: Any, *, loads_functions: bool) -> None:
        self._client = client
        self._is_cluster = isinstance(client, RedisCluster)
        self._loads_functions = loads_functions
        self.is_outdated = False
        """Whether Redis has no memory for the functions of this version, so that calls run those of an older one."""
        self._load_again_at = 0.0

    def call_many(self, calls: Sequence[Call]) -> list[Any]:
        """Call functions in one round trip. Run all calls before a failure is raised."""
        for _ in range(2):
            try:
                return self._pipeline(calls)
            except ResponseError as error:
                if not _is_missing(error):
                    raise
            self.require(lacks_function=True)
        raise LibraryUnfit(_MISSING)  # in a cluster, other shards may be fit

    def require(self, *, lacks_function: bool = False) -> None:
        """Load the library, or raise `LibraryUnfit`, if it is missing or older. A newer one serves older clients.

        If Redis has no memory for it, an older one does, unless it `lacks_function` that was called.
        """
        revisions = self.revisions()
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

    @property
    def is_due(self) -> bool:
        """Whether to try again to load the functions of this version, for which Redis had no memory."""
        return self.is_outdated and time.monotonic() >= self._load_again_at

    def revisions(self) -> list[int]:
        """Return the revision of the library of each primary that answers."""
        if not self._is_cluster:
            return [self._revision()]
        found, failure = [], None
        for node in self._client.get_primaries():
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
            found = self._call(self._client, "revision", (), (), node)
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
            self._client.function_load(SOURCE, replace=True)
        except NoPermissionError:
            pass
        else:
            return
        raise LibraryUnfit(f"{_MISSING}. This user may not load functions")

    @staticmethod
    def _call(
        client: Any, function: str, keys: Sequence[bytes], arguments: Sequence[Argument], node: object = None
    ) -> Any:
        command = "FCALL_RO" if function in _READS else "FCALL"
        if keys and isinstance(client, RedisCluster):
            # Without a node, redis-py sends all arguments to the server twice more, which finds the keys in them.
            node = client.get_node_from_key(keys[0])  # type: ignore[no-untyped-call]
        options = {} if node is None else {"target_nodes": node}
        return client.execute_command(command, PREFIX + function, len(keys), *keys, *map(_plain, arguments), **options)

    def _replies(self, calls: Sequence[Call]) -> list[Any]:
        """Return a reply or an error for each call. The pipeline of a cluster would repeat calls without a reply."""
        if self._is_cluster:
            return [self._reply(call) for call in calls]
        pipeline = self._client.pipeline(transaction=False)
        for call in calls:
            self._call(pipeline, *call)
        replies: list[Any] = pipeline.execute(raise_on_error=False)
        return replies

    def _reply(self, call: Call) -> Any:
        try:
            return self._call(self._client, *call)
        except ResponseError as error:
            return error

    def _pipeline(self, calls: Sequence[Call]) -> list[Any]:
        replies = self._replies(calls)
        missing = [i for i, reply in enumerate(replies) if _is_missing(reply)]
        if missing and len(missing) < len(calls):
            # Another client flushed the functions during the pipeline. Repeat only the calls that did not run.
            self.require(lacks_function=True)
            for i in missing:
                replies[i] = self._reply(calls[i])
                if _is_missing(replies[i]):
                    raise LibraryUnfit(_MISSING)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return replies


def _plain(argument: Argument) -> Argument:
    """Return a number without its subclass, such as an enum, of which redis-py would send the `repr`."""
    if isinstance(argument, int):
        return int(argument)
    return float(argument) if isinstance(argument, float) else argument


def _is_missing(reply: object) -> bool:
    return isinstance(reply, ResponseError) and "Function not found" in str(reply)
