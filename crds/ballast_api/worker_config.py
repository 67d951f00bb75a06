"""The one configuration file of a worker: under `ballast up`, in a pod, and in tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Self

import yaml
from pydantic import Field, ValidationError

from ballast_api.base import ApiModel
from ballast_api.errors import InvalidConfig
from ballast_api.rules import Later, Rule
from ballast_api.sections import Cost, Engine, Limits, Model, Name, Offline, Slo


class Runtime(ApiModel):
    """Where this worker lives; written by the operator or `ballast up`, not by users."""

    rules = (
        Rule(
            "!(has(self.redisUrl) && has(self.redisUrlFile))",
            lambda runtime: runtime.redis_url is None or runtime.redis_url_file is None,
            "runtime.redisUrl and runtime.redisUrlFile both say where Redis is: keep one",
        ),
    )

    host: str = "127.0.0.1"
    """Address that HTTP listens on."""
    port: int = Field(default=8000, ge=0, le=65535)
    """0 takes a free port and prints it."""
    redis_url: str | None = None
    """`redis://`, `rediss://` or `unix://`; without it the worker serves online requests only."""
    redis_url_file: Path | None = None
    """Holds the URL in place of `redisUrl`, where it comes from a Secret; a change is taken up without a restart."""
    redis_password_file: Path | None = None
    """Holds the password, so that it stands in no URL and no process list; a change is taken up without a restart."""
    namespace: Name = "local"
    name: Name = "ballast"
    """With `namespace`: the resource this worker belongs to; names its queue by default."""
    worker_id: Name | None = None
    """Unique among the workers of the queue; by default host name and process id."""
    generation: int = Field(default=0, ge=0)
    """Generation of the resource that this configuration was rendered from."""
    created: float = Field(default=0, ge=0)
    """Creation time of that resource, Unix seconds; with `generation` it decides whose queue settings win."""
    api_keys_file: Path | None = None
    """YAML mapping from API key to tenant; where it is set, a request without a known key gets 401."""
    unready_seconds: float = Field(default=0, ge=0)
    """How long after SIGTERM new requests are still taken while `/ready` says no already, for a balancer that goes by
    it. In Kubernetes a preStop pause does this before the signal."""
    drain_seconds: float = Field(default=30, ge=0)
    """How long online requests may finish after SIGTERM."""


Slots = Annotated[int, Field(ge=1, le=4096)]


class WorkerConfig(ApiModel):
    """Everything a worker is told. Sections `slo`, `offline`, `limits` and `cost` are hot (but for `offline.queue`)."""

    later: ClassVar[Mapping[str, Later]] = {
        "ray": Later(
            "object", "serving under Ray Serve comes later; this version runs under its own server. Remove the section"
        )
    }

    model: Model
    engine: Engine = Engine()
    slots: Slots | None = None
    """Places in the running batch; by default what memory allows, at most 64 on CPU and 256 on a GPU."""
    slo: Slo = Slo()
    offline: Offline = Offline()
    limits: Limits = Limits()
    cost: Cost = Cost()
    runtime: Runtime = Runtime()

    @property
    def queue_name(self) -> str:
        """The queue this worker serves."""
        return self.offline.queue or f"{self.runtime.namespace}/{self.runtime.name}"

    @classmethod
    def parse(cls, text: str, source: str) -> Self:
        """Read YAML.

        Raises:
            InvalidConfig: says every field that is wrong, what was found there and what was wanted.
        """
        try:
            data = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise InvalidConfig(source, [str(error)]) from error
        if not isinstance(data, dict):
            raise InvalidConfig(source, [f"found {type(data).__name__}, wanted a mapping with at least `model.uri`"])
        try:
            return cls.model_validate(data)
        except ValidationError as error:
            raise InvalidConfig(source, InvalidConfig.sentences(error)) from error

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a YAML file; see `parse`."""
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidConfig(str(path), [str(error)]) from error
        return cls.parse(text, str(path))

    def dump(self) -> str:
        """Write YAML that `parse` reads back to an equal value."""
        data = self.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return yaml.safe_dump(data, sort_keys=False)
