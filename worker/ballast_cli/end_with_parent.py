"""Runs a command that gets SIGTERM when the process that started it ends, even by SIGKILL.

Works on Linux only; on other systems, the command runs unchanged. Run as
`python -m ballast_cli.end_with_parent PARENT_PID COMMAND ...`.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask the kernel for the signal, then replace this process with the command. The setting survives `exec`."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the kernel knew
            sys.exit(1)
    os.execv(command[0], command)  # noqa: S606  no shell is needed


if __name__ == "__main__":
    main()
