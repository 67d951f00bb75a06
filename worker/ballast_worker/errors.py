"""Errors of this package.

WorkerError            the process cannot start or continue; has the exit code
├── MissingWorkerExtra       a package of the `worker` extra is not installed
├── AddressTaken       another process listens on the address
└── NotServed          the configuration asks for something that this worker cannot do
Refused                an HTTP request gets an error; has status, code and field in OpenAI's format
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

NO_OFFLINE = "no_offline"
"""Code of the refusal of an offline request while `offline.maxPercent` is 0."""


class WorkerError(Exception):
    """Base of the errors that end the process. `exit_code` follows sysexits.h."""

    exit_code = 70


class MissingWorkerExtra(WorkerError):
    """A package of the `worker` extra is not installed."""

    exit_code = 69


class AddressTaken(WorkerError):
    """Another process listens on the address, or the address does not belong to this machine."""

    exit_code = 71


class NotServed(WorkerError):
    """The configuration asks for something that this worker cannot do."""

    exit_code = 78


@dataclass(eq=False)
class Refused(Exception):
    """The worker answers an HTTP request with an error in OpenAI's format."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    kind: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_openai(self) -> bytes:
        """Return the body: `{"error": {...}}`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()
