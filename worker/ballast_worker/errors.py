"""Errors of this package.

WorkerError            the process cannot start or go on; carries the exit code
├── MissingWorkerExtra       a package of the `worker` extra is not installed
├── AddressTaken       another process listens on the address
└── NotServed          the configuration asks for what this worker cannot do
Refused                an HTTP request that gets an error; carries status, code and field in OpenAI's words
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field


class WorkerError(Exception):
    """Base of what ends the process; `exit_code` follows sysexits.h."""

    exit_code = 70


class MissingWorkerExtra(WorkerError):
    """A package of the `worker` extra is not installed."""

    exit_code = 69


class AddressTaken(WorkerError):
    """Another process listens on the address, or the address is not this machine's."""

    exit_code = 71


class NotServed(WorkerError):
    """The configuration asks for what this worker cannot do."""

    exit_code = 78


@dataclass(eq=False)
class Refused(Exception):
    """An HTTP request that is answered with an error, in OpenAI's format."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    kind: str = "invalid_request_error"
    headers: Mapping[str, str] = field(default_factory=dict)

    def as_openai(self) -> bytes:
        """The body: `{"error": {...}}`."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()
