"""A replica: the engine, its feeder and its HTTP server in one actor.

The configuration arrives as `user_config`, first when the replica starts, then when it changes. The replica keeps it in
a file of its own, which the worker watches as everywhere: a change of hot fields needs no restart.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

import ballast_log
from ballast_log import Log
from ballast_serve import leave
from ballast_serve.served import Served, serving
from ballast_worker.errors import NotServed, Refused
from ballast_worker.http_exchange import HttpExchange

log = Log(__name__)

IN_POD = "BALLAST_RAY_POD"
"""Variable of the pods of the operator."""
DIRECTORY = "ballast-replica-"
"""The directory of a replica has this name, with the id of its process."""
CONFIG = "config"
"""The key of `user_config`."""


class ServeReplica:
    """The class of the deployment."""

    def __init__(self) -> None:
        ballast_log.configure("info", "text")
        self._stack = contextlib.AsyncExitStack()
        if IN_POD in os.environ:
            _remove_left_directories()
        prefix = f"{DIRECTORY}{os.getpid()}-"
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix=prefix))
        self._path = Path(directory) / "worker.yaml"
        self.served: Served | None = None
        """The worker; None until the first configuration."""
        self._is_left = False
        self._leaving: asyncio.Task[None] | None = None
        self._end: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app that Serve calls."""
        return Ingress(self)

    async def reconfigure(self, user_config: dict[str, str]) -> None:
        """Start the worker with the configuration, YAML at the key `config`, or pass a changed one to it.

        Raises:
            InvalidConfig: the message names each wrong field.
            WorkerError: the configuration asks for something that this replica cannot do.
        """
        if self._is_left:
            return  # an error would make Serve start another replica in a pod that ends
        if self.served is not None:
            self._write(user_config)
            return
        try:
            self._write(user_config)
            self.served = await self._stack.enter_async_context(serving(self._path))
            if IN_POD in os.environ:
                _watch_for_the_end_of_the_pod()
                self._leaving = asyncio.create_task(self._leave_when_asked())
        except BaseException:
            await self._stack.aclose()  # Ray kills this process, and would leave the directory
            raise

    def _write(self, user_config: dict[str, str]) -> None:
        if CONFIG not in user_config:
            raise NotServed(
                f"user_config of the deployment has no key {CONFIG!r}, expected the configuration of a worker. "
                "`python -m ballast_serve --config FILE --show` prints it"
            )
        part = self._path.with_suffix(".part")
        part.write_text(user_config[CONFIG], encoding="utf-8")
        part.replace(self._path)

    def check_health(self) -> None:
        """Raise an error if only a restart helps. Serve then starts another replica."""
        failure = None if self.served is None or self._is_left else self.served.failure()
        if failure is not None:
            raise RuntimeError(failure)

    async def stop(self) -> None:
        """Drain and stop the worker. Serve and the end of the pod may both ask for it."""
        if self._end is None:
            self._end = asyncio.create_task(self._stop())
        await asyncio.shield(self._end)

    async def _stop(self) -> None:
        try:
            await self._stack.aclose()
        except Exception:  # the process ends, and its leases expire
            log.exception("the replica did not drain, leases of offline items expire")
        if self._leaving is not None:
            leave.drained()

    async def _leave_when_asked(self) -> None:
        """Drain before Kubernetes ends the pod; see `leave`. The replica stays until then, and refuses requests."""
        asked = leave.directory() / leave.ASKED
        while not asked.exists():  # noqa: ASYNC110 - a program in another process makes the file
            await asyncio.sleep(leave.POLL_SECONDS)
        self._is_left = True
        await self.stop()


def _remove_left_directories() -> None:
    """Remove the directories of replicas that were killed. All processes that use them are in this pod."""
    for each in Path(tempfile.gettempdir()).glob(f"{DIRECTORY}*"):
        if not Path("/proc", each.name.removeprefix(DIRECTORY).partition("-")[0]).exists():
            shutil.rmtree(each, ignore_errors=True)


def _watch_for_the_end_of_the_pod() -> None:
    try:
        leave.watch_for()
    except OSError as error:
        raise NotServed(
            f"{IN_POD} is set, so the pod drains its replica by files in {leave.directory()}, which cannot be written "
            f"({error.strerror}). Set HOME to a directory that can be written"
        ) from error


class Ingress:
    """The app that a proxy of Serve calls: the app of the worker, once it runs."""

    def __init__(self, replica: ServeReplica) -> None:
        self._replica = replica

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or follow the lifespan, which ends after the last request of a proxy."""
        served = self._replica.served
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.complete"})
            await receive()
            await self._replica.stop()
            await send({"type": "lifespan.shutdown.complete"})
        elif served is None:
            refused = Refused(503, "The replica is starting.", code="starting", kind="server_error")
            await HttpExchange(scope, receive, send).refuse(refused)
        else:
            await served.app(scope, receive, send)
