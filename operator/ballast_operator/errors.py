"""Errors of this package.

OperatorError
├── MissingExtra          a package of the `operator` extra is not installed
├── BadSetting            a setting of the operator is missing or invalid
├── Unplannable           the children of a resource cannot be computed from its spec
├── ClusterUnavailable    no answer, a busy answer (429) or a failed one (5xx): the reconciliation is retried
├── NameTaken             an object of another owner has the name of a child
├── LeftOver              a child of a deleted resource of the same name still exists
└── ClusterRefused        the API server refused the call
    ├── ObjectNotFound
    ├── Conflict          another writer changed the object, or owns the fields
    ├── Invalid           the object is invalid, for example because of `spec.template`
    └── Forbidden         the operator's role lacks a verb
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ballast_api.errors import InvalidConfig

P = ParamSpec("P")
T = TypeVar("T")


class OperatorError(Exception):
    """Base of this package's errors."""


class MissingExtra(OperatorError):
    """A package that the operator needs is not installed."""


class BadSetting(OperatorError):
    """A setting of the operator is missing or invalid."""


class Unplannable(OperatorError):
    """The children of a resource cannot be computed. The message quotes no value, and names the type of the cause."""

    def __init__(self, cause: Exception) -> None:
        super().__init__(
            f"the operator cannot compute the children from this spec ({type(cause).__name__}). Correct the spec. "
            "Until then, the children of this resource do not change"
        )


def computed(function: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T:
    """Call a pure function of a resource.

    Raises:
        InvalidConfig: the spec is invalid.
        Unplannable: the function failed on any other error.
    """
    try:
        return function(*arguments, **more)
    except InvalidConfig:
        raise
    except Exception as error:
        raise Unplannable(error) from error


class ClusterUnavailable(OperatorError):
    """The API server cannot serve the call now.

    `retry_after` is the delay in seconds that it asked for. `is_about_one` is True if only this call is known to fail.
    """

    def __init__(self, message: str, retry_after: float | None = None, *, is_about_one: bool = False) -> None:
        super().__init__(message)
        self.retry_after = retry_after
        self.is_about_one = is_about_one


class NameTaken(OperatorError):
    """An object of another owner has the name of a child. It is left as it is."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} exists, and Ballast does not own it for this resource; rename or delete it, or rename this "
            "resource"
        )


class LeftOver(OperatorError):
    """A child of a deleted resource of the same name still exists. Kubernetes deletes it."""


class ClusterRefused(OperatorError):
    """The API server refused a call. `message` is its own sentence."""

    def __init__(self, call: str, status: int, message: str) -> None:
        super().__init__(f"{call}: the API server answered {status}: {message}")
        self.status = status
        self.message = message


class ObjectNotFound(ClusterRefused):
    """The object or its kind does not exist."""


class Conflict(ClusterRefused):
    """The object changed, exists already, or another manager owns its fields."""


class Invalid(ClusterRefused):
    """The object that was sent is invalid."""


class Forbidden(ClusterRefused):
    """The operator's role does not allow the call."""
