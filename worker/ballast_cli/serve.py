"""`ballast serve`: run a worker in this process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from ballast_cli.connection import DATA_DIR, not_empty
from ballast_cli.console import examples, say
from ballast_cli.data_directory import make_directory
from ballast_cli.processes import require_worker_parts, take_port, worker_command
from ballast_cli.up import ConfigFile, Host, ModelDir, OwnPasswordFile, OwnQueue, Port, Slots
from ballast_cli.worker_file import Flags, compose, serves, write

EXAMPLES = examples(
    "ballast serve --config worker.yaml",
    "ballast serve --model ~/models/llama-3.2-1b --port 8000    # online requests only",
    "ballast serve --model hf://Qwen/Qwen3-0.6B                 # downloaded to ~/.cache/ballast first",
    "ballast serve --redis-url redis://10.0.0.5:6379 --queue research/llama",
)


def serve(
    *,
    config: ConfigFile = None,
    model: ModelDir = None,
    host: Host = None,
    port: Port = None,
    slots: Slots = None,
    redis_url: Annotated[
        str | None,
        typer.Option(
            "--redis-url",
            envvar="BALLAST_REDIS_URL",
            help="Redis of the offline queue. Without it, the worker serves online requests only.",
            show_default=False,
            callback=not_empty,
        ),
    ] = None,
    queue: OwnQueue = None,
    password_file: OwnPasswordFile = None,
) -> None:
    """Run a worker in the foreground.

    The worker writes its log to this terminal. A file, options, or both configure it.
    """
    require_worker_parts()
    flags = Flags(model, host, port, slots, redis_url, password_file, queue)
    composed = compose(config, flags)
    free_port = take_port(composed.runtime.host, composed.runtime.port)
    file = config
    if file is None or flags != Flags() or not serves(file, composed):
        make_directory(DATA_DIR)
        # The port is in the name and in the file, so two workers with free ports never share a file.
        file = DATA_DIR / f"serve-{free_port}.yaml"
        write(compose(config, replace(flags, port=free_port)), file)
        if config is not None:
            say(f"The worker reads {file}, which was made from {config}. Change {file} while the worker runs.")
    command = worker_command(file)
    # The worker replaces this process and has its signals, exit code, and log.
    os.execv(command[0], command)  # noqa: S606  no shell is needed
