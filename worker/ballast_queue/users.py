"""Create and remove the users of Redis that work with queues. Only an administrator may.

Redis keeps users in memory and does not replicate them, so whoever creates them repeats it. Every call states the whole
user, and replaces what Redis knows about it at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ballast_queue.connection import Connection
from ballast_queue.keys import queue_of_pattern
from ballast_queue.rights import CLUSTER, DATABASE, RedisUser
from ballast_queue.unreadable import text_of


@dataclass(frozen=True, slots=True)
class RedisUsers:
    """The users of one server, or of each node of a cluster. A node that restarted may know fewer than others."""

    _connection: Connection

    def put(self, users: Iterable[RedisUser]) -> None:
        """Create users, or replace what they may do. Sessions of a user stay.

        Raises:
            QueueForbidden: the user of this connection may not.
        """
        connection = self._connection
        more = [*(DATABASE if connection.has_database else ()), *(CLUSTER if connection.is_cluster else ())]
        extra = [f"+{command}" for command in more]
        connection.administer([_command(user, extra) for user in users])

    def names(self, prefix: str) -> list[str]:
        """Return the names of the users that begin with `prefix`."""
        names = {text_of(name) for (found,) in self._connection.administer([("ACL", "USERS")]) for name in found}
        return sorted(name for name in names if name.startswith(prefix))

    def queues_of(self, name: str) -> list[str]:
        """Return the queues whose keys a user may use all."""
        patterns = set[str]()
        for (found,) in self._connection.administer([("ACL", "GETUSER", name)]):
            fields = dict(zip(map(text_of, found[::2]), found[1::2], strict=True)) if found else {}
            patterns.update(text_of(fields.get("keys", b"")).split())
        queues = (queue_of_pattern(pattern.partition("~")[2]) for pattern in patterns)
        return sorted(queue for queue in queues if queue is not None)

    def remove(self, names: Sequence[str]) -> None:
        """Remove users and end their sessions."""
        if names:
            self._connection.administer([("ACL", "DELUSER", *names)])


def _command(user: RedisUser, extra: Sequence[str]) -> tuple[str, ...]:
    # A hash instead of the password, so that no log of commands has it.
    hashes = (f"#{hashlib.sha256(password.encode()).hexdigest()}" for password in user.passwords)
    # The rules begin with the withdrawal of all rights, so a reset only removes the former passwords.
    reset = () if user.keeps_passwords else ("reset",)
    return ("ACL", "SETUSER", user.name, *reset, "on", *hashes, *user.rules, *extra)
