"""The operator's own settings, from the environment that the chart sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ballast_operator.errors import BadSetting

PREFIX = "BALLAST_"


class OperatorSettings(BaseModel):
    """Each field is the environment variable `BALLAST_<FIELD>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespace: str = Field(min_length=1)
    """Where the operator runs: its Lease and its own Redis Secret are there."""
    worker_image: str = Field(min_length=1)
    """Image of workers that name none."""
    identity: str = Field(default_factory=lambda: f"{socket.gethostname()}-{os.getpid()}", min_length=1)
    """Names this replica in the Lease; by default host name and process id."""
    lease_name: str = Field(default="ballast-operator", min_length=1)
    """Replicas with the same Lease are one operator."""
    redis_secret: str = ""
    """Secret in its namespace with `url` and `password` of the Redis for resources that name none; empty: none. While
    it is missing, those resources say so and nothing of them is changed."""
    runbook_base_url: str = Field(default="", pattern="^(|https?://.+)$")
    """URL of the runbook pages. Alerts link to them; without it they have no `runbook_url`."""
    turns_at_a_time: int = Field(default=16, ge=1, le=100)
    """Resources that are worked on at the same time."""
    look_seconds: float = Field(default=10, ge=1, le=60)
    """How often workers and queue of a resource are looked at in Redis."""
    audit_seconds: float = Field(default=600, ge=1)
    """How often the caches are compared with the cluster: one list of names per kind."""
    host: str = "0.0.0.0"  # noqa: S104 - a pod's probes come from outside
    """Address of metrics and probes."""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port of metrics and probes; 0 takes a free one and logs it."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> Self:
        """Take the settings from environment variables.

        Raises:
            BadSetting: one is missing or wrong; the message names each.
        """
        found = {
            name: environment[PREFIX + name.upper()]
            for name in cls.model_fields
            if PREFIX + name.upper() in environment
        }
        try:
            return cls.model_validate(found)
        except ValidationError as error:
            lines = []
            for problem in error.errors(include_url=False):
                name = str(problem["loc"][0])
                lines.append(f"  - {PREFIX}{name.upper()}: {problem['msg']} (found {found.get(name)!r})")
            raise BadSetting("the operator's environment is not complete or not valid:\n" + "\n".join(lines)) from None
