"""Errors of the queue.

QueueError
├── QueueUnavailable        Redis is unreachable or cannot serve the call now: repeat it later
├── QueueForbidden          Redis refuses the user
│   └── CommandForbidden    the user may not run a command
│       └── CommandMissing  Redis lacks it for every user
├── QueueFull               Redis is out of memory and accepts no more work
├── ServerUnfit             Redis is too old, or evicts keys
├── LibraryUnfit            Redis lacks the functions of this version
├── RefusedCall             a function met a value that it cannot read, or the reply is too large
├── UnreadableValue         another version of Ballast stored it
├── ResultTooLarge          the result of an item is too long to be stored
├── JobNotFound             the queue has no such job
├── JobStateConflict        the state of the job does not allow the call
├── LinesLost               Redis lost lines of a job while more came
└── InvalidSubmission       the caller's input is wrong
    ├── InvalidAddress      the URL is no Redis address
    │   └── HostNotAdmitted
    └── InvalidJob          a tenant, priority, deadline, key or queue name is wrong
        ├── UnknownTenant
        ├── DeadlinePassed
        ├── EmptyJob
        └── OtherLines

Every message states what was found, what was wanted and what to do. The result of an operation on an item is an
`Outcome`, not an exception.
"""

from __future__ import annotations

from collections.abc import Sequence

from ballast_openai.errors import counted


class QueueError(Exception):
    """Base of all errors of this package."""


class QueueUnavailable(QueueError):
    """Redis is unreachable or cannot serve the call now. Nothing is lost: the caller may repeat the call."""


class QueueForbidden(QueueError):
    """Redis refused the user, the password or a command."""


class CommandForbidden(QueueForbidden):
    """The user may not run a command, or not on a key."""


class CommandMissing(CommandForbidden):
    """No user may run a command: the server does not know it."""


class QueueFull(QueueError):
    """Redis has no memory left for more work. Workers can still finish the items that they hold."""


class ServerUnfit(QueueError):
    """The server may lose or refuse work. `problems` are sentences."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("; ".join(problems))


class LibraryUnfit(QueueError):
    """The server has no functions of Ballast, or those of another version. Only an administrator may load them."""


class RefusedCall(QueueError):
    """A function failed at a value that it cannot read, or its reply is too large. Other calls may succeed."""


class UnreadableValue(QueueError):
    """Another version of Ballast stored a value that this one cannot read."""

    def __init__(self, place: str, field: Sequence[int | str] = ()) -> None:
        of = f" of {'.'.join(map(str, field))}" if field else ""
        super().__init__(
            f"{place}: found a value{of} that this version of Ballast cannot read: use the version that the workers run"
        )


class ResultTooLarge(QueueError):
    """The result of an item is too long to be stored."""

    def __init__(self, found: int, most: int) -> None:
        super().__init__(f"The answer has {found:,} bytes as JSON, and a job stores at most {most:,}.")


class JobNotFound(QueueError):
    """The queue has no such job, or the job was deleted with its results."""

    def __init__(self, job_id: str, queue: str) -> None:
        super().__init__(
            f"found no job {job_id!r} in queue {queue!r}: `ballast jobs` lists the jobs; a job and its results are "
            "deleted some days after its end, or by `ballast delete`"
        )


class JobStateConflict(QueueError):
    """The state of the job does not allow the call."""


class LinesLost(QueueError):
    """Redis lost lines of a job while more came, such as in a failover. Submit all lines again with the same key."""

    def __init__(self, job_id: str, num_kept: int, num_stored: int) -> None:
        super().__init__(
            f"job {job_id}: found {counted(num_kept, 'line')} of the {num_stored:,} that Redis had stored: it lost "
            "the others, such as in a failover"
        )


class InvalidSubmission(QueueError):
    """The caller's input is wrong. Nothing has changed."""


class InvalidAddress(InvalidSubmission):
    """The URL is not that of a Redis or Valkey server."""


class HostNotAdmitted(InvalidAddress):
    """The URL, or a redirection, names a host that a strict connection does not admit."""

    def __init__(self) -> None:
        super().__init__("Redis URL: the host is not admitted: use a host that the settings admit")


class InvalidJob(InvalidSubmission):
    """A property of the whole job is wrong."""


class UnknownTenant(InvalidJob):
    """The queue declares its tenants, and this one is not among them."""


class DeadlinePassed(InvalidJob):
    """The deadline has passed by the server's clock."""


class EmptyJob(InvalidJob):
    """The input has no line."""


class OtherLines(InvalidJob):
    """The idempotency key names a job with other lines."""

    def __init__(self, job_id: str, key: str, num_kept: int, num_found: int) -> None:
        self.job_id, self.key, self.num_kept, self.num_found = job_id, key, num_kept, num_found
        found = counted(num_found, "line") if num_found != num_kept else "other lines"
        super().__init__(
            f"key {key!r}: found {found}, expected the {num_kept:,} of {job_id}, which has this key: use another key "
            "for other lines"
        )
