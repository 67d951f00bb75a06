"""The limit of open files of this process, which every connection counts against."""

from __future__ import annotations

import resource

from ballast_log import Log

log = Log(__name__)

OTHER_FILES = 256
"""Open files that are no connections of the API: those of Redis, of the metrics port, and of the process."""


def allow_files(num_connections: int) -> int:
    """Raise the limit of open files for this many connections, and return how many connections it allows.

    The usual limit of a container is 1,024 files, and the process may raise it. Without a free file, a worker answers
    no probe, and reads no changed configuration.
    """
    wanted = num_connections + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft >= wanted or soft == resource.RLIM_INFINITY:
        return num_connections
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    allowed = min(num_connections, most - min(OTHER_FILES, most // 2))
    if allowed < num_connections:
        log.warning("the limit of open files allows fewer connections", files=most, connections=allowed)
    return allowed
