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

from ballast_api.serve_config import APPLICATION, serve_config
from ballast_api.worker_config import WorkerConfig
from ballast_worker.errors import WorkerError

POLL_SECONDS = 0.2


class LocalRay:
    """Ray and Serve, which end with the context. The replica serves its own port, so Serve runs no proxy."""

    dashboard: str
    """The address of Ray's dashboard."""

    def __enter__(self) -> Self:
        try:
            context = ray.init(include_dashboard=True, configure_logging=False)
        except Exception as error:
            ray.shutdown()  # it ends the processes that have started
            raise WorkerError(f"Ray did not start. {_last_words(error)}") from error
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
            WorkerError: the replica did not start. The message is that of Serve.
        """
        has_gpus = ray.cluster_resources().get("GPU", 0) > 0 and config.backend == "vllm"
        gpus = config.runtime.tensor_parallel if has_gpus else 0
        client = ServeSubmissionClient(self.dashboard)
        client.deploy_applications(serve_config(config, text, replicas=1, gpus=gpus))
        while not is_stopped():
            found = serve.status().applications.get(APPLICATION)
            if found is not None and found.status is ApplicationStatus.RUNNING:
                return
            if found is not None and found.status is ApplicationStatus.DEPLOY_FAILED:
                raise WorkerError("; ".join(each.message for each in found.deployments.values()) or found.message)
            time.sleep(POLL_SECONDS)


def _status() -> ApplicationStatus | None:
    found = serve.status().applications.get(APPLICATION)
    return None if found is None else found.status


def _last_words(error: Exception) -> str:
    """Return a sentence with the first line of the error, which may quote a whole log."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{first[:300].rstrip(':. ')}. The logs of Ray are in /tmp/ray/session_latest/logs"
