"""A Ray of one node on this machine, with the application of one worker."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import ray
from ray import serve
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ApplicationStatus

from ballast_api.serve_config import APPLICATION, serve_config, without_traceback
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_openai.errors import counted
from ballast_worker.errors import WorkerError

log = Log(__name__)

POLL_SECONDS = 0.2
START_ATTEMPTS = 3
SLOW_START = "timed out during startup"
"""Part of Ray's message if a node does not start within 30 s, which Ray cannot change. A busy machine needs longer."""


class LocalRay:
    """Ray and Serve, which end with the context. The replica serves its own port, so Serve runs no proxy."""

    dashboard: str
    """The address of Ray's dashboard."""

    def __enter__(self) -> Self:
        for attempts_left in reversed(range(START_ATTEMPTS)):
            try:
                # Without an address, Ray joins a Ray that runs here already. The context would end its applications.
                context = ray.init("local", include_dashboard=True, configure_logging=False)
            except Exception as error:
                ray.shutdown()  # it ends the processes that have started
                if not attempts_left or SLOW_START not in str(error):
                    raise WorkerError(f"Ray did not start. {_last_words(error)}") from error
                log.warning("Ray starts again", because=_last_words(error))
            else:
                break
        self.dashboard = f"http://{context.dashboard_url}"
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if _status() is not None:
            serve.delete(APPLICATION, _blocking=False)
        while _status() is not None:  # Serve ends a replica that does not drain in time
            time.sleep(POLL_SECONDS)
        serve.shutdown()
        ray.shutdown()

    def deploy(self, config: WorkerConfig, text: str, *, is_stopped: Callable[[], bool]) -> None:
        """Serve a configuration, or pass a changed configuration to the replica.

        Serve restarts the replica if a field of `config` changed that is not hot. The replica reads `text`.

        Raises:
            WorkerError: there are too few GPUs, Ray's dashboard does not answer, or the replica did not start. Then the
                message is that of Serve.
        """
        document = serve_config(config, text, replicas=1, gpus=_gpus(config))
        try:
            ServeSubmissionClient(self.dashboard).deploy_applications(document)
        except (OSError, RuntimeError) as error:
            raise WorkerError(f"The dashboard of Ray did not take the configuration. {_last_words(error)}") from error
        while not is_stopped():
            found = serve.status().applications.get(APPLICATION)
            if found is not None and found.status is ApplicationStatus.RUNNING:
                return
            if found is not None and found.status is ApplicationStatus.DEPLOY_FAILED:
                messages = [each.message for each in found.deployments.values()] or [found.message]
                raise WorkerError(_with_logs("; ".join(map(without_traceback, messages))))
            time.sleep(POLL_SECONDS)


def _gpus(config: WorkerConfig) -> int:
    """Return the GPUs of the replica: none if Ray finds none, because vLLM also runs on CPUs."""
    found, needed = int(ray.cluster_resources().get("GPU", 0)), config.runtime.tensor_parallel
    if config.backend != "vllm" or not found:
        return 0
    if found < needed:
        raise WorkerError(
            f"runtime.tensorParallel is {needed}, and Ray found {counted(found, 'GPU')}. Set at most {found}"
        )
    return needed


def _status() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


def _last_words(error: Exception) -> str:
    """Return a sentence with the first line of the error, which may quote a whole log."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return _with_logs(first[:300])


def _with_logs(message: str) -> str:
    return f"{message.rstrip(':. ')}. The logs of Ray are in /tmp/ray/session_latest/logs"
