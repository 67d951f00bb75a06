"""`ballast up`: Valkey, a worker and a queue on this machine, until Ctrl-C."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ballast_api.worker_config import WorkerConfig
from ballast_cli.connection import DATA_DIR, PasswordFile, QueueName, Running
from ballast_cli.console import examples, say
from ballast_cli.errors import CliError, NotNow, Usage
from ballast_cli.processes import Signals, Valkey, Worker, require_worker_parts, take_port
from ballast_cli.worker_file import Flags, compose, write

EXAMPLES = examples(
    "ballast up",
    "ballast up --model ~/models/qwen3-0.6b --slots 16 --port 8080",
    "ballast up --config worker.yaml             # its hot sections take effect when the file changes",
    "ballast up --redis-url redis://10.0.0.5:6379",
)
_START_SECONDS = 600
_LOOK_SECONDS = 0.2
_GRACE_SECONDS = 15
"""Beyond the worker's own drain time before it is killed."""

ModelDir = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Checkpoint directory, hf:// or s3://; by default the small model that ships.",
        show_default=False,
    ),
]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="WorkerConfig in YAML; options beat it.", show_default=False)
]
Port = Annotated[
    int | None, typer.Option("--port", min=0, max=65535, help="HTTP port, 0 takes a free one. [default: 8000]")
]
Host = Annotated[str | None, typer.Option("--host", help="HTTP address. [default: 127.0.0.1]")]
Slots = Annotated[
    int | None,
    typer.Option(
        "--slots", min=1, help="Places in the running batch; by default what memory allows.", show_default=False
    ),
]
OwnRedis = Annotated[
    str | None,
    typer.Option(
        "--redis-url", envvar="BALLAST_REDIS_URL", help="Use this Redis instead of an embedded one.", show_default=False
    ),
]
DataDir = Annotated[Path, typer.Option("--data", help="Where Valkey's data, the logs and up.json lie.")]


@dataclass(frozen=True, slots=True)
class _Watched:
    """A user's file, whose changes are passed on to the worker's."""

    file: Path | None
    flags: Flags
    target: Path
    seen: int
    """When the file last changed before it was first read."""

    def changed(self) -> int:
        """When it last changed; 0 without one, or while an editor swaps it."""
        return _changed(self.file)

    def pass_on(self) -> None:
        """Write the worker's file again; a file that cannot be taken changes nothing."""
        try:
            write(compose(self.file, self.flags), self.target)
            say(f"{self.file} changed: passed on to the worker.")
        except Usage as error:
            say(f"{error} The worker keeps the configuration it has.")


def up(
    *,
    model: ModelDir = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    redis_url: OwnRedis = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
    data_dir: DataDir = DATA_DIR,
) -> None:
    """Start Valkey and a worker on this machine; Ctrl-C drains the worker, then stops Valkey."""
    require_worker_parts()
    if running := Running.read(data_dir):
        raise NotNow(
            f"`ballast up` is already running in {data_dir.resolve()} (process {running.pid}, {running.address}): "
            "stop it with Ctrl-C there, or choose another --data directory."
        )
    flags = Flags(model, host, port, slots, redis_url, password_file, queue)
    composed = compose(config, flags)
    runtime = composed.runtime
    free_port = take_port(runtime.host, runtime.port)
    data_dir.mkdir(parents=True, exist_ok=True)
    with Signals() as signals:
        has_own = runtime.redis_url or runtime.redis_url_file
        valkey = None if has_own else Valkey.start(data_dir.resolve() / "valkey")
        try:
            settled = Flags(model, host, free_port, slots, valkey.url if valkey else redis_url, password_file, queue)
            watched = _Watched(config, settled, data_dir / "worker.yaml", _changed(config))
            final = compose(config, settled)
            write(final, watched.target)
            _serve(final, watched, data_dir=data_dir, valkey=valkey, signals=signals)
        finally:
            (data_dir / "up.json").unlink(missing_ok=True)
            if valkey:
                valkey.stop()
    say("Stopped.")


def _serve(config: WorkerConfig, watched: _Watched, *, data_dir: Path, valkey: Valkey | None, signals: Signals) -> None:
    """Run the worker until a signal or a death."""
    runtime = config.runtime
    say(f"Starting the worker with {config.model.uri} ...")
    worker = Worker.start(watched.target, log=data_dir / "worker.log", host=runtime.host, port=runtime.port)
    try:
        if not worker.wait_until_ready(seconds=_START_SECONDS, is_stopped=lambda: signals.received > 0):
            return
        url = _redis_url(config)
        Running(url, config.queue_name, worker.address, os.getpid(), worker.process.pid).write(data_dir)
        _greet(config, worker, url=url, data_dir=data_dir)
        _watch(worker, watched, valkey=valkey, signals=signals)
    finally:
        _stop(worker, drain=runtime.drain_seconds, is_hurried=lambda: signals.received > 1)


def _redis_url(config: WorkerConfig) -> str:
    from ballast_worker.errors import NotServed  # noqa: PLC0415  the worker is an extra
    from ballast_worker.settings import redis_url  # noqa: PLC0415

    try:
        return redis_url(config) or ""
    except NotServed as error:
        raise Usage(f"{error}.") from None


def _changed(file: Path | None) -> int:
    try:
        return file.stat().st_mtime_ns if file else 0
    except OSError:
        return 0


def _watch(worker: Worker, watched: _Watched, *, valkey: Valkey | None, signals: Signals) -> None:
    """Look after both processes until there is a reason to stop."""
    seen = watched.seen
    while not signals.received:
        if not worker.is_running:
            raise CliError(worker.obituary())
        if valkey and not valkey.is_running:
            raise CliError("Valkey ended unasked (its log is valkey/valkey.log in the data directory): stopping.")
        if (now := watched.changed()) not in {seen, 0}:
            seen = now
            watched.pass_on()
        time.sleep(_LOOK_SECONDS)


def _stop(worker: Worker, *, drain: float, is_hurried: Callable[[], bool]) -> None:
    if not worker.is_running:
        return
    say(f"Stopping: the worker gives offline items back and finishes online requests (at most {drain:g} s) ...")
    if not worker.stop(seconds=drain + _GRACE_SECONDS, is_hurried=is_hurried):
        say("The worker did not end by itself and was killed; its leases expire and nothing is lost.")


def _greet(config: WorkerConfig, worker: Worker, *, url: str, data_dir: Path) -> None:
    model = config.model.served_name or Path(config.model.uri).name
    where = "" if data_dir == DATA_DIR else f" --redis-url {url} --queue {config.queue_name}"
    body = f'{{"model": "{model}", "prompt": "Once", "max_tokens": 16}}'
    say(
        f"\nBallast is up.\n"
        f"  API      {worker.address}/v1   (model {model})\n"
        f"  queue    {config.queue_name} in {url}\n"
        f"  logs     {worker.log}\n\n"
        "In another terminal, in this directory:\n"
        f"  curl {worker.address}/v1/completions -H 'Content-Type: application/json' -d '{body}'\n"
        f"  ballast submit items.jsonl --watch{where}\n"
        f"  ballast top{where}\n\n"
        "Ctrl-C stops all of it; jobs and results are kept."
    )
