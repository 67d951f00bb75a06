"""The app and the arguments of `vllm serve`, as Ballast needs them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from ballast_api.wildcard import ANY
from ballast_api.worker_config import WorkerConfig
from ballast_openai.item_body import ITEM_URLS, MOST_REQUESTS
from ballast_vllm import configuration
from ballast_vllm.engine_client import EngineTap
from ballast_vllm.settings import stated_in
from ballast_worker import settings
from ballast_worker.errors import NotServed

RENDERING = ("default_chat_template_kwargs", "chat_template_content_format", "exclude_tools_when_tool_choice_none",
             "cohere_format")  # fmt: skip
"""Arguments of vLLM that decide how a chat becomes a prompt, beside the template."""


def check_start(tap: EngineTap, config: WorkerConfig, vllm_config: Any, arguments: Any, num_adapters: int) -> None:
    """Raise `NotServed` if the configuration or vLLM's arguments ask for something that Ballast cannot do.

    `num_adapters`: LoRA adapters that the server has at its start.
    """
    if tap.num_servers > 1:
        raise NotServed(
            f"vLLM runs {tap.num_servers} API server processes, and Ballast supports one: each would have its "
            "own limits and count only its own requests. Remove --api-server-count"
        )
    if stated := stated_in(vllm_config.additional_config):
        raise NotServed(
            f'--additional-config sets {", ".join(sorted(stated))} in "ballast", which Ballast\'s middleware '
            f"overwrites. Remove it, and set the fields in the file that {configuration.FILE_VARIABLE} names"
        )
    if problem := slo_problem(config, tap):
        raise NotServed(problem)
    if config.runtime.api_keys_file is not None and _api_key(arguments):
        raise NotServed(
            "Both vLLM's --api-key (or VLLM_API_KEY) and Ballast's runtime.apiKeysFile are set, and a request has "
            "one key. Remove --api-key"
        )
    if num_adapters and tap.device == "cpu" and (places := vllm_config.lora_config.max_loras) <= num_adapters:
        raise NotServed(
            f"vLLM has {num_adapters} LoRA adapters and --max-loras={places}. On a CPU, it adds the adapter in the "
            f"last place to requests without one, so this place must stay empty. Set --max-loras={num_adapters + 1}"
        )


def limit_requests(tap: EngineTap) -> None:
    """Refuse URLs of media that no option of vLLM admits, the text of a chat that no model reads, and costly formats.

    Without vLLM, as in some tests, do nothing.
    """
    if importlib.util.find_spec("vllm") is not None:
        from ballast_vllm import internals  # noqa: PLC0415 - it imports vLLM

        internals.limit_media()
        internals.limit_templates(tap.most_written)
        internals.limit_formats()


def admit_prompts() -> None:
    """Let vLLM accept as many prompts in a call as an item may have. It reads the variable for each call."""
    os.environ.setdefault("VLLM_MAX_COMPLETION_PROMPTS", str(MOST_REQUESTS))


def slo_problem(config: WorkerConfig, tap: EngineTap) -> str | None:
    """Return a sentence if the configuration has the SLO of another kind of model."""
    if config.slo.latency_milliseconds is None or tap.is_encoder:
        return None
    return (
        "slo.latencyMilliseconds is the SLO of a model that returns vectors or scores, and this model generates "
        "text. Set slo.ttftMilliseconds and slo.tpotMilliseconds, or let vLLM run it as such a model, with "
        "--runner=pooling (engine.vllm.args)"
    )


def slo_warning(config: WorkerConfig, tap: EngineTap) -> str | None:
    """Return a sentence if the model has no SLO of its kind, and gets that of another."""
    if config.slo.latency_milliseconds is not None or not tap.is_encoder:
        return None
    return (
        f"the model returns vectors or scores, so the TTFT of {1000 * (config.slo.seconds('ttft') or 0):g} ms is "
        "promised for the whole answer: set slo.latencyMilliseconds"
    )


def item_scope(app: Any) -> dict[str, Any]:
    """Return the ASGI scope of the requests that the server makes for items."""
    headers = [(b"host", b"ballast"), (b"content-type", b"application/json")]
    if key := _api_key(app.state.args):
        headers.append((b"authorization", b"Bearer " + key.encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "query_string": b"",
        "root_path": "",
        "client": ("ballast", 0),
        "server": ("ballast", 0),
        "app": app,
        "headers": headers,
    }


def item_urls(app: Any) -> tuple[str, ...]:
    """Return the URLs of items that have a route: vLLM adds the routes that its model can serve."""
    known = app.openapi()["paths"]
    return tuple(url for url in ITEM_URLS if "post" in known.get(url, {}))


def address(arguments: Any) -> str:
    """Return the address of the API, as other pods reach it."""
    scheme = "https" if arguments.ssl_keyfile else "http"
    return f"{scheme}://{settings.public_host(arguments.host or ANY)}:{arguments.port}"


def chat_rendering(arguments: Any) -> tuple[str, ...]:
    """Return the arguments that decide the prompt of a chat, with the text of the template if they name a file."""
    template = arguments.chat_template or ""
    with contextlib.suppress(OSError, ValueError):  # the argument is the template itself, or the name of one of vLLM's
        template = Path(template).read_text(encoding="utf-8")
    return (template, *(json.dumps(getattr(arguments, name), sort_keys=True, default=str) for name in RENDERING))


def _api_key(arguments: Any) -> str | None:
    keys: list[str] = [key for key in (arguments.api_key or [os.environ.get("VLLM_API_KEY")]) if key]
    return keys[0] if keys else None
