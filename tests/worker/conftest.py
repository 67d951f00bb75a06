"""Real workers: in a thread of the test process, or as processes of their own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import pytest
import redis
import uvloop
from engine_integrity import check_integrity
from files import swap
from waiting import until

from ballast_api.worker_config import WorkerConfig
from ballast_engine.build import build_engine
from ballast_queue.redis_store import Queue
from ballast_worker.app import create_app, load
from ballast_worker.http_connection import HttpLimits
from ballast_worker.http_server import HttpServer
from ballast_worker.preflight import listen
from ballast_worker.worker import Worker

_T = TypeVar("_T")
PATIENCE = 60.0
"""Seconds after which a wait is a failure; nothing waits so long when all is well."""


def _eventually(is_true: Callable[[], Any], what: str) -> Any:
    """Look until it is true, for what other threads and processes do."""
    return until(is_true, seconds=PATIENCE, said=what, pause=0.005)


@pytest.fixture
def variables(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Set variables of the environment, for a server of vLLM. No others are Ballast's."""
    for name in [name for name in os.environ if name.startswith("BALLAST_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("BALLAST_OFFLINE_LEASE_SECONDS", "5")
    return monkeypatch.setenv


@pytest.fixture
def config_file(variables: Callable[[str, str], None], tmp_path: Path) -> Path:
    """The configuration file of a server of vLLM, which it follows."""
    variables("BALLAST_CONFIG", str(tmp_path / "worker.yaml"))
    return tmp_path / "worker.yaml"


@pytest.fixture
def vllm_queue(variables: Callable[[str, str], None], valkey: Any, queue_name: str) -> Iterator[Queue]:
    """The queue of a server of vLLM."""
    variables("BALLAST_RUNTIME_REDIS_URL", valkey.url)
    variables("BALLAST_OFFLINE_QUEUE", queue_name)
    queue = Queue.connect(valkey.url, queue_name)
    yield queue
    queue.close()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """Run the coroutines among the tests on asyncio, as the servers do."""
    return "asyncio"


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], Any], str], Any]:
    """`eventually(condition, "what it is")` gives the first true value, or fails."""
    return _eventually


def merge(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """Change a nested mapping."""
    out = dict(base)
    for key, value in change.items():
        out[key] = merge(out[key], value) if isinstance(value, dict) and isinstance(out.get(key), dict) else value
    return out


@dataclass
class Serving:
    """A worker that serves, in this process."""

    url: str
    worker: Worker
    server: HttpServer
    path: Path | None
    """The file of its configuration."""

    def reconfigure(self, config: WorkerConfig) -> None:
        """Change the file."""
        assert self.path is not None
        swap(self.path, config.dump())

    def connect(self) -> socket.socket:
        """Open a connection."""
        address = urlsplit(self.url)
        return socket.create_connection((address.hostname, address.port), timeout=PATIENCE)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Return the result of a coroutine on the event loop of the worker."""
        assert self.worker.loop.events is not None
        return asyncio.run_coroutine_threadsafe(work, self.worker.loop.events).result(PATIENCE)

    @property
    def num_answers(self) -> int:
        return self.server.server_state.total_requests

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def is_idle(self) -> bool:
        stats = self.worker.engine.stats()
        busy = [of.running + of.parked + of.waiting for of in (stats.online, stats.offline)]
        return not any(busy) and not self.worker.engine.has_work and stats.kv_used == 0


@contextmanager
def _serve(
    config: WorkerConfig, path: Path | None = None, http_limits: HttpLimits | None = None, **options: Any
) -> Iterator[Serving]:
    """Run the app under the server of a worker on a thread; at the end the engine's books must balance."""
    if path is not None:
        path.write_text(config.dump())
    worker = Worker(load(config, path), path=path, **options)
    worker.connections.limits = http_limits or worker.connections.limits
    listener = listen(config)
    worker.address = url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    app = create_app(worker)
    server = HttpServer(app, worker.connections)

    def run() -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve(sockets=[listener]))

    thread = threading.Thread(target=run)
    thread.start()
    _eventually(lambda: server.started, "the server to start")
    try:
        yield Serving(url, worker, server, path)
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()
    check_integrity(worker.engine)


