"""`ballast up` in a directory of its own: start it, find its processes, kill them, start it again.

A process belongs to a stack if its working directory is the stack's, so the search finds orphans too.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import yaml

from ballast_cli.connection import Running
from ballast_cli.demo.polling import read_metrics
from ballast_cli.processes import status_of

POLL_SECONDS = 0.05


class Kind(StrEnum):
    """A kind of process that belongs to `ballast up`."""

    UP = "up"
    WORKER = "worker"
    SUPERVISOR = "supervisor of Valkey"
    VALKEY = "Valkey"


@dataclass(frozen=True, slots=True)
class Process:
    """A process of a stack."""

    pid: int
    kind: Kind


@dataclass(slots=True)
class WorkerLife:
    """One worker process, from its first answer to `/ready` on."""

    pid: int
    address: str
    ending_since: float | None = None
    """When the worker lost its `ballast up`, or its `ballast up` lost Valkey: the worker drains after this time."""
    is_killed: bool = False


@dataclass(slots=True)
class Stack:
    """One directory in which `ballast up` runs, and is started again when it ends."""

    name: str
    directory: Path
    config: dict[str, object]
    has_valkey: bool
    killed: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(Kind, 0))
    starts: int = 0
    life: WorkerLife | None = None
    _up: subprocess.Popen[bytes] | None = None
    _is_stopping: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start `ballast up`, and a thread that starts it again."""
        self.directory.mkdir(parents=True, exist_ok=True)
        (self.directory / "worker.yaml").write_text(yaml.safe_dump(self.config))
        self._thread = threading.Thread(target=self._keep_up, name=f"stack-{self.name}", daemon=True)
        self._thread.start()

    def stop(self, *, seconds: float = 90) -> int | None:
        """Stop `ballast up` as Ctrl-C does, and return its exit code. None: it did not stop in time."""
        self._is_stopping.set()
        if self._thread is not None:
            self._thread.join()
        if self._up is None:
            return 0
        self._up.send_signal(signal.SIGINT)
        try:
            return self._up.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None

    @property
    def is_ready(self) -> bool:
        """Return whether the worker accepts requests."""
        life = self.life
        return life is not None and life.ending_since is None and status_of(life.address, "/ready") == 200

    @property
    def redis_url(self) -> str | None:
        """Return the address of the embedded Valkey that runs now, from the title of its process.

        A file could name the port of a dead Valkey, which another server on this machine may have taken.
        """
        data = self.directory / ".ballast" / "valkey"
        try:
            process = Path("/proc", str(int((data / "valkey.pid").read_text())))
            is_ours = (process / "cwd").readlink() == data
            title = re.search(r"127\.0\.0\.1:(\d+)", (process / "cmdline").read_text())
        except (OSError, ValueError):
            return None
        return f"redis://127.0.0.1:{title[1]}" if is_ours and title else None

    def processes(self) -> list[Process]:
        """Return the processes of this stack that run now."""
        found = [
            Process(int(entry.name), kind)
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and (kind := self._kind(entry)) is not None
        ]
        return sorted(found, key=lambda process: (process.kind, process.pid))

    def kill(self, process: Process) -> bool:
        """Send SIGKILL. Return whether the process still ran."""
        life = self.life
        if life is not None:
            if process.pid == life.pid:
                life.is_killed = True
            elif life.ending_since is None:
                life.ending_since = time.monotonic()
        try:
            os.kill(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return False
        self.killed[process.kind] += 1
        return True

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of the logs."""
        parts = []
        for path in (self.directory / "up.log", self.directory / ".ballast" / "worker.log"):
            if path.exists():
                parts += [f"--- {path}", *path.read_text(errors="replace").splitlines()[-lines:]]
        return "\n".join(parts)

    def _kind(self, entry: Path) -> Kind | None:
        try:
            cwd = (entry / "cwd").readlink()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        if not cwd.is_relative_to(self.directory) or not words[0]:
            return None
        if cwd != self.directory:
            return Kind.VALKEY
        if b"ballast_worker" in words:
            return Kind.WORKER
        return Kind.SUPERVISOR if b"ballast_cli.valkey_supervisor" in words else Kind.UP

    def _keep_up(self) -> None:
        while not self._is_stopping.is_set():
            if self._up is None or self._up.poll() is not None:
                self._start_up()
            self._read_life()
            time.sleep(POLL_SECONDS)

    def _start_up(self) -> None:
        if self.life is not None and self.life.ending_since is None:
            self.life.ending_since = time.monotonic()
        self.starts += 1
        command = [sys.executable, "-m", "ballast_cli", "up", "--port", "0", "--config", "worker.yaml"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BALLAST_")}
        with (self.directory / "up.log").open("ab") as log:
            self._up = subprocess.Popen(
                command,
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment | {"OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def _read_life(self) -> None:
        running = Running.read(self.directory / ".ballast")
        if running is None or self._up is None or running.pid != self._up.pid:
            return
        if self.life is None or self.life.pid != running.worker_pid:
            self.life = WorkerLife(running.worker_pid, running.address)


def descriptors(pid: int) -> dict[str, int]:
    """Return the open file descriptors of a process by kind: socket, pipe, file, other."""
    found: dict[str, int] = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        kind = "file" if target.startswith("/") else target.partition(":")[0]
        found[kind] = found.get(kind, 0) + 1
    return found


def metrics(address: str) -> dict[str, float]:
    """Return the samples of `/metrics`."""
    import httpx  # noqa: PLC0415  only at the end of a run

    return read_metrics(httpx.get(f"{address}/metrics", timeout=30).raise_for_status().text)
