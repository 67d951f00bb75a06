"""Whether a server can be trusted with work."""

from __future__ import annotations

from dataclasses import dataclass

from ballast_queue.connection import Connection
from ballast_queue.errors import QueueForbidden

MIN_VERSION = (7, 0)


@dataclass(frozen=True, slots=True)
class Fitness:
    """What was found. Sentences: what, what was wanted, what to do."""

    problems: tuple[str, ...]
    """Each of them may lose or refuse work."""
    warnings: tuple[str, ...]


def inspect(connection: Connection) -> Fitness:
    """Look at version, eviction and persistence."""
    where = connection.where
    try:
        server, memory, persistence = (connection.info(part) for part in ("server", "memory", "persistence"))
    except QueueForbidden as error:
        return Fitness((), (f"Redis at {where} could not be checked: {error}",))
    problems, warnings = [], []
    # Valkey answers with the Redis version that it is compatible with (7.2.4), whatever its own is.
    version = str(server.get("redis_version", "0"))
    if tuple(int(part) for part in version.split(".")[:2] if part.isdigit()) < MIN_VERSION:
        problems.append(f"Redis at {where}: found version {version}, wanted 7 or newer (or any Valkey): upgrade it")
    policy = str(memory.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        problems.append(
            f"Redis at {where}: found maxmemory-policy {policy}, wanted noeviction: it would delete jobs when memory "
            "runs short; set it with CONFIG SET maxmemory-policy noeviction and in its configuration"
        )
    if not persistence.get("aof_enabled"):
        warnings.append(
            f"Redis at {where}: found no append-only file, wanted one: a restart of Redis loses jobs since its last "
            "snapshot (all of them without snapshots); set appendonly yes"
        )
    if server.get("redis_mode") == "sentinel":
        problems.append(
            f"Redis at {where}: found a sentinel, wanted the server that it watches: use that one's address"
        )
    return Fitness(tuple(problems), tuple(warnings))
