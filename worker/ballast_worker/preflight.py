"""Checks before torch is imported and the model is loaded, so that a mistake is reported within a second."""

from __future__ import annotations

import contextlib
import socket

from ballast_api.wildcard import ANY_OF_BOTH_FAMILIES
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_queue.errors import InvalidSubmission, QueueError
from ballast_queue.redis_store import Queue
from ballast_worker.errors import AddressTaken, NotServed
from ballast_worker.settings import listening_host, model_directory, redis_address
from ballast_worker.tenancy import ApiKeys

log = Log(__name__)


def prepare(config: WorkerConfig) -> socket.socket:
    """Check the configuration and bind the address.

    Raises:
        NotServed: the configuration asks for something that this worker cannot do.
        AddressTaken: another process listens on the address.
    """
    if config.backend != "native":
        raise NotServed(
            f"engine.backend is {config.backend}, and `ballast-worker` runs native. For vllm, start `ballast-vllm` in "
            "an environment with vLLM and `pip install 'ballast[vllm]'`. Or set engine.backend to native"
        )
    if config.slo.latency_milliseconds is not None:
        raise NotServed(
            "slo.latencyMilliseconds is the SLO of a model that returns vectors or scores, and the native engine only "
            "generates text. Set slo.ttftMilliseconds and slo.tpotMilliseconds, or engine.backend to vllm"
        )
    model_directory(config)
    if config.runtime.api_keys_file is not None:
        ApiKeys.load(config.runtime.api_keys_file)
    check_queue(config)
    return listen(config)


def listen(config: WorkerConfig) -> socket.socket:
    """Bind the address and listen.

    Raises:
        AddressTaken: the message states what to do.
    """
    return _bind(listening_host(config), config.runtime.port, "port")


def listen_for_metrics(config: WorkerConfig) -> socket.socket | None:
    """Bind the address of the metrics port, if there is one; see `listen`."""
    port = config.runtime.metrics_port
    return None if port is None else _bind(listening_host(config), port, "metricsPort")


def _bind(host: str, port: int, field: str) -> socket.socket:
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with contextlib.ExitStack() as on_error:
            taken = on_error.enter_context(socket.socket(family, socket.SOCK_STREAM))
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if host == ANY_OF_BOTH_FAMILIES:
                taken.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # whatever the default of the node is
            taken.bind(address)
            # Listen before the model is loaded: two sockets that are only bound may share an address.
            taken.listen()
            on_error.pop_all()
    except OSError as error:
        raise AddressTaken(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Stop the process that listens there, or set "
            f"runtime.{field} to another port (0 uses a free port)."
        ) from error
    return taken


def check_queue(config: WorkerConfig) -> None:
    """Log the problems of Redis, if there is a queue. Online requests do not need Redis, so they are no errors.

    Raises:
        NotServed: the address is wrong, or a file of the password or the authority cannot be read.
    """
    url, password, ca = redis_address(config)
    if url is None:
        return
    try:
        queue = Queue.connect(url, config.queue_name, password=password, ca=ca)
        problems = queue.check_server()
        queue.close()
    except InvalidSubmission as error:
        raise NotServed(f"runtime.redisUrl: {error}") from error
    except QueueError as error:
        log.warning("queue is unavailable, only online requests are served", because=str(error))
        return
    for problem in problems:
        log.warning("redis configuration", warning=problem)
