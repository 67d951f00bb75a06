"""`vllm serve` with the arguments of a worker configuration, in this process.

The importer has checked the version of vLLM: see `ballast_vllm.__main__.check_installed`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]  # vLLM installs it
import uvloop
from pydantic import ValidationError
from vllm import AsyncEngineArgs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import run_server_worker, setup_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
from vllm.logger import configure_logging_from_args
from vllm.platforms import current_platform
from vllm.transformers_utils.config import maybe_override_with_speculators
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.system_utils import decorate_logs
from vllm.v1.kv_cache_interface import is_quantized_kv_cache

from ballast_api.vllm_arguments import refusal
from ballast_api.worker_config import WorkerConfig
from ballast_log import Log
from ballast_vllm import core_failure, shared_memory
from ballast_vllm.arguments import LAUNCHED, NodeRank, serve_arguments
from ballast_vllm.compiler import OFF, missing_compiler
from ballast_vllm.errors import BadArguments, ServerFailed
from ballast_vllm.refusals import check_config
from ballast_vllm.settings import StepLimits
from ballast_worker.command_line import state_signal
from ballast_worker.errors import WorkerError

log = Log(__name__)

FIELD = "engine.vllm.args"
LOG_LEVEL = "VLLM_LOGGING_LEVEL"
LEVELS = ("CRITICAL", "ERROR", "WARNING", "INFO", "DEBUG", "NOTSET")
"""What this variable may be. It comes from `template.env`, and replaces the level of the command line."""
NO_GPU = (
    "vLLM found no GPU, and this build of it needs one. Check the driver and the device plugin of the node. With "
    "NVIDIA's GPU operator, set template.runtimeClassName to nvidia"
)
ANOTHER_MODEL = (
    "config.json in {} names another model to serve, {!r}: the directory has a draft in the format of speculators. "
    "Name the directory or the URI of that model in model.uri. Ballast does not support drafts of this format yet"
)
NO_HUB = (
    "If vLLM needs a file from a hub: it downloads none here, because config.json could name any repository. Fetch it "
    "into the directory of the model, or set the variable HF_HUB_OFFLINE to 0"
)


class ServeParser(FlexibleArgumentParser):  # type: ignore[misc]  # vLLM has no types here
    """vLLM's parser, which raises its sentence instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise `BadArguments`."""
        raise BadArguments(f"{FIELD}: vLLM refuses its arguments: {message}")


def serve(config: WorkerConfig, *, log_level: str, log_format: str, node: NodeRank | None = None) -> None:
    """Serve until a signal. A further node of a model over several nodes only computes.

    Raises:
        BadArguments: vLLM refuses the arguments, or one of `engine.vllm.args` belongs to Ballast.
        UnsupportedVllm: Ballast does not support a setting of vLLM.
        NotServed: a directory has no checkpoint.
        WorkerError: vLLM found no GPU, or did not start.
        ServerFailed: EngineCore ended, and with it the server, which in vLLM itself ends with status 0. Or EngineCore
            hung, or the feeder had ended, before a signal ended the server.
    """
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _end)
    with core_failure.noted() as reason:
        arguments = prepared(config, log_level=log_level, log_format=log_format, node=node)
        try:
            with shared_memory.released():
                _run(arguments)
        except Exception as error:
            if (found := reason()) is None:
                raise
            raise WorkerError(core_failure.NOT_STARTED.format(found)) from error
        failure = getattr(arguments, "ballast_failure", None)
        if failure is not None:
            raise ServerFailed(" ".join(filter(None, (failure, reason()))))


def _end(number: int, _: object) -> None:
    """End this process and its children. `Drain` takes the signals as soon as the server can serve.

    No child may stay: EngineCore does not end before it has loaded the model. A tracker of multiprocessing ends by
    itself, after it has removed the shared memory that the others leave. A container that starts again would keep it.
    """
    state_signal("ballast-vllm", number)
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if not shared_memory.is_tracker(child):
                child.kill()
    shared_memory.release()
    os._exit(128 + number)


def _run(arguments: argparse.Namespace) -> None:
    arguments.model = arguments.model_tag
    if arguments.headless:
        ServeSubcommand.cmd(arguments)
    else:
        uvloop.run(_serve(arguments))


async def _serve(arguments: argparse.Namespace) -> None:
    """Do what vLLM's `run_server` does after it has taken SIGTERM. While EngineCore loads, vLLM loses the signal."""
    decorate_logs("APIServer", skip_if_decorated=True)
    address, listener = setup_server(arguments, reuse_port=False)
    await run_server_worker(address, listener, arguments)


