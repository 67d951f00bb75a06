"""What is looked at before torch is imported and the model is loaded, so that a mistake is told in a second."""

from __future__ import annotations

import contextlib
import socket

from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_queue.errors import InvalidSubmission, QueueError
from ballast_queue.redis_store import Queue
from ballast_worker.errors import AddressTaken, NotServed
from ballast_worker.settings import model_directory, redis_password, redis_url
from ballast_worker.tenancy import ApiKeys

log = Log(__name__)


def prepare(config: WorkerConfig) -> socket.socket:
    """Check what can be checked, and take the address.

    Raises:
        NotServed: the configuration asks for what this worker cannot do.
        AddressTaken: another process listens there.
    """
    model_directory(config)
    if config.runtime.api_keys_file is not None:
        ApiKeys.load(config.runtime.api_keys_file)
    _check_queue(config)
    return listen(config)


def listen(config: WorkerConfig) -> socket.socket:
    """Take the address.

    Raises:
        AddressTaken: says what to do.
    """
    host, port = config.runtime.host, config.runtime.port
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with contextlib.ExitStack() as on_error:
            taken = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(address)
            # At once, though nobody accepts before the model is loaded: two that are only bound may share an address.
            taken.listen()
            on_error.pop_all()
    except OSError as error:
        raise AddressTaken(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Stop what listens there, or set "
            "runtime.port to another port (0 takes a free one)."
        ) from error
    return taken


def _check_queue(config: WorkerConfig) -> None:
    """Say what is wrong with Redis. Only a wrong address ends the start: online requests are served without Redis."""
    password = redis_password(config)
    url = redis_url(config)
    if url is None:
        return
    try:
        queue = Queue.connect(url, config.queue_name, password=password)
        problems = queue.check_server()
        queue.close()
    except InvalidSubmission as error:
        raise NotServed(f"runtime.redisUrl: {error}") from error
    except QueueError as error:
        log.warning("no queue yet; online requests are served, offline work waits for it", because=str(error))
        return
    for problem in problems:
        log.warning("redis", problem=problem)