@pytest.fixture(scope="session")
def make_config(model_dir: Path) -> Callable[..., WorkerConfig]:
    """Configurations of the small model: 4 slots, one CPU thread, a free port, whatever else the test says."""
    base = {
        "model": {"uri": str(model_dir), "servedName": "tiny"},
        "slots": 4,
        "engine": {"threads": 1, "kvMemoryMebibytes": 32},
        "slo": {"ttftMilliseconds": 10_000, "tpotMilliseconds": 1_000},
        "runtime": {"port": 0, "drainSeconds": 20},
    }

    def make(**changes: Any) -> WorkerConfig:
        return WorkerConfig.model_validate(merge(base, changes))

    return make


@pytest.fixture(scope="module")
def serving(make_config: Callable[..., WorkerConfig]) -> Iterator[Serving]:
    """A worker without a queue, for the tests of one module."""
    with _serve(make_config()) as serving:
        yield serving


@pytest.fixture(scope="session")
def serve() -> Callable[..., AbstractContextManager[Serving]]:
    """`with serve(config) as serving:` for tests that need a worker of their own."""
    return _serve


@pytest.fixture
def fed(
    serve: Callable[..., AbstractContextManager[Serving]],
    make_config: Callable[..., WorkerConfig],
    valkey: Any,
    queue_name: str,
) -> Callable[..., AbstractContextManager[Serving]]:
    """A worker that serves the test's queue, with a lease of a second."""

    def start(build: Any = build_engine, path: Path | None = None, **changes: Any) -> AbstractContextManager[Serving]:
        config = {
            "offline": {"queue": queue_name, "leaseSeconds": 1},
            "runtime": {"redisUrl": valkey.url, "workerId": "w1"},
        }
        return serve(make_config(**merge(config, changes)), path, build=build)

    return start


@pytest.fixture
def desk(valkey: Any) -> Iterator[redis.Redis]:
    """Redis behind the queue."""
    with redis.Redis.from_url(valkey.url) as raw:
        yield raw


@dataclass
class Running:
    """A worker as a process of its own."""

    process: subprocess.Popen[str]
    url: str = ""
    lines: list[str] = field(default_factory=list)

    @property
    def log(self) -> str:
        return "\n".join(self.lines)

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        return self.process.wait(PATIENCE)


@contextmanager
def _run_worker(config: WorkerConfig, directory: Path) -> Iterator[Running]:
    """Start `python -m ballast_worker` and wait until it listens; it is gone at the end, whatever happened."""
    path = directory / f"{config.runtime.worker_id or 'worker'}.yaml"
    path.write_text(config.dump())
    command = [sys.executable, "-m", "ballast_worker", "--config", str(path), "--log-format", "json"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    running = Running(process)
    assert process.stderr is not None
    stderr = process.stderr

    def read() -> None:
        for line in stderr:
            running.lines.append(line.rstrip("\n"))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        running.url = _eventually(lambda: _address(running), f"the worker to listen; it said: {running.log}")
        yield running
    finally:
        process.kill()
        process.wait(PATIENCE)
        reader.join(PATIENCE)
        stderr.close()


@pytest.fixture(scope="session")
def run_worker() -> Callable[[WorkerConfig, Path], AbstractContextManager[Running]]:
    """`with run_worker(config, directory) as running:` for tests of the process."""
    return _run_worker


def _address(running: Running) -> str:
    if running.process.poll() is not None:
        pytest.fail(f"the worker ended with {running.process.returncode}: {running.log}")
    for line in list(running.lines):
        if line.startswith("{") and (entry := json.loads(line))["event"] == "listening":
            return str(entry["address"])
    return ""
