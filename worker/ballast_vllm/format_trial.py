"""Whether llguidance survives a format: it is tried in a process that may die.

A short format can take gigabytes, or overflow the stack, which ends the process. llguidance limits the time and the
size of some formats, and not of others. So the API server lets a small process, which `main` runs, check each format.
It has limits of CPU time, memory and stack. EngineCore compiles a format on a larger stack.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Thread, stack_size

STACK_BYTES = 128 * 1024 * 1024
"""Stack of the threads on which a format is compiled. Memory is used only for the part that is reached."""
TRIED_STACK_BYTES = STACK_BYTES // 4
MOST_SECONDS = 2
"""CPU time of a check, which ends at the next full second. EngineCore needs about the same to compile the format."""
MOST_BYTES = 256 * 1024 * 1024
"""Memory of a check, besides the stack."""
SHORT_SECONDS = 0.1
"""CPU time of a check after which the process ends, because its memory is not as it was."""
MOST_ERROR = 4000
"""Characters of an error, which may quote the whole format."""
LENGTH_BYTES = 8


class Trials:
    """Processes that try formats. Threads may share it: each call uses a process of its own."""

    def __init__(self) -> None:
        self.idle: deque[subprocess.Popen[bytes]] = deque()

    def error(self, grammar: str) -> str | None:
        """Return llguidance's sentence about a grammar: empty if it is right, None if the check exceeds a limit.

        Raises:
            OSError: the process cannot be started.
        """
        try:
            process = self.idle.popleft()
        except IndexError:
            process = _start()
        written, read = process.stdin, process.stdout
        if written is None or read is None:
            raise AssertionError
        text = grammar.encode(errors="replace")
        with suppress(BrokenPipeError):
            written.write(len(text).to_bytes(LENGTH_BYTES, "big") + text)
            written.flush()
        answer = read.readline()
        found: str | None
        found, is_over = json.loads(answer) if answer else (None, True)
        if not is_over:
            self.idle.append(process)
            return found
        with suppress(BrokenPipeError):
            written.close()
        read.close()
        if process.wait() > 0:  # it is not ended by a signal
            raise OSError(f"The process that checks formats ended with status {process.returncode}.")
        return found


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - nothing of a client is in it
        [sys.executable, "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"},
        start_new_session=True,  # no signal of a terminal: it ends with the API server, which closes its input
    )


def main() -> None:
    """Read grammars from the input, and write a line for each, until the input ends or a check was long."""
    import llguidance  # noqa: F401, PLC0415 - its memory does not count

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    stack_size(TRIED_STACK_BYTES)
    thread = Thread(target=_answer)
    most = used + TRIED_STACK_BYTES + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    thread.start()
    thread.join()


def _answer() -> None:
    from llguidance import LLMatcher  # noqa: PLC0415 - only this process needs it

    found: str | None
    is_over = False
    while not is_over and (header := sys.stdin.buffer.read(LENGTH_BYTES)):
        begun = _cpu_seconds()
        resource.setrlimit(resource.RLIMIT_CPU, (int(begun) + 1 + MOST_SECONDS, resource.RLIM_INFINITY))
        try:
            grammar = sys.stdin.buffer.read(int.from_bytes(header, "big")).decode()
            found = LLMatcher.validate_grammar(grammar, None)[:MOST_ERROR]
        except MemoryError:
            found = None
        except BaseException as error:  # noqa: BLE001 - a panic of Rust
            found = str(error)[:MOST_ERROR]
        is_over = found is None or _cpu_seconds() - begun > SHORT_SECONDS
        sys.stdout.write(json.dumps([found, is_over]) + "\n")
        sys.stdout.flush()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
