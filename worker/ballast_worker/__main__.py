"""`ballast-worker --config FILE`: run one worker."""

from __future__ import annotations

import sys

import ballast_log
from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_worker.command_line import BAD_CONFIG, INTERRUPTED, end_at_sigterm, fail, parser, require
from ballast_worker.errors import WorkerError

NEEDED = ("torch", "numpy", "safetensors", "tokenizers", "jinja2", "starlette", "uvicorn", "httptools",
          "prometheus_client")  # fmt: skip
PROG = "ballast-worker"


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal and return the exit code."""
    end_at_sigterm(PROG)
    options = parser(
        PROG,
        "Serve one model to online requests and offline jobs on this machine.",
        config_help="The worker applies changes of hot fields while it runs.",
    ).parse_args(arguments)
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
        return fail(PROG, str(error), BAD_CONFIG)
    except WorkerError as error:
        return fail(PROG, str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def check_installed() -> None:
    """Raise `MissingWorkerExtra` if a package of the `worker` extra is missing."""
    require(NEEDED, program="The worker", extra="worker")


if __name__ == "__main__":
    sys.exit(main())
