"""`ballast-worker --config FILE`: run one worker."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import ballast_log
from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_worker.errors import MissingWorkerExtra, WorkerError

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn", "httptools",
          "prometheus_client")  # fmt: skip
BAD_CONFIG = 78
INTERRUPTED = 130


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal and return the exit code."""
    options = _parse(arguments)
    ballast_log.configure(options.log_level, options.log_format)
    try:
        check_installed()
        config = WorkerConfig.load(options.config)
        # These imports need the `worker` extra, which is checked above. The second import takes seconds.
        from ballast_worker.preflight import prepare  # noqa: PLC0415

        with prepare(config) as listener:
            from ballast_worker.process import run  # noqa: PLC0415

            run(config, options.config, listener)
    except InvalidConfig as error:
        return _say(str(error), BAD_CONFIG)
    except WorkerError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def check_installed() -> None:
    """Raise `MissingWorkerExtra` if a package of the `worker` extra is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingWorkerExtra(
            f"The worker needs {', '.join(missing)}, which is not installed: run `pip install 'ballast[worker]'`"
        )


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ballast-worker", description="Serve one model to online requests and offline jobs on this machine."
    )
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help="WorkerConfig as YAML. The worker applies changes of hot fields while it runs.",
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser.parse_args(arguments)


def _say(message: str, exit_code: int) -> int:
    sys.stderr.write(f"ballast-worker: {message}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
