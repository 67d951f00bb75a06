"""What can go wrong between a caller and the queue.

QueueError
├── QueueUnavailable        Redis cannot be reached, or cannot serve right now: try again later
├── QueueForbidden          Redis refuses this user
├── QueueFull               Redis is out of memory and takes no more work
├── ServerUnfit             Redis is too old, or would evict keys
├── JobNotFound
├── JobStateConflict        the job is in a state that the call cannot change
└── InvalidSubmission       the caller's input is wrong
    ├── InvalidAddress      a URL that is no Redis address
    ├── InvalidJob          tenant, priority, deadline, key or queue name
    │   ├── UnknownTenant
    │   ├── DeadlinePassed
    │   └── EmptyJob
    └── InvalidBody         a request body that cannot be served; has `field` and `code`
        └── Unsupported     asks for something that is not there yet

Every message says what was found, what was wanted and what to do. What happens to single items is no exception but an
`Outcome`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence


class QueueError(Exception):
    """Base of all errors of this package."""


class QueueUnavailable(QueueError):
    """Redis cannot be reached or cannot serve right now; nothing is lost, the call may be repeated."""


class QueueForbidden(QueueError):
    """Redis refused the user, its password or a command."""


class QueueFull(QueueError):
    """Redis has no memory left for more work; what is running can still be finished."""


class ServerUnfit(QueueError):
    """The server would lose or refuse work; `problems` are sentences."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(problems))


class JobNotFound(QueueError):
    """No such job in this queue (or its results were kept long enough and are gone)."""

    def __init__(self, job_id: str, queue: str) -> None:
        self.job_id = job_id
        super().__init__(
            f"found no job {job_id!r} in queue {queue!r}: `ballast jobs` lists what is there; results are deleted "
            "some days after a job is over"
        )


class JobStateConflict(QueueError):
    """The job's state does not allow the call."""


class InvalidSubmission(QueueError):
    """The caller's input is wrong; nothing was changed."""


class InvalidAddress(InvalidSubmission):
    """Not the URL of a Redis or Valkey."""


class InvalidJob(InvalidSubmission):
    """A property of the whole job is wrong."""


class UnknownTenant(InvalidJob):
    """The queue declares its tenants and this is none of them."""


class DeadlinePassed(InvalidJob):
    """The deadline lies in the past by the server's clock."""


class EmptyJob(InvalidJob):
    """The input holds no line."""


class InvalidBody(InvalidSubmission):
    """A request body that cannot be served."""

    def __init__(self, field: str | None, message: str, code: str = "invalid_value") -> None:
        self.field = field
        self.message = message
        self.code = code
        super().__init__(message)

    def as_openai(self) -> dict[str, dict[str, str | None]]:
        """Give the answer's JSON as OpenAI's API writes it (HTTP status 400)."""
        return {
            "error": {
                "message": self.message,
                "type": "invalid_request_error",
                "param": self.field,
                "code": self.code,
            }
        }


class Unsupported(InvalidBody):
    """A known field with a value that Ballast does not serve yet."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message, "unsupported_parameter" if field else "unsupported_url")


def describe(value: object) -> str:
    """Name a JSON value that was found, short enough for a sentence."""
    match value:
        case None:
            return "null"
        case bool():
            return json.dumps(value)
        case int() | float():
            return f"the number {value}"[:80]
        case str():
            shown = value if len(value) <= 40 else value[:40] + "..."
            return f"the string {shown!r}"
        case list() | tuple():
            return f"a list of {len(value)}"
        case dict():
            return f"an object with {', '.join(repr(str(key)[:40]) for key in list(value)[:4]) or 'no fields'}"
    return type(value).__name__
