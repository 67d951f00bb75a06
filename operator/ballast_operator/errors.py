"""Errors of this package.

OperatorError
├── MissingExtra          a package of the `operator` extra is not installed
├── BadSetting            the operator's own settings cannot be taken
├── ClusterUnavailable    no answer, a busy answer (429) or a failed one (5xx): the turn is tried again
└── ClusterRefused        the API server understood and said no
    ├── NotFound
    ├── Conflict          somebody else was faster, or owns what is to be written
    ├── Invalid           the object itself is wrong, as where a template passes on what no pod can have
    └── Forbidden         the operator's role lacks a verb
"""

from __future__ import annotations


class OperatorError(Exception):
    """Base of this package's errors."""


class MissingExtra(OperatorError):
    """A package that the operator needs is not installed."""


class BadSetting(OperatorError):
    """A setting of the operator cannot be taken."""


class ClusterUnavailable(OperatorError):
    """The API server cannot serve right now.

    `retry_after` is what it asked for, in seconds; `is_about_one` where it failed at this call and may do others.
    """

    def __init__(self, message: str, retry_after: float | None = None, *, is_about_one: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_about_one = is_about_one


class ClusterRefused(OperatorError):
    """The API server refused a call; `message` is its own sentence."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"{what}: the API server answered {status}: {message}")
        self.status = status
        self.message = message


class NotFound(ClusterRefused):
    """There is no such object, or no such kind."""


class Conflict(ClusterRefused):
    """The object changed meanwhile, exists already, or another manager owns its fields."""


class Invalid(ClusterRefused):
    """The object that was sent is wrong."""


class Forbidden(ClusterRefused):
    """The operator's role does not allow the call."""
