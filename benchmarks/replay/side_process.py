"""A side of a comparison of vLLM with Ballast, in a process of its own that has its own clock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Without huge pages, the same engine is up to 20 % slower in one process than in another.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
RESULT = "RESULT "
PAUSED = "PAUSED "


def send_result(found: dict[str, Any]) -> None:
    """Print the result of a run for the process that compares."""
    print(f"{RESULT}{json.dumps(found)}", flush=True)


def pause(so_far: dict[str, Any]) -> dict[str, Any]:
    """Report the result so far, wait until the process that compares calls `advance`, and return its message."""
    print(f"{PAUSED}{json.dumps(so_far)}", flush=True)
    line = sys.stdin.readline()
    if not line:
        sys.exit()  # the other process has ended
    message: dict[str, Any] = json.loads(line)
    return message


class SideProcess:
    """Runs a script that reads one run per line from its input, and calls `send_result` for each."""

    def __init__(self, script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> None:
        self._name = " ".join(arguments[:2])
        self._run: dict[str, Any] | None = None
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", script, *arguments],
            env=os.environ | VARIABLES | dict(environment or {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def replay(self, run: dict[str, Any]) -> dict[str, Any]:
        """Replay one run there, and return its result.

        Raises:
            SystemExit: the process ended.
        """
        self.begin(run)
        while True:
            found, is_end = self.advance()
            if is_end:
                return found

    def begin(self, run: dict[str, Any]) -> None:
        """Set the next run. It begins with the first `advance`, which the caller repeats to the end."""
        self._run = run

    def advance(self, message: Mapping[str, Any] | None = None) -> tuple[dict[str, Any], bool]:
        """Replay until the script calls `pause`, or to the end. Return the result so far, and whether it is the end.

        Args:
            message: What the `pause` in which the script waits returns.

        Raises:
            SystemExit: the process ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        run, self._run = self._run, None
        self._process.stdin.write(json.dumps(message or {} if run is None else run) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            for mark in (RESULT, PAUSED):
                if line.startswith(mark):
                    return json.loads(line.removeprefix(mark)), mark == RESULT
        raise SystemExit(f"The process of {self._name} ended with status {self._process.wait()}.")

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
