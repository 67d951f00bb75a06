"""`ballast-vllm --config FILE`: run `vllm serve` with a worker configuration.

The process computes vLLM's arguments from the configuration, and appends `engine.vllm.args`. vLLM's own parser and
its checks of the configuration see them before anything is loaded. The last line of the output states what is wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from pathlib import Path

import ballast_log
from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_vllm import configuration, versions
from ballast_vllm.arguments import NodeRank
from ballast_vllm.errors import BadArguments, ServerFailed
from ballast_vllm.versions import UnsupportedVllm
from ballast_worker.command_line import BAD_CONFIG, INTERRUPTED, end_at_sigterm, fail, parser, require
from ballast_worker.errors import MissingWorkerExtra, NotServed, WorkerError

NEEDED = ("httpx", "numpy", "prometheus_client")
BAD_ARGUMENTS = 64
PROG = "ballast-vllm"
MOST_SHOWN, MOST_SHOWN_AFTER_START = 1500, 550
"""Bytes of the last line. Kubernetes keeps 2,048 bytes of the output. After a start, Triton (nanobind) adds 1,430."""


def main(arguments: list[str] | None = None) -> int:
    """Run until a signal and return the exit code."""
    end_at_sigterm(PROG)
    options = _parse(arguments)
    ballast_log.configure(options.log_level, options.log_format)
    try:
        stay_offline()
        check_installed()
        config = configuration.load(options.config)
        prepare_config(config, options.config)
        # This import needs the packages that are checked above. vLLM takes seconds to import.
        from ballast_vllm.serve import serve  # noqa: PLC0415

        serve(config, log_level=options.log_level, log_format=options.log_format, node=_node(options))
    except InvalidConfig as error:
        return _say(str(error), BAD_CONFIG)
    except (BadArguments, UnsupportedVllm) as error:
        return _say(str(error), BAD_ARGUMENTS)
    except ServerFailed as error:
        return _say(str(error), error.exit_code, MOST_SHOWN_AFTER_START)
    except WorkerError as error:
        return _say(str(error), error.exit_code)
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def check_installed() -> None:
    """Check the packages, before anything imports vLLM.

    Raises:
        MissingWorkerExtra: vLLM or a package of the `vllm` extra is missing.
        UnsupportedVllm: Ballast does not support the version of vLLM.
    """
    require(NEEDED, program="Ballast inside vLLM", extra="vllm")
    if importlib.util.find_spec("vllm") is None:
        raise MissingWorkerExtra("vLLM is not installed: install it, or use an image of worker/Dockerfile.vllm")
    versions.check_installed()


def stay_offline() -> None:
    """Let vLLM load only files that are there. Call it before anything imports huggingface_hub.

    A model is a directory here. Its config.json may name models of a hub, for which the configuration does not ask.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_config(config: WorkerConfig, path: Path) -> None:
    """Check what needs no vLLM, and set the variables that vLLM and Ballast read in each process."""
    if config.backend != "vllm":
        raise NotServed(f"engine.backend is {config.backend}: start `ballast-worker`, or set engine.backend to vllm")
    from ballast_worker.settings import api_keys  # noqa: PLC0415 - it needs numpy

    api_keys(config)
    os.environ[configuration.FILE_VARIABLE] = str(path)
    if config.engine.threads:
        os.environ.setdefault("OMP_NUM_THREADS", str(config.engine.threads))
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    found = parser(
        PROG,
        "Serve one model with vLLM and Ballast's scheduler.",
        config_help="engine.backend is vllm. The server applies changes of hot fields while it runs.",
    )
    found.add_argument("--node-rank", type=int, help="Rank of this node, if the model spans several nodes.")
    found.add_argument("--master", help="host:port of the node with rank 0, at which the ranks find each other.")
    return found.parse_args(arguments)


def _node(options: argparse.Namespace) -> NodeRank | None:
    if options.node_rank is None:
        return None
    host, _, port = (options.master or "").rpartition(":")
    if not host or not port.isdigit():
        raise BadArguments(f"--master is {options.master}, but --node-rank needs host:port of the node with rank 0.")
    return NodeRank(options.node_rank, host, int(port))


def _say(message: str, exit_code: int, most: int = MOST_SHOWN) -> int:
    shown = " ".join(message.split()).encode(errors="backslashreplace")[:most].decode(errors="ignore")
    return fail(PROG, shown, exit_code)


if __name__ == "__main__":
    sys.exit(main())
