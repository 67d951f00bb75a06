"""`python -m ballast_serve.leave`: drain the replica of this pod, before Kubernetes ends the pod.

Ray does not drain a node that Kubernetes ends. This program is the `preStop` hook of the pod. It asks the replica by a
file, and waits until the replica has drained or its process has ended, or until Kubernetes ends the pod.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

REPLICA, ASKED, DONE = "replica", "asked", "done"
POLL_SECONDS = 0.2


def directory() -> Path:
    """Return the directory of the files, which the processes of a pod share."""
    return Path(os.environ.get("HOME", "/")) / "ballast-leave"


def watch_for() -> None:
    """Make the hook ask this process. The files of an earlier replica of the pod have no effect any longer."""
    place = directory()
    place.mkdir(parents=True, exist_ok=True)
    for name in (ASKED, DONE):
        (place / name).unlink(missing_ok=True)
    part = place / f"{REPLICA}.part"
    part.write_text(str(os.getpid()), encoding="utf-8")
    part.replace(place / REPLICA)


def drained() -> None:
    """Make the hook end, unless it asks a later replica of the pod by now."""
    place = directory()
    if (place / REPLICA).read_text(encoding="utf-8") == str(os.getpid()):
        (place / DONE).touch()


def main() -> None:
    """Ask, and wait. Without a replica there is nothing to wait for."""
    place = directory()
    with contextlib.suppress(FileNotFoundError):  # no replica of the pod has served
        process = Path("/proc", (place / REPLICA).read_text(encoding="utf-8"))
        while process.exists() and not (place / DONE).exists():
            (place / ASKED).touch()
            time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
