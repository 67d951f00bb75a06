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
    └── InvalidJob          tenant, priority, deadline, key or queue name
        ├── UnknownTenant
        ├── DeadlinePassed
        └── EmptyJob

Every message says what was found, what was wanted and what to do. What happens to single items is no exception but an
`Outcome`.
"""

from __future__ import annotations

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
