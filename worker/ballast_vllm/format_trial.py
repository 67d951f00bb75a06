"""Whether llguidance survives a format: it is tried in a process that may die.

A short format can take gigabytes, or overflow the stack, which ends the process. llguidance limits the time and the
size of some formats, and not of others. So the API server lets a small process, which `main` runs, check each format.
It has limits of CPU time, memory and stack. EngineCore compiles a format on a larger stack.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Timer, stack_size
from time import monotonic

STACK_BYTES = 256 * 1024 * 1024
"""Stack of the threads on which a format is compiled. Memory is used only for the part that is reached."""
TRIED_STACK_BYTES = STACK_BYTES // 8
MOST_SECONDS = 2
"""CPU time of a check, which ends at the next full second. EngineCore needs about the same to compile the format."""
MOST_BYTES = 256 * 1024 * 1024
"""Memory of a check, besides the stack."""
SHORT_SECONDS = 0.1
"""CPU time of a check after which the process ends, because its memory is not as it was."""
MOST_ERROR = 4000
"""Characters of an error, which may quote the whole format."""
LENGTH_BYTES = 8
MOST_WAIT = 30
"""Seconds until the answer of a process. It has its limit of CPU time long before, unless the machine is overloaded."""
MOST_TRIES = 2
COSTLY = signal.SIGXCPU, signal.SIGSEGV, signal.SIGABRT
"""Signals that end a process whose check exceeds a limit. Others come from outside."""


class Trials:
    """Processes that try formats. Threads may share it: each call uses a process of its own."""

    def __init__(self) -> None:
        self.idle: deque[subprocess.Popen[bytes]] = deque()

    def error(self, grammar: str) -> str | None:
        """Return llguidance's sentence about a grammar: empty if it is right, None if the check exceeds a limit.

        Raises:
            OSError: the process cannot be started, was killed twice, or takes too long.
        """
        text = grammar.encode(errors="replace")
        begun, status = monotonic(), 0
        for _ in range(MOST_TRIES):
            answer, status = self._answer(len(text).to_bytes(LENGTH_BYTES, "big") + text)
            if answer:
                found: str | None = json.loads(answer)[0]
                return found
            if -status in COSTLY:
                return None
            if monotonic() - begun > MOST_WAIT:
                break
        raise OSError(f"The process that checks formats ended with status {status}.")

    def _answer(self, message: bytes) -> tuple[bytes, int]:
        """Return the line of a process, empty if it has none, and the status if it ended."""
        process = self._taken()
        written, read = process.stdin, process.stdout
        if written is None or read is None:
            raise AssertionError
        timer = Timer(MOST_WAIT, process.kill)
        timer.daemon = True
        timer.start()
        try:
            with suppress(BrokenPipeError):
                written.write(message)
                written.flush()
            answer = read.readline()
            if answer and not json.loads(answer)[1]:
                self.idle.append(process)
                return answer, 0
            return answer, _end(process)
        finally:
            timer.cancel()

    def _taken(self) -> subprocess.Popen[bytes]:
        while True:
            try:
                process = self.idle.popleft()
            except IndexError:
                return _start()
            if process.poll() is None:
                return process
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> int:
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            with suppress(BrokenPipeError):
                pipe.close()
    return process.wait()


def _start() -> subprocess.Popen[bytes]:
    return subprocess.Popen(  # noqa: S603 - nothing of a client is in it
        [sys.executable, "-P", "-m", __name__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "MALLOC_ARENA_MAX": "1"},
        start_new_session=True,  # no signal of a terminal: it ends with the API server, which closes its input
    )


def main() -> None:
    """Read grammars from the input, and write a line for each, until the input ends or a check was long."""
    for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a service manager sends them to all processes
        signal.signal(ignored, signal.SIG_IGN)
    import llguidance  # noqa: F401, PLC0415 - its memory does not count

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_CORE, 0)
    stack_size(TRIED_STACK_BYTES)
    _limit(resource.RLIMIT_AS, used + TRIED_STACK_BYTES + MOST_BYTES)
    with ThreadPoolExecutor(1) as pool:  # an error of the thread is one of the process
        pool.submit(_answer).result()


def _limit(kind: int, most: int) -> None:
    """Lower a limit, and keep the hard one, which may be lower."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer() -> None:
    from llguidance import LLMatcher  # noqa: PLC0415 - only this process needs it

    found: str | None
    is_over = False
    while not is_over and (header := sys.stdin.buffer.read(LENGTH_BYTES)):
        begun = _cpu_seconds()
        _limit(resource.RLIMIT_CPU, int(begun) + 1 + MOST_SECONDS)
        try:
            grammar = sys.stdin.buffer.read(int.from_bytes(header, "big")).decode()
            found = LLMatcher.validate_grammar(grammar, None)[:MOST_ERROR]
        except MemoryError:
            found = None
        except BaseException as error:  # noqa: BLE001 - a panic of Rust
            found = (str(error) or type(error).__name__)[:MOST_ERROR]
        is_over = found is None or _cpu_seconds() - begun > SHORT_SECONDS
        sys.stdout.write(json.dumps([found, is_over]) + "\n")
        sys.stdout.flush()


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
