"""`ballast up`: run Valkey and a worker on this machine until Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ballast_api.worker_config import WorkerConfig
from ballast_cli.connection import DATA_DIR, DEFAULT_QUEUE, Place, Running, not_empty
from ballast_cli.console import examples, say
from ballast_cli.data_directory import held, in_use, is_held, make_directory
from ballast_cli.errors import CliError, NotNow, Usage
from ballast_cli.processes import (
    Signals,
    Valkey,
    WorkerProcess,
    address_of,
    require_worker_parts,
    take_port,
    worker_command,
)
from ballast_cli.worker_file import Flags, compose, write
from ballast_queue.errors import QueueError
from ballast_worker.reload import Stamp, stamp

EXAMPLES = examples(
    "ballast up",
    "ballast up --model ~/models/qwen3-0.6b --slots 16 --port 8080",
    "ballast up --config worker.yaml                # applies changes of hot fields while it runs",
    "ballast up --redis-url redis://10.0.0.5:6379   # your own Redis instead of the embedded Valkey",
    "ballast up --ray                               # the worker is a replica of Ray Serve",
)
_START_SECONDS = 600
_POLL_SECONDS = 0.2
_GRACE_SECONDS = 15
"""Seconds after the worker's drain time until it is killed."""
_RAY_GRACE_SECONDS = 45
"""Further seconds for Serve and Ray to end."""

ModelDir = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Checkpoint directory, hf:// or s3:// URI. By default, the small model that ships with Ballast.",
        show_default=False,
        callback=not_empty,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="WorkerConfig in YAML. Options override it.", show_default=False)
]
Port = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="HTTP port, by default 8000. 0 picks a free one.")
]
Host = Annotated[str | None, typer.Option("--host", help="HTTP address, by default 127.0.0.1.")]
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots", min=1, help="Slots of the running batch. By default, as many as memory allows.", show_default=False
    ),
]
OwnRedis = Annotated[
    str | None,
    typer.Option(
        "--redis-url",
        envvar="BALLAST_REDIS_URL",
        help="Use this Redis instead of an embedded one.",
        show_default=False,
        callback=not_empty,
    ),
]
OwnQueue = Annotated[
    str | None,
    typer.Option(
        "--queue",
        envvar="BALLAST_QUEUE",
        help="Queue (namespace/name). By default, offline.queue of the file, otherwise its runtime.namespace and "
        f"runtime.name ({DEFAULT_QUEUE}).",
        show_default=False,
        callback=not_empty,
    ),
]
OwnPasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--redis-password-file",
        envvar="BALLAST_REDIS_PASSWORD_FILE",
        help="File with the Redis password. By default, runtime.redisPasswordFile of the file. BALLAST_REDIS_PASSWORD "
        "has no effect here.",
        show_default=False,
    ),
]
OnRay = Annotated[
    bool, typer.Option("--ray", help="Run the worker as a replica of Ray Serve, on a Ray of this command.")
]
DataDir = Annotated[
    str,  # Path("") is the current directory
    typer.Option(
        "--data", metavar="<path>", help="Directory of Valkey's data, the logs, and up.json.", callback=not_empty
    ),
]


@dataclass(slots=True)
class _Watched:
    """The user's configuration file. Its changes are applied to the worker's file."""

    file: Path | None
    flags: Flags
    target: Path
    seen: Stamp | None
    """The file before the first read."""
    config: WorkerConfig
    """The content of the worker's file."""

    def apply(self) -> None:
        """Write the worker's file again. An invalid file changes nothing, and neither does another remote model."""
        try:
            config = compose(self.file, self.flags, downloads=False)
            write(config, self.target)
        except (CliError, OSError) as error:
            say(f"{error} The worker keeps its current configuration.")
        else:
            self.config = config
            say(f"{self.file} changed. The new configuration was passed to the worker.")


def up(
    *,
    model: ModelDir = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    redis_url: OwnRedis = None,
    queue: OwnQueue = None,
    password_file: OwnPasswordFile = None,
    ray: OnRay = False,
    data: DataDir = str(DATA_DIR),
) -> None:
    """Start Valkey and a worker on this machine.

    Ctrl-C drains the worker, then stops Valkey. Jobs and results are kept.
    """
    data_dir = Path(data)
    target = data_dir / "worker.yaml"
    if config and os.path.realpath(config) == os.path.realpath(target):  # Path.resolve fails at a loop of links
        raise Usage(f"--config: `ballast up` writes {target} itself. Name a copy of it, or another --data.")
    require_worker_parts(ray=ray)
    if is_held(data_dir):
        raise NotNow(in_use(data_dir))
    flags = Flags(model, host, port, slots, redis_url, password_file, queue)
    runtime = compose(config, flags).runtime
    free_port = take_port(runtime.host, runtime.port)
    make_directory(data_dir)
    with held(data_dir), Signals() as signals:
        has_own = runtime.redis_url or runtime.redis_url_file
        valkey = None if has_own else Valkey.start(data_dir.resolve() / "valkey")
        try:
            settled = Flags(model, host, free_port, slots, valkey.url if valkey else redis_url, password_file, queue)
            seen = stamp(config) if config else None
            watched = _Watched(config, settled, target, seen, compose(config, settled))
            write(watched.config, watched.target)
            _serve(watched, data_dir=data_dir, valkey=valkey, signals=signals, ray=ray)
        finally:
            (data_dir / "up.json").unlink(missing_ok=True)
            if valkey:
                valkey.stop()
    say("Stopped.")


