"""Real `vllm serve` processes with Ballast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from ports import free_port
from waiting import until

from ballast_queue.job import Result
from ballast_queue.redis_store import Queue

PATIENCE = 600.0
"""Seconds after which a wait is a failure; nothing waits so long when all is well."""
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content or '' }}{% endfor %}"
    "{% if tools %}[{{ tools | length }}]{% endif %}{% if add_generation_prompt %}<a>{% endif %}"
)


def _eventually(is_true: Callable[[], Any], what: str) -> Any:
    return until(is_true, seconds=PATIENCE, said=what)


@pytest.fixture(scope="session")
def eventually() -> Callable[[Callable[[], Any], str], Any]:
    return _eventually


@dataclass
class Serving:
    """A `vllm serve` process."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=PATIENCE, **options)

    def series(self, path: str = "/metrics", headers: Mapping[str, str] | None = None) -> dict[str, float]:
        """The values of `/metrics` by name and labels."""
        lines = httpx.get(f"{self.url}{path}", headers=headers, timeout=PATIENCE).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def engine_core(self) -> int:
        """Return the process id of EngineCore."""
        return _children(self.process.pid, "EngineCore")[0]

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks that share the model."""
        return _children(self.engine_core(), "Worker")


def _children(parent: int, word: str) -> list[int]:
    """Return the child processes whose name has the word."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in found.splitlines()]
    return [int(pid) for pid, ppid, name in rows if int(ppid) == parent and word in name]


@contextmanager
def _serve(model: Path, log: Path, *arguments: str, **variables: str) -> Iterator[Serving]:
    template = log.with_name("template.jinja")
    template.write_text(TEMPLATE)
    port = free_port()
    command = [
        str(Path(sys.executable).parent / "vllm"), "serve", str(model), "--chat-template", str(template),
        "--served-model-name", "m", "--dtype", "float32", "--max-model-len", "1024",
        "--max-num-seqs", "8", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--scheduler-cls", "ballast_vllm.scheduler.BallastScheduler",
        "--middleware", "ballast_vllm.middleware.BallastMiddleware", *arguments,
    ]  # fmt: skip
    with _run(command, port, log, **variables) as serving:
        yield serving


@contextmanager
def _run(command: list[str], port: int, log: Path, **variables: str) -> Iterator[Serving]:
    environment = {
        **os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO", **variables,
    }  # fmt: skip
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environment, start_new_session=True)
    serving = Serving(f"http://127.0.0.1:{port}", process, log)
    try:
        yield serving
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _is_ready(serving: Serving) -> bool:
    assert serving.process.poll() is None, serving.log.read_text()[-4000:]
    try:
        return httpx.get(f"{serving.url}/ready", timeout=5, verify=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Serving]]:
    """`with start(model, "--argument", BALLAST_X="y") as serving` runs a server until the end of the block."""

    @contextmanager
    def started(model: Path, *arguments: str, is_awaited: bool = True, **variables: str) -> Iterator[Serving]:
        log = tmp_path_factory.mktemp("server") / "log"
        with _serve(model, log, *arguments, **variables) as serving:
            if is_awaited:
                _eventually(lambda: _is_ready(serving), "the server to be ready")
            yield serving

    return started


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., AbstractContextManager[Serving]]:
    """`with launch(path, config) as serving` writes a configuration to a file, and runs `ballast-vllm` with it."""

    @contextmanager
    def launched(
        path: Path, config: Mapping[str, Any], *, is_awaited: bool = True, **variables: str
    ) -> Iterator[Serving]:
        log, port = tmp_path_factory.mktemp("server") / "log", free_port()
        runtime = {"host": "127.0.0.1", "port": port, "metricsPort": free_port(), **config.get("runtime", {})}
        path.write_text(json.dumps({**config, "runtime": runtime}))
        command = [sys.executable, "-W", "ignore", "-m", "ballast_vllm", "--config", str(path)]
        with _run(command, port, log, **variables) as serving:
            if "tlsCertFile" in runtime:
                serving.url = f"https://localhost:{port}"
            if is_awaited:
                _eventually(lambda: _is_ready(serving), "the server to be ready")
            yield serving

    return launched


@pytest.fixture
def queue(valkey: Any, queue_name: str) -> Iterator[Queue]:
    with closing(Queue.connect(valkey.url, queue_name)) as found:
        yield found


@pytest.fixture(scope="session")
def run_job(valkey: Any) -> Callable[..., dict[str, Result]]:
    """`run_job("queue", lines)` returns the results of a job by custom_id."""

    def run(queue_name: str, lines: list[str], **terms: Any) -> dict[str, Result]:
        with closing(Queue.connect(valkey.url, queue_name)) as queue:
            _eventually(lambda: queue.settings.read().models, "the server to configure the queue")
            job_id = queue.submissions.submit(lines, **terms).job_id
            _eventually(lambda: queue.jobs.get(job_id).state.is_over, f"job {job_id} to be over")
            return {result.custom_id: result for result in queue.results.read(job_id)}

    return run


def line(custom_id: str, url: str, **body: Any) -> str:
    return json.dumps({"custom_id": custom_id, "url": url, "body": {"model": "m", **body}})


@pytest.fixture(scope="session")
def as_line() -> Callable[..., str]:
    return line
