"""Makes the configuration of a worker for `up`, `serve`, and `demo` from a file and options."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from pydantic import ValidationError

from ballast_api.errors import InvalidConfig
from ballast_api.worker_config import WorkerConfig
from ballast_cli.data_directory import write_private
from ballast_cli.errors import Usage
from ballast_cli.fetch.location import Location, parse
from ballast_cli.fetch.verb import fetch_model

DEMO_MODEL = Path(__file__).parent / "demo" / "model"
DEMO_MODEL_NAME = "ballast-tiny"


@dataclass(frozen=True, slots=True)
class Flags:
    """Options of the command line. None keeps the value of the file, or the default."""

    model: str | None = None
    host: str | None = None
    port: int | None = None
    slots: int | None = None
    redis_url: str | None = None
    redis_password_file: Path | None = None
    queue: str | None = None


def compose(file: Path | None, flags: Flags, *, downloads: bool = True) -> WorkerConfig:
    """Return the configuration of the file, overridden by the flags. Without a model, use the small model.

    Without `downloads`, a remote model must be one that this process has downloaded.

    Raises:
        Usage: the file or the result is invalid. The message has one line per field.
        CliError: the model cannot be downloaded.
    """
    try:
        model = {"model": _model(flags)}
        base = WorkerConfig.load(file, model) if file else WorkerConfig.model_validate(model)
        data = base.model_dump(by_alias=True, exclude_unset=True)
        if flags.model and flags.model != base.model.uri:
            data["model"] = {"uri": flags.model}
        _put(data, "offline", {"queue": flags.queue})
        runtime = {"host": flags.host, "port": flags.port, "redisUrl": flags.redis_url}
        if flags.redis_url:
            data.get("runtime", {}).pop("redisUrlFile", None)
        _put(data, "runtime", runtime | {"redisPasswordFile": flags.redis_password_file})
        if flags.slots is not None:
            data["slots"] = flags.slots
        composed = _with_local_model(WorkerConfig.model_validate(data), downloads=downloads)
    except InvalidConfig as error:
        raise Usage(str(error)) from None
    except ValidationError as error:
        raise Usage(
            str(InvalidConfig("The configuration with these options", InvalidConfig.sentences(error)))
        ) from None
    _check_model(composed.model.uri)
    return composed


def serves(file: Path, config: WorkerConfig) -> bool:
    """Return whether a file on its own names the same model as `config`."""
    try:
        return WorkerConfig.load(file).model == config.model
    except InvalidConfig:
        return False


def _model(flags: Flags) -> dict[str, str]:
    return {"uri": flags.model} if flags.model else {"uri": str(DEMO_MODEL), "servedName": DEMO_MODEL_NAME}


def write(config: WorkerConfig, file: Path) -> None:
    """Write the file, which a worker watches."""
    write_private(file, config.dump())


def _put(data: dict[str, Any], section: str, values: dict[str, Any]) -> None:
    given = {key: value for key, value in values.items() if value is not None}
    if given:
        data[section] = data.get(section, {}) | given


def _with_local_model(config: WorkerConfig, *, downloads: bool) -> WorkerConfig:
    """Download a remote model, and return a configuration that serves the copy under the name of the original."""
    location = parse(config.model.uri, config.model.revision if config.model.uri.startswith("hf://") else "")
    if not location.is_remote:
        return config
    if not downloads and location not in _FETCHED:
        raise Usage(f"The model {location} waits for a restart, which downloads it.")
    copy = fetched(location)
    name = config.model.served_name or (location.path or location.root).rpartition("/")[2]
    model = config.model.model_copy(update={"uri": str(copy), "served_name": name, "revision": copy.name})
    return config.model_copy(update={"model": model})


_FETCHED: dict[Location, Path] = {}


def fetched(location: Location) -> Path:
    """Download a model to the user's cache, once per process: a branch that moves has no effect on a running worker."""
    if location not in _FETCHED:
        base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111  Path's would fail
        if base.startswith("~"):
            raise Usage(f"This user has no home directory for {location}. Set XDG_CACHE_HOME to a directory.")
        _FETCHED[location] = fetch_model(location, Path(), Path(base, "ballast", "models"))
    return _FETCHED[location]


def _check_model(uri: str) -> None:
    """Raise `Usage` for a wrong path before a process starts. The loader checks the content."""
    text = unquote(uri.removeprefix("file://")) if uri.startswith("file://") else uri
    path = Path(os.path.expanduser(text))  # noqa: PTH111  Path's fails on an unknown user
    if not (path / "config.json").is_file():
        found = "is a directory without config.json" if path.is_dir() else "is no directory"
        raise Usage(
            f"--model: {path} {found}. Name a checkpoint directory with config.json, *.safetensors, and tokenizer.json."
        )
