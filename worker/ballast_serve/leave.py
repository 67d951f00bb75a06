"""`python -m ballast_serve.leave`: drain the replica of this pod, before Kubernetes ends the pod.

Ray does not drain a node that Kubernetes ends. This program is the `preStop` hook of the pod. It asks the replica by a
file, and waits until it has drained, or until Kubernetes ends the pod.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

ASKED, DONE = "asked", "done"
POLL_SECONDS = 0.2


def directory() -> Path:
    """Return the directory of the files, which the processes of a pod share."""
    return Path(os.environ.get("HOME", "/")) / "ballast-leave"


def main() -> None:
    """Ask, and wait. Without a replica there is nothing to wait for."""
    place = directory()
    if not place.is_dir():  # the replica makes it when it starts
        return
    (place / ASKED).touch()
    while not (place / DONE).exists():
        time.sleep(POLL_SECONDS)


if __name__ == "__main__":
    main()
