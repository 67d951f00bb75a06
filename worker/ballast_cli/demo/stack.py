"""The processes of the demo: an embedded Valkey, and a worker with the small model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_cli.demo.load import Client
from ballast_cli.errors import CliError
from ballast_cli.processes import Valkey, WorkerProcess, address_of, take_port, worker_command
from ballast_cli.worker_file import DEMO_MODEL, DEMO_MODEL_NAME, write
from ballast_queue.job import Job
from ballast_queue.redis_store import Queue

HOST = "127.0.0.1"
TENANT = "demo"
_START_SECONDS = 180


@dataclass(slots=True)
class DemoStack:
    """The running processes of the demo, and the calls that control them."""

    valkey: Valkey
    worker: WorkerProcess
    queue: Queue
    config: WorkerConfig
    config_file: Path

    @classmethod
    @contextmanager
    def up(cls, directory: Path, *, slots: int, threads: int) -> Iterator[DemoStack]:
        """Start all processes, and stop them in order at the end."""
        port = take_port(HOST, 0)
        valkey = Valkey.start(directory / "valkey")
        worker: WorkerProcess | None = None
        queue = Queue.connect(valkey.url, "demo/ballast", loads_functions=True)
        try:
            config = _config(valkey.url, port=port, slots=slots, threads=threads)
            file = directory / "worker.yaml"
            write(config, file)
            address = address_of(HOST, port)
            worker = WorkerProcess.start(worker_command(file), log=directory / "worker.log", address=address)
            worker.wait_until_ready(seconds=_START_SECONDS)
            yield cls(valkey, worker, queue, config, file)
        finally:
            if worker:
                worker.stop(seconds=20)
            queue.close()
            valkey.stop()

    def client(self) -> Client:
        """Return an HTTP client of the worker."""
        return Client(HOST, urlsplit(self.worker.address).port or 0)

    def pause(self, job_id: str) -> None:
        """Pause the offline job."""
        if not self.queue.jobs.get(job_id).state.is_over:
            self.queue.jobs.pause(job_id)

    def counts(self, job_id: str) -> Job:
        """Return the offline job with its progress.

        Raises:
            CliError: the job has ended, so that the demo would no longer be a mixed run.
        """
        job = self.queue.jobs.get(job_id)
        if job.state.is_over:
            raise CliError(f"The offline job ended early ({job.state}, {job.reason or 'no reason'}): please report it.")
        return job

    def set_slo(self, *, ttft_ms: float, tpot_ms: float) -> str:
        """Write new SLOs into the worker's configuration, and return the hash that its status will show."""
        slo = self.config.slo.model_copy(update={"ttft_milliseconds": ttft_ms, "tpot_milliseconds": tpot_ms})
        self.config = self.config.model_copy(update={"slo": slo})
        write(self.config, self.config_file)
        return content_hash(self.config.dump())

    def require_alive(self) -> None:
        """Check that the worker runs.

        Raises:
            CliError: the worker has ended.
        """
        if not self.worker.is_running:
            raise CliError(self.worker.exit_message())


def _config(redis_url: str, *, port: int, slots: int, threads: int) -> WorkerConfig:
    return WorkerConfig.model_validate(
        {
            "model": {"uri": str(DEMO_MODEL), "servedName": DEMO_MODEL_NAME},
            "engine": {"threads": threads},
            "slots": slots,
            "runtime": {"host": HOST, "port": port, "redisUrl": redis_url, "namespace": "demo", "drainSeconds": 5},
        }
    )
