"""`ballast serve`: a worker alone, in this process."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer

from ballast_cli.connection import DATA_DIR, PasswordFile, QueueName
from ballast_cli.console import examples, say
from ballast_cli.processes import require_worker_parts, take_port, worker_command
from ballast_cli.up import ConfigFile, Host, ModelDir, Port, Slots
from ballast_cli.worker_file import Flags, compose, serves, write

EXAMPLES = examples(
    "ballast serve --config worker.yaml",
    "ballast serve --model ~/models/llama-3.2-1b --port 8000    # online requests only",
    "ballast serve --model hf://Qwen/Qwen3-0.6B                 # fetched first, kept in ~/.cache/ballast",
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
            help="Redis to take offline work from; without it the worker serves online requests only.",
            show_default=False,
        ),
    ] = None,
    queue: QueueName = None,
    password_file: PasswordFile = None,
) -> None:
    """Run a worker alone, its log on this terminal, from a file or from options."""
    require_worker_parts()
    flags = Flags(model, host, port, slots, redis_url, password_file, queue)
    composed = compose(config, flags)
    free_port = take_port(composed.runtime.host, composed.runtime.port)
    file = config
    if file is None or flags != Flags() or not serves(file, composed):
        DATA_DIR.mkdir(exist_ok=True)
        # With the port it got in its name and inside, so that two that take free ones share no file.
        file = DATA_DIR / f"serve-{free_port}.yaml"
        write(compose(config, replace(flags, port=free_port)), file)
        if config is not None:
            say(f"The worker reads {file}, made from {config}: it is the one to change while it runs.")
    command = worker_command(file)
    # This process becomes the worker: signals, exit code and log are its own.
    os.execv(command[0], command)  # noqa: S606  no shell is what is wanted