def _serve(watched: _Watched, *, data_dir: Path, valkey: Valkey | None, signals: Signals, ray: bool) -> None:
    """Run the worker until a signal arrives or a process ends."""
    config = watched.config
    runtime = config.runtime
    url, password, ca = _redis(config)
    _load_functions(config, url, password, ca)
    say(f"Starting the worker with {config.model.uri} ...")
    command = worker_command(watched.target, ray=ray)
    address = address_of(runtime.host, runtime.port, is_tls=runtime.tls_cert_file is not None)
    worker = WorkerProcess.start(command, log=data_dir / "worker.log", address=address)
    try:
        if not worker.wait_until_ready(seconds=_START_SECONDS, is_stopped=lambda: signals.received > 0):
            return
        Running(url, config.queue_name, worker.address, os.getpid(), worker.process.pid).write(data_dir)
        _greet(config, worker, url=url, data_dir=data_dir)
        _watch(worker, watched, valkey=valkey, signals=signals)
    finally:
        grace = _GRACE_SECONDS + (_RAY_GRACE_SECONDS if ray else 0)
        runtime = watched.config.runtime  # the times are hot
        drain = runtime.unready_seconds + runtime.drain_seconds
        _stop(worker, drain=drain, grace=grace, is_hurried=lambda: signals.received > 1)


def _load_functions(config: WorkerConfig, url: str, password: str | None, ca: str | None) -> None:
    """Load the function library of the queue. A failure is a message: the worker serves online requests without it."""
    from ballast_queue.redis_store import Queue  # noqa: PLC0415  `ballast --help` works without redis

    try:
        Queue.connect(url, config.queue_name, password=password, ca=ca, loads_functions=True).close()
    except QueueError as error:
        say(f"{error}. Offline work waits.")


def _redis(config: WorkerConfig) -> tuple[str, str | None, str | None]:
    """Return the URL, the password and the authorities of Redis."""
    from ballast_worker.errors import NotServed  # noqa: PLC0415  the worker is an extra
    from ballast_worker.settings import redis_address  # noqa: PLC0415

    try:
        url, password, ca = redis_address(config)
    except NotServed as error:
        raise Usage(f"{error}.") from None
    return url or "", password, ca


def _watch(worker: WorkerProcess, watched: _Watched, *, valkey: Valkey | None, signals: Signals) -> None:
    """Watch both processes and the file until there is a reason to stop."""
    seen = watched.seen
    while not signals.received:
        if not worker.is_running:
            raise CliError(worker.exit_message())
        if valkey and not valkey.is_running:
            raise CliError("Valkey stopped unexpectedly. Its log is valkey/valkey.log in the data directory.")
        if watched.file is not None and (now := stamp(watched.file)) not in {seen, None}:
            seen = now
            watched.apply()
        time.sleep(_POLL_SECONDS)


def _stop(worker: WorkerProcess, *, drain: float, grace: float, is_hurried: Callable[[], bool]) -> None:
    if not worker.is_running:
        return
    say(f"Stopping. The worker returns offline items, and finishes online requests (at most {drain:g} s) ...")
    if not worker.stop(seconds=drain + grace, is_hurried=is_hurried):
        say("The worker did not stop in time and was killed. Its leases expire, and no item is lost.")


def _greet(config: WorkerConfig, worker: WorkerProcess, *, url: str, data_dir: Path) -> None:
    model = config.model.served_name or Path(config.model.uri).name
    shown = Place(url, config.queue_name).shown_url
    where = "" if data_dir == DATA_DIR else f" --redis-url {shown} --queue {config.queue_name}"
    body = f'{{"model": "{model}", "prompt": "Once", "max_tokens": 16}}'
    say(
        f"\nBallast is up.\n"
        f"  API      {worker.address}/v1   (model {model})\n"
        f"  queue    {config.queue_name} in {shown}\n"
        f"  logs     {worker.log}\n\n"
        "In another terminal, in this directory:\n"
        f"  curl {worker.address}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  ballast submit items.jsonl --watch{where}\n"
        f"  ballast top{where}\n\n"
        "Ctrl-C stops everything. Jobs and results are kept."
    )
