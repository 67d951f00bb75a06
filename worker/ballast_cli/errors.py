"""Errors of the command, and its exit codes.

CliError              1  what was asked for failed
├── Usage             2  an option or a file that cannot be taken
├── NotFound          3  no such job
├── Unreachable       4  Redis or the worker does not answer
└── NotNow            5  the job is in a state that does not allow it

130 is an interrupt (Ctrl-C). A message is one sentence or two: what was found, what was wanted, what to do.
"""

from __future__ import annotations

EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage or file, 3 not found, 4 Redis or worker unreachable, "
    "5 not possible in the job's state, 130 interrupted."
)


class CliError(Exception):
    """Base: its message goes to stderr, its code is the exit code."""

    exit_code = 1


class Usage(CliError):
    """An option, argument or file that cannot be taken."""

    exit_code = 2


class NotFound(CliError):
    """No such job in this queue."""

    exit_code = 3


class Unreachable(CliError):
    """Redis or the worker does not answer, or refuses us."""

    exit_code = 4


class NotNow(CliError):
    """The job's state does not allow it."""

    exit_code = 5
