"""Check whether a server is fit to store jobs."""

from __future__ import annotations

from ballast_queue.connection import Connection
from ballast_queue.errors import QueueForbidden

MIN_VERSION = (7, 0)
KEEPS_ALL = "noeviction"


def inspect(connection: Connection) -> tuple[list[str], list[str]]:
    """Check the version, the eviction policy and the persistence.

    Return the reasons why the server may lose or refuse work, and warnings. Each is a fixed sentence: what was found,
    what was wanted, what to do.
    """
    try:
        server, memory, persistence = (connection.info(part) for part in ("server", "memory", "persistence"))
    except QueueForbidden:
        return [], ["Redis could not be checked: this user may not run INFO; allow +info"]
    problems, warnings = list[str](), list[str]()
    # Valkey reports the Redis version that it is compatible with (7.2.4), not its own.
    version = str(server.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdecimal()) < MIN_VERSION:
        problems.append("Redis: found an older version, wanted 7 or newer (or any Valkey): upgrade it")
    if memory.get("maxmemory_policy", KEEPS_ALL) != KEEPS_ALL:
        problems.append(
            f"Redis: found another maxmemory-policy, wanted {KEEPS_ALL}: the policy deletes jobs when memory runs "
            f"short; run CONFIG SET maxmemory-policy {KEEPS_ALL} and change the server's configuration"
        )
    if not persistence.get("aof_enabled"):
        warnings.append(
            "Redis: found no append-only file, wanted one: a restart of Redis loses the jobs since its last snapshot, "
            "or all jobs without snapshots; set appendonly yes"
        )
    if server.get("redis_mode") == "sentinel":
        problems.append("Redis: found a sentinel, wanted the server that it monitors: use the address of that server")
    if connection.has_newer_library():
        warnings.append(
            "Redis has the functions of a newer version of Ballast, which serve this version too: upgrade this program"
        )
    return problems, warnings
