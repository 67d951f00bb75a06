"""A Ray of one node on this machine, with the application of one worker."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import ray
import ray._private.worker
from ray import serve
from ray._private.node import Node
from ray.dashboard.modules.serve.sdk import ServeSubmissionClient
from ray.serve.schema import ApplicationStatus

from ballast_api.serve_config import APPLICATION, serve_config, without_traceback
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_openai.errors import counted
from ballast_worker.command_line import fail
from ballast_worker.errors import WorkerError

log = Log(__name__)

POLL_SECONDS = 0.2
START_ATTEMPTS = 3
SLOW_START = "timed out during startup"
"""Part of Ray's message if a node does not start within 30 s, which Ray cannot change. A busy machine needs longer."""

NEEDED = {"gcs_server", "raylet"}
"""The processes of Ray without which no replica stays. Its dashboard is only needed for changes."""
LOOPBACK = ("127.0.0.1", "localhost")


class LocalRay:
    """Ray and Serve, which end with the context. The replica serves its own port, so Serve runs no proxy."""

    dashboard: str
    """The address of Ray's dashboard."""

    def __enter__(self) -> Self:
        _pass_by_proxies()
        _protect_token()
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
        self._is_over = threading.Event()
        node = ray._private.worker._global_node  # noqa: SLF001 - Ray answers no question about its dead processes
        threading.Thread(target=self._watch, args=(node,), name="ray", daemon=True).start()
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        if _status() is not None:
            serve.delete(APPLICATION, _blocking=False)
        while _status() is not None:  # Serve ends a replica that does not drain in time
            time.sleep(POLL_SECONDS)
        serve.shutdown()
        self._is_over.set()
        ray.shutdown()

    def _watch(self, node: Node) -> None:
        """End this process with a sentence if Ray ended, because each call of Ray may then wait indefinitely."""
        while not self._is_over.wait(POLL_SECONDS):
            if ended := [kind for kind, _ in node.dead_processes() if kind in NEEDED]:
                node.kill_all_processes(check_alive=False, allow_graceful=False)
                message = _with_logs(f"Ray ended: its process {ended[0]} is gone")
                os._exit(fail("ballast_serve", message, WorkerError.exit_code))

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


def _pass_by_proxies() -> None:
    """Let the requests to the dashboard reach it, and no proxy of the environment, which would see Ray's token."""
    stated = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if stated != "*":
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(filter(None, (stated, *LOOPBACK)))


def _protect_token() -> None:
    """Let only this user read the token that Ray makes. Ray lets all read it, but keeps the mode of a file."""
    with contextlib.suppress(OSError):  # it is there, or Ray states why it cannot be
        token = Path.home() / ".ray" / "auth_token"
        token.parent.mkdir(parents=True, exist_ok=True)
        token.touch(mode=0o600, exist_ok=False)


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
