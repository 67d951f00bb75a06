"""The ASGI app of one worker, for Ballast's own server or any other ASGI server."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig
from ballast_worker.api import routes
from ballast_worker.reload import Loaded, content_hash
from ballast_worker.worker import Worker


def create_app(config: WorkerConfig, *, path: Path | None = None, worker: Worker | None = None) -> Starlette:
    """Return the app that serves one model. Its threads start and stop with the lifespan of the app.

    Args:
        config: the configuration
        path: the file of the configuration, which is watched for changes
        worker: a worker of this configuration; by default a new worker, which loads the model now

    Raises:
        NotServed: the configuration asks for something that this worker cannot do.
        EngineError: the checkpoint or the options of the engine are wrong.
    """
    serving = worker or Worker(load(config, path), path=path)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        serving.start()
        try:
            yield
        finally:
            await serving.stop()

    app = routes(serving, lifespan)
    app.state.worker = serving
    return app


def load(config: WorkerConfig, path: Path | None) -> Loaded:
    """Return the configuration with the hash of its file."""
    text = path.read_text(encoding="utf-8") if path is not None else config.dump()
    return Loaded(config, content_hash(text))
