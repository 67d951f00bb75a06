"""Errors of the command, and its exit codes.

CliError              1  the command failed
├── Usage             2  an option or a file is invalid
├── NotFound          3  no such job
├── Unreachable       4  Redis or the worker does not answer
│   └── SubmitterOnly    the user of Redis may only submit
└── NotNow            5  the state of the job does not allow it

130 is an interrupt (Ctrl-C). A message states what was found, what was expected, and what to do.
"""

from __future__ import annotations

EXIT_CODES = (
    "Exit codes: 0 success, 1 failure, 2 invalid option or file, 3 not found, 4 Redis or worker unreachable, "
    "5 not allowed in the state of the job, 130 interrupted."
)


class CliError(Exception):
    """Base class. The message goes to stderr, and `exit_code` is the exit code of the command."""

    exit_code = 1


class Usage(CliError):
    """An option, argument, or file is invalid."""

    exit_code = 2


class NotFound(CliError):
    """The queue has no such job."""

    exit_code = 3


class Unreachable(CliError):
    """Redis or the worker does not answer, or denies access."""

    exit_code = 4


class SubmitterOnly(Unreachable):
    """Redis knows the user, who may not call the functions of the queue, as a submitter may not."""


class NotNow(CliError):
    """The state of the job does not allow the operation."""

    exit_code = 5
