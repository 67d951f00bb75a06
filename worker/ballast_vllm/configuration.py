"""The configuration of Ballast inside vLLM: a worker configuration file, variables, or both.

`BALLAST_CONFIG` names the file, a `WorkerConfig` as `ballast-worker` reads it. Each field has a variable, too: that of
`slo.ttftMilliseconds` is `BALLAST_SLO_TTFT_MILLISECONDS`. A variable overrides the file. `model.uri` may be left out,
because vLLM knows its model. vLLM's own arguments decide the model, the engine, and the address of the server.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig

FILE_VARIABLE = "BALLAST_CONFIG"
PREFIX = "BALLAST_"
IGNORED = ("model", "engine.attention", "engine.threads", "engine.blockTokens", "engine.quantization",
           "engine.kvDtype", "engine.speculative", "engine.vllm", "engine.kvMemoryMebibytes", "engine.prefixCache",
           "runtime.host", "runtime.port", "runtime.nodes", "runtime.tensorParallel", "runtime.tlsCertFile",
           "runtime.tlsKeyFile")  # fmt: skip
"""Fields without an effect under `vllm serve`: its arguments decide them. `ballast-vllm` makes arguments of them."""


def load(path: Path | None, environment: Mapping[str, str] = os.environ, *, model: str = "vllm") -> WorkerConfig:
    """Return the configuration. `model` is the name of vLLM's model.

    Raises:
        InvalidConfig: the message names each wrong field or variable.
    """
    if path is None:
        return parse("{}", PREFIX + "*", environment, model=model)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), [str(error)]) from error
    return parse(text, str(path), environment, model=model)


def parse(text: str, source: str, environment: Mapping[str, str] = os.environ, *, model: str = "vllm") -> WorkerConfig:
    """Return the configuration from the text of a file; see `load`."""
    data = _yaml(text, source)
    if data is None:
        data = {}
    if not isinstance(data, dict):
        raise InvalidConfig(source, [f"found {type(data).__name__}, expected a mapping"])
    for section, field, value in _overrides(environment):
        place = data if section is None else data.setdefault(section, {})
        if isinstance(place, dict):
            place[field] = value
    stated = data.setdefault("model", {})
    if isinstance(stated, dict):
        stated.setdefault("uri", model)
    try:
        return WorkerConfig.model_validate(data)
    except ValidationError as error:
        raise InvalidConfig(source, InvalidConfig.sentences(error)) from error


def ignored(config: WorkerConfig) -> list[str]:
    """Return the fields that the configuration states and that have no effect inside vLLM."""
    stated = config.model_dump(mode="json", by_alias=True, exclude_unset=True)
    found = []
    for field in IGNORED:
        value: Any = stated
        for part in field.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        if value is not None and value != {"uri": config.model.uri}:
            found.append(field)
    return found


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str | None, str, object]]:
    for section, name, kind in _fields():
        variable = PREFIX + "_".join(filter(None, (section, name))).upper()
        if variable in environment:
            text = environment[variable]
            yield section, to_camel(name), text if _is_text(kind) else _yaml(text, variable)


def _yaml(text: str, source: str) -> Any:
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError for 2026-13-01, which is no date
        raise InvalidConfig(source, [str(error)]) from error


def _fields() -> Iterator[tuple[str | None, str, object]]:
    for name, field in WorkerConfig.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from ((name, inner, found.annotation) for inner, found in kind.model_fields.items())
        else:
            yield None, name, kind


def _is_text(kind: object) -> bool:
    """Return whether a field has text, which stays text if it looks like a number."""
    return kind in {str, Path} or (get_origin(kind) is not tuple and any(_is_text(part) for part in get_args(kind)))
