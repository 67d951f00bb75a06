"""The rules of the users in Redis that work with one queue. PURE.

A user needs the commands that functions run too, because Redis checks these against the rights of the caller.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ballast_queue.keys import Keys, key_pattern

DIRECT = ("fcall", "fcall_ro", "hget", "hscan", "info", "xread", "zrange")
"""Commands that this package runs outside of the functions."""
WITHIN = (
    *("time", "get", "set", "del", "unlink", "sadd", "srem", "smembers"),
    *("hmget", "hgetall", "hexists", "hset", "hsetnx", "hdel", "hincrby", "hincrbyfloat"),
    *("zadd", "zrem", "zscore", "zpopmin", "xadd", "xdel", "xlen", "xrange"),
)
"""Further commands that the functions in ballast.lua run. `hgetall` is one of earlier revisions only."""
DATABASE = ("select",)
"""Further commands if the URL names another database than 0."""
CLUSTER = ("command", "cluster|slots")
"""Further commands on Redis Cluster."""
ADMINISTRATION = ("function|load", "acl|setuser", "acl|getuser", "acl|users", "acl|deluser", "scan")
"""Further commands of an administrator."""
_NOTHING = ("resetkeys", "resetchannels", "-@all")


@dataclass(frozen=True, slots=True)
class RedisUser:
    """A user with all its rules."""

    name: str
    passwords: tuple[str, ...] = field(repr=False)
    """The valid passwords, the newest first."""
    rules: tuple[str, ...]
    keeps_passwords: bool = False
    """Passwords that Redis knows already stay valid too."""


def worker_rules(queue: str, *more: str) -> tuple[str, ...]:
    """Return the rules of a worker, and of a user of the `ballast` command: everything in one queue, nothing else."""
    return (*_NOTHING, f"~{key_pattern(queue)}", *(f"+{command}" for command in (*DIRECT, *WITHIN, *more)))


def administrator_rules() -> tuple[str, ...]:
    """Return the rules of the operator's user: all queues, their users and the functions."""
    commands = (*DIRECT, *WITHIN, *ADMINISTRATION)
    return (*_NOTHING, "~ballast:*", *(f"+{command}" for command in commands))


def submitter_rules(queue: str, tenant: str | None = None) -> tuple[str, ...]:
    """Return the rules of a user that only adds to the inbox of a queue, or to that of one tenant."""
    keys = Keys(queue)
    inbox = keys.inbox if tenant is None else keys.inbox_of(tenant)
    return (*_NOTHING, f"~{inbox.decode()}", "+xadd")
