"""Check whether a server is fit to store jobs."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_queue.connection import Connection
from ballast_queue.errors import QueueForbidden

MIN_VERSION = (7, 0)


@dataclass(frozen=True, slots=True)
class Fitness:
    """The findings as sentences: what was found, what was wanted, what to do."""

    problems: tuple[str, ...]
    """Reasons why the server may lose or refuse work."""
    warnings: tuple[str, ...]


def inspect(connection: Connection) -> Fitness:
    """Check the version, the eviction policy and the persistence."""
    where = connection.where
    try:
        server, memory, persistence = (connection.info(part) for part in ("server", "memory", "persistence"))
    except QueueForbidden as error:
        return Fitness((), (f"Redis at {where} could not be checked: {error}",))
    problems, warnings = [], []
    # Valkey reports the Redis version that it is compatible with (7.2.4), not its own.
    version = str(server.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        problems.append(f"Redis at {where}: found version {version}, wanted 7 or newer (or any Valkey): upgrade it")
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        problems.append(
            f"Redis at {where}: found maxmemory-policy {policy}, wanted noeviction: this policy deletes jobs when "
            "memory runs short; run CONFIG SET maxmemory-policy noeviction and change the server's configuration"
        )
    if not persistence.get("aof_enabled"):
        warnings.append(
            f"Redis at {where}: found no append-only file, wanted one: a restart of Redis loses the jobs since its "
            "last snapshot, or all jobs without snapshots; set appendonly yes"
        )
    if server.get("redis_mode") == "sentinel":
        problems.append(
            f"Redis at {where}: found a sentinel, wanted the server that it monitors: use the address of that server"
        )
    return Fitness(tuple(problems), tuple(warnings))
