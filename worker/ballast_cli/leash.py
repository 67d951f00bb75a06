"""Becomes a command that is told to end (SIGTERM) when the process that started it is gone, even by SIGKILL.

Linux only; elsewhere the command is run as it is. Run as `python -m ballast_cli.leash PARENT_PID COMMAND ...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, then become the command: the setting survives `exec`."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # it went away before the kernel knew
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  no shell is what is wanted


if __name__ == "__main__":
    main()
