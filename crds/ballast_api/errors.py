"""Errors of this package.

ApiError
├── InvalidConfig   an invalid configuration file or resource
└── NotStructural   a model that no CustomResourceDefinition can express: a mistake in this package
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError


class ApiError(ValueError):
    """Base of the errors of this package."""


class InvalidConfig(ApiError):
    """An invalid configuration. The message has one line per wrong field."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(f"{source} is not a valid configuration:\n" + "\n".join(f"  - {p}" for p in problems))

    @staticmethod
    def sentences(error: ValidationError) -> list[str]:
        """Return one line per problem: the field, the problem, and the value that was found."""
        lines = []
        for problem in error.errors(include_url=False):
            where = ".".join(str(part) for part in problem["loc"]) or "the document"
            found = problem["input"]
            shown = "" if isinstance(found, dict) else f" (found {found!r:.80})"
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}{shown}")
        return lines


class NotStructural(ApiError):
    """A model that no CustomResourceDefinition can express."""
