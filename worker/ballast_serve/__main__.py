"""`python -m ballast_serve --config FILE`: run one worker under Ray Serve on this machine.

It starts a Ray of its own, which ends with this process. `ballast up --ray` runs it. In a cluster, Ray loads
`ballast_serve.application:build` itself. `--show` prints the configuration with which it does.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import yaml

import ballast_log
from ballast_api.errors import InvalidConfig
from ballast_api.serve_config import serve_config
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_worker.__main__ import check_installed
from ballast_worker.errors import MissingWorkerExtra, WorkerError

log = Log(__name__)

BAD_CONFIG = 78
DASHBOARD_SECONDS = "300"
"""Time that the dashboard of Ray has to start. Ray's minute is short on a busy machine."""
POLL_SECONDS = 0.5
"""How often the configuration file is read for changes."""


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal and return the exit code."""
    options = _parse(arguments)
    ballast_log.configure(options.log_level, options.log_format)
    try:
        config = WorkerConfig.load(options.config)
        if options.show:
            document = serve_config(config, config.dump(), replicas=options.replicas, gpus=options.gpus)
            sys.stdout.write(yaml.safe_dump(document, sort_keys=False))
            return 0
        _check_ray()
        if config.backend == "native":
            check_installed()
        _run(config, options.config)
    except InvalidConfig as error:
        return _say(str(error), BAD_CONFIG)
    except WorkerError as error:
        return _say(str(error), error.exit_code)
    return 0


def _run(config: WorkerConfig, path: Path) -> None:
    stopped = threading.Event()
    # Ray reads these when it is imported. Its signal handler writes a stack trace for each SIGTERM.
    os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_FAILURE_SIGNAL_HANDLER": "1"}
    os.environ.setdefault("RAY_DASHBOARD_STARTUP_TIMEOUT_S", DASHBOARD_SECONDS)
    from ballast_serve.local import LocalRay  # noqa: PLC0415

    seen = _modified(path)
    with LocalRay() as ray:
        for number in (signal.SIGTERM, signal.SIGINT):  # Ray has just set its own handler
            signal.signal(number, lambda *_: stopped.set())
        ray.deploy(config, is_stopped=stopped.is_set)
        while not stopped.wait(POLL_SECONDS):
            if (now := _modified(path)) not in {seen, 0}:
                seen = now
                try:
                    ray.deploy(WorkerConfig.load(path), is_stopped=stopped.is_set)
                except InvalidConfig as error:
                    log.warning("invalid configuration file, the old configuration stays in force", because=str(error))


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # an editor may be replacing it
        return 0


def _check_ray() -> None:
    if importlib.util.find_spec("ray") is None or importlib.util.find_spec("ray.serve") is None:
        raise MissingWorkerExtra("Ray Serve is not installed: run `pip install 'ballast[ray]'`")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ballast_serve", description="Serve one model with Ray Serve on this machine."
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="WorkerConfig as YAML. The replicas apply changes of hot fields while they run.",
    )
    parser.add_argument("--show", action="store_true", help="Print the configuration of Serve for a cluster, and end.")
    parser.add_argument("--replicas", type=int, default=1, help="Replicas that --show names.")
    parser.add_argument("--gpus", type=int, default=0, help="GPUs of a replica that --show names.")
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser.parse_args(arguments)


def _say(message: str, exit_code: int) -> int:
    sys.stderr.write(f"ballast_serve: {message}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
