"""`python -m ballast_serve --config FILE`: run one worker under Ray Serve on this machine.

It starts a Ray of its own, which ends with this process. `ballast up --ray` runs it. In a cluster, Ray loads
`ballast_serve.application:build` itself. `--show` prints the configuration with which it does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import sys
import threading
from pathlib import Path

import yaml

import ballast_log
from ballast_api.errors import InvalidConfig
from ballast_api.hot import with_hot_fields
from ballast_api.serve_config import APPLICATION, serve_config
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_worker.__main__ import check_installed
from ballast_worker.command_line import BAD_CONFIG, fail, parser
from ballast_worker.errors import MissingWorkerExtra, NotServed, WorkerError
from ballast_worker.reload import Stamp, stamp

log = Log(__name__)

DASHBOARD_SECONDS = "300"
"""Time that the dashboard of Ray has to start. Ray's minute is short on a busy machine."""
POLL_SECONDS = 0.5
"""How often the configuration file is read for changes."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal and return the exit code."""
    options = _parse(arguments)
    ballast_log.configure(options.log_level, options.log_format)
    try:
        seen = stamp(options.config)  # before the file is read, so that each later change is seen
        config = WorkerConfig.load(options.config)
        if options.show:
            gpus = _gpus(config, options.gpus)
            replicas, name = options.replicas or 1, options.name or APPLICATION
            document = serve_config(config, config.dump(), replicas=replicas, gpus=gpus, name=name)
            return _show(yaml.safe_dump(document, sort_keys=False))
        if config.runtime.nodes > 1:
            raise NotServed(
                f"runtime.nodes is {config.runtime.nodes}, and the Ray of this program has one node. Print the "
                "configuration of Serve for a cluster with --show, or set runtime.nodes to 1"
            )
        _find_ray()
        if config.backend == "native":
            check_installed()
        _run(config, options.config, seen)
    except InvalidConfig as error:
        return fail("ballast_serve", str(error), BAD_CONFIG)
    except WorkerError as error:
        return fail("ballast_serve", str(error), error.exit_code)
    return 0


def _show(text: str) -> int:
    """Print a text, and return the exit code."""
    because = "standard output is closed"
    if sys.stdout is not None:
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise the interpreter reports the failure once more
            because = error.strerror or str(error)
        else:
            return 0
    return fail("ballast_serve", f"Cannot print the configuration ({because})", 1)


def _run(config: WorkerConfig, path: Path, seen: Stamp | None) -> None:
    stopped = threading.Event()
    from ballast_serve.local import LocalRay  # noqa: PLC0415

    with LocalRay() as ray:
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set its own handler
            signal.signal(number, lambda *_: stopped.set())
        ray.deploy(config, config.dump(), is_stopped=stopped.is_set)
        while not stopped.wait(POLL_SECONDS):
            if (now := stamp(path)) not in {seen, None}:
                seen = now
                try:
                    wanted = WorkerConfig.load(path)
                except InvalidConfig as error:
                    log.warning("invalid configuration file, the old configuration stays in force", because=str(error))
                    continue
                try:  # the replica names the fields that wait for a restart, as a plain worker does
                    ray.deploy(with_hot_fields(config, wanted), wanted.dump(), is_stopped=stopped.is_set)
                except WorkerError as error:
                    log.warning("the old configuration stays in force, change the file again", because=str(error))


def _find_ray() -> None:
    # Ray reads these when it is imported, and to look for a part of it imports it. Its signal handler writes a stack
    # trace for each SIGTERM, it would run the replica with the niceness 15, and end it if 95 % of the memory is used.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", DASHBOARD_SECONDS)
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise MissingWorkerExtra("Ray Serve is not installed: run `pip install 'ballast[ray]'`")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    found = parser(
        "python -m ballast_serve",
        "Serve one model with Ray Serve on this machine.",
        config_help="The replicas apply changes of hot fields while they run.",
    )
    found.add_argument("--show", action="store_true", help="Print the configuration of Serve for a cluster, and end.")
    found.add_argument("--replicas", type=_count, help="Replicas that --show names. By default 1.")
    found.add_argument(
        "--name",
        type=_name,
        help="Name of the application that --show names, such as llama, and its path behind a proxy of Serve, /llama. "
        f"By default {APPLICATION}, with the path /.",
    )
    found.add_argument(
        "--gpus",
        type=int,
        help="GPUs of a replica on each of its nodes that --show names. By default, those of runtime.tensorParallel "
        "with vLLM, and none with the native engine.",
    )
    options = found.parse_args(arguments)
    if not options.show and any(each is not None for each in (options.replicas, options.gpus, options.name)):
        found.error(
            "--replicas, --gpus and --name belong to --show: on this machine, one replica uses the GPUs that Ray finds"
        )
    return options


def _count(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(
            f"found {text}, expected a whole number: a deployment has at least one replica"
        )
    return int(text)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"found {text}, expected lower-case letters, digits and hyphens")
    return text


def _gpus(config: WorkerConfig, stated: int | None) -> int:
    """Return the GPUs of a replica on each of its nodes. A stated 0 means vLLM on CPUs.

    Raises:
        NotServed: the engine would leave GPUs idle, or have too few.
    """
    runtime = config.runtime
    used = runtime.tensor_parallel // runtime.nodes if config.backend == "vllm" else 0
    if stated is None:
        return used
    if stated in {0, used}:
        return stated
    if config.backend == "native":
        because = "the native engine runs on CPUs. Set engine.backend to vllm, or leave --gpus out"
    else:
        because = f"a replica uses {used} on each node: runtime.tensorParallel is {runtime.tensor_parallel}"
        because += f", and runtime.nodes is {runtime.nodes}. Leave --gpus out, or change the fields"
    raise NotServed(f"--gpus is {stated}, and {because}")


if __name__ == "__main__":
    sys.exit(main())
