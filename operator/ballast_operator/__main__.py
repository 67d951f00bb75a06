"""`ballast-operator`: run the operator. Settings are environment variables; see docs/reference/operator.md."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import logging
import os
import sys

import ballast_log
from ballast_operator.errors import BadSetting, MissingExtra

NEEDED = ("kopf", "kubernetes", "aiohttp", "prometheus_client")
BAD_SETTING = 78
MISSING = 69


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal, and end the process. Return the exit code if it cannot start."""
    options = _parse(arguments)
    ballast_log.configure(options.log_level, options.log_format)
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)  # it logs a line for each event
    try:
        check_installed()
        # These modules need the `operator` extra, which `check_installed` found.
        from ballast_operator.process import run  # noqa: PLC0415
        from ballast_operator.settings import OperatorSettings  # noqa: PLC0415

        exit_code = asyncio.run(run(OperatorSettings.read(os.environ)))
    except MissingExtra as error:
        return _fail(str(error), MISSING)
    except BadSetting as error:
        return _fail(str(error), BAD_SETTING)
    # Python would wait for the polls of a Redis that answers slowly. They have nothing to finish.
    logging.shutdown()
    os._exit(exit_code)


def check_installed() -> None:
    """Raise `MissingExtra` if a package of the `operator` extra is missing."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtra(f"The operator needs {', '.join(missing)}. Run `pip install 'ballast[operator]'`")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ballast-operator", description="Make the cluster match its InferenceDeployments."
    )
    parser.add_argument("--log-format", choices=("text", "json"), default="text")
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser.parse_args(arguments)


def _fail(message: str, exit_code: int) -> int:
    sys.stderr.write(f"ballast-operator: {message}\n")
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
