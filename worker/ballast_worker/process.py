"""One worker as a process: take the address, look at Redis, load the model, serve, drain, end."""

from __future__ import annotations

import asyncio
from pathlib import Path

import uvloop

from ballast_api.worker_config import WorkerConfig
from ballast_engine.errors import EngineError
from ballast_queue.errors import InvalidSubmission, QueueError
from ballast_queue.redis_store import Queue
from ballast_worker.app import Process, create_app, listen, load
from ballast_worker.errors import NotServed
from ballast_worker.log import Log
from ballast_worker.settings import redis_password
from ballast_worker.worker import Worker

log = Log(__name__)


def run(config: WorkerConfig, path: Path | None) -> None:
    """Serve until a signal.

    Raises:
        WorkerError: why it could not start.
    """
    listener = listen(config)
    check_queue(config)
    try:
        worker = Worker(load(config, path), path=path)
    except EngineError as error:
        raise NotServed(str(error)) from error
    app = create_app(config, worker=worker)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(Process(worker, app, listener).serve())


def check_queue(config: WorkerConfig) -> None:
    """Say what is wrong with Redis. Only a wrong address ends the start: online requests are served without Redis.

    Raises:
        NotServed: the address or the queue's name is malformed.
    """
    url = config.runtime.redis_url
    if url is None:
        return
    try:
        queue = Queue.connect(url, config.queue_name, password=redis_password(config))
        problems = queue.check_server()
        queue.close()
    except InvalidSubmission as error:
        raise NotServed(f"runtime.redisUrl: {error}") from error
    except QueueError as error:
        log.warning("no queue yet; online requests are served, offline work waits for it", because=str(error))
        return
    for problem in problems:
        log.warning("redis", problem=problem)
