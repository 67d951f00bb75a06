"""The ASGI app of one worker, for Ballast's own server or any other ASGI server."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import AsyncIterator
from pathlib import Path

from starlette.applications import Starlette

from ballast_api.worker_config import WorkerConfig, content_hash
from ballast_worker.api import routes
from ballast_worker.reload import Loaded
from ballast_worker.worker import Worker


def create_app(worker: Worker) -> Starlette:
    """Return the app of a worker. The worker's threads start and stop with the lifespan of the app."""

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        worker.start()
        try:
            yield
        finally:
            await worker.stop()

    app = routes(worker, lifespan)
    app.state.worker = worker
    return app


def freeze_loaded() -> None:
    """Keep what is loaded by now. Otherwise each full collection of garbage would stop the engine for 0.2 s."""
    gc.collect()
    gc.freeze()


def load(config: WorkerConfig, path: Path | None) -> Loaded:
    """Return the configuration with the hash of its file."""
    text = path.read_text(encoding="utf-8") if path is not None else config.dump()
    return Loaded(config, content_hash(text))