def prepared(
    config: WorkerConfig, *, log_level: str, log_format: str, node: NodeRank | None = None
) -> argparse.Namespace:
    """Return vLLM's arguments, after all checks, and prepare this process for them.

    Raises:
        BadArguments: vLLM refuses the arguments, or one of `engine.vllm.args` belongs to Ballast.
        UnsupportedVllm: Ballast does not support a setting of vLLM.
        NotServed: a directory has no checkpoint.
        WorkerError: vLLM found no GPU.
    """
    cli_env_setup()
    if current_platform.is_unspecified():
        raise WorkerError(NO_GPU)
    if current_platform.is_cpu() and (compiler := missing_compiler()) is not None:
        os.environ[OFF] = "1"  # EngineCore and its ranks are processes that start with it
        log.warning("C++ compiler not found, torch compiles nothing", compiler=compiler, because=f"{OFF}=1 is set")
    logging = {"log_level": _log_level(log_level), "formatter": log_format}
    own = [*serve_arguments(config, node, is_cpu=current_platform.is_cpu()), f"--logging-config={json.dumps(logging)}"]
    arguments = parsed(own, config.engine.vllm.args)
    os.environ[LOG_LEVEL] = logging["log_level"]
    os.environ[LAUNCHED] = "1"
    configure_logging_from_args(arguments)
    found = check(arguments)
    if arguments.max_num_batched_tokens is not None and found.model_config.runner_type != "pooling":
        scheduler = found.scheduler_config
        limits = StepLimits(scheduler.max_num_seqs, scheduler.max_num_batched_tokens, found.num_speculative_tokens)
        if (most := limits.most_filled(config.engine.prefill_chunk_tokens)) < limits.max_step_tokens:
            log.warning(
                "steps stay smaller than --max-num-batched-tokens",
                tokens=limits.max_step_tokens,
                most=most,
                because="engine.prefillChunkTokens limits the prompt tokens of a step",
            )
    return arguments


def _log_level(default: str) -> str:
    """Return the level of the logs. A variable that earlier versions ignored must not keep a worker from its start."""
    stated = (os.environ.get(LOG_LEVEL) or default).upper()
    if stated in LEVELS:
        return stated
    used = default.upper()
    because = f"{LOG_LEVEL} is none of {', '.join(LEVELS)}"
    log.warning("level of the logs not known", found=stated[:40], used=used, because=because)
    return used


def parsed(own: Sequence[str], others: Sequence[str]) -> argparse.Namespace:
    """Return what vLLM's parser makes of the own arguments and of the others.

    Raises:
        BadArguments: the parser refuses them, or the others change something that Ballast decides.
    """
    parser = make_arg_parser(ServeParser(prog="vllm serve"))
    without, arguments = _parse(parser, own), _parse(parser, [*own, *others])
    changed = [name for name, value in vars(arguments).items() if value != getattr(without, name)]
    refused = refusal([name.replace("_", "-") for name in changed])
    if refused is not None:
        raise BadArguments(f"{FIELD} sets {refused}")
    if "load_format" in changed and "dummy" in {without.load_format, arguments.load_format}:
        raise BadArguments(f"{FIELD} sets --load-format: model.loadFormat decides about dummy. Remove the argument")
    try:
        validate_parsed_serve_args(arguments)
    except (TypeError, ValueError) as error:
        raise BadArguments(f"{FIELD}: vLLM refuses its arguments: {error}") from error
    return arguments


def check(arguments: argparse.Namespace) -> Any:
    """Check what vLLM makes of the arguments and of the model's config.json, before it loads anything. Return it.

    Raises:
        BadArguments: vLLM refuses the combination.
        UnsupportedVllm: Ballast does not support it.
    """
    arguments = argparse.Namespace(**vars(arguments))
    arguments.model = arguments.model_tag
    try:
        _check_model(arguments.model)
        config = AsyncEngineArgs.from_cli_args(arguments).create_engine_config(UsageContext.OPENAI_API_SERVER)
    except ValidationError as error:
        sentences = "; ".join(str(problem["msg"]) for problem in error.errors(include_url=False))
        raise BadArguments(f"vLLM refuses the configuration: {sentences}") from error
    except OSError as error:
        if error.errno is not None:  # of the disk or the network. Libraries of a hub raise their sentences without it
            raise
        raise BadArguments(f"vLLM refuses the configuration: {str(error).rstrip('.')}. {NO_HUB}") from error
    except (TypeError, ValueError, NotImplementedError) as error:
        raise BadArguments(f"vLLM refuses the configuration: {error}") from error
    check_config(config)
    if current_platform.is_cpu():
        _check_cpu(arguments, config)
    return config


def _check_model(model: str) -> None:
    """Refuse a directory whose config.json makes vLLM serve another model than that of the directory."""
    served, _, _ = maybe_override_with_speculators(model, tokenizer=None, trust_remote_code=False)
    if served != model:
        raise BadArguments(ANOTHER_MODEL.format(model, served))


def _check_cpu(arguments: argparse.Namespace, config: Any) -> None:
    """Refuse settings that vLLM accepts, and cannot carry out on a CPU."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: PLC0415 - only a CPU needs it

    kv_dtype = config.cache_config.cache_dtype
    known = [name for name in CPUAttentionBackend.supported_kv_cache_dtypes if is_quantized_kv_cache(name)]
    if is_quantized_kv_cache(kv_dtype) and kv_dtype not in known:
        raise BadArguments(
            f"engine.kvDtype: vLLM has no KV cache of this data type ({kv_dtype} in vLLM) on a CPU. Set one of "
            f"{', '.join(known)}, or remove the field"
        )
    num_adapters = len(arguments.lora_modules or ())
    if num_adapters >= arguments.max_loras and arguments.enable_lora:
        raise BadArguments(
            f"{FIELD} sets --max-loras={arguments.max_loras}. On a CPU it must be above the number of adapters, "
            f"{num_adapters}, because vLLM adds the adapter in the last place to requests without one. Remove the "
            "argument"
        )


def _parse(parser: Any, arguments: Sequence[str]) -> argparse.Namespace:
    try:
        found: argparse.Namespace = parser.parse_args(list(arguments))
    except (TypeError, ValueError) as error:
        raise BadArguments(f"{FIELD}: vLLM refuses its arguments: {error}") from error
    except SystemExit as error:
        raise BadArguments(f"{FIELD}: the arguments end vLLM. Remove --help") from error
    return found
