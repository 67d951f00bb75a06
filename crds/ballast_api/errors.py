"""Errors of this package.

ApiError
├── InvalidConfig   a configuration file that cannot be taken
└── NotStructural   a model that no CustomResourceDefinition can check: a mistake in this package
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import ValidationError


class ApiError(ValueError):
    """Base of this package's errors."""


class InvalidConfig(ApiError):
    """A configuration that cannot be taken; the message has one line per field that is wrong."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.source = source
        self.problems = tuple(problems)
        super().__init__(f"{source} is not a valid configuration:\n" + "\n".join(f"  - {p}" for p in problems))

    @staticmethod
    def sentences(error: ValidationError) -> list[str]:
        """One line per problem: where, what is wrong, what was found."""
        lines = []
        for problem in error.errors(include_url=False):
            where = ".".join(str(part) for part in problem["loc"]) or "the whole"
            found = problem["input"]
            shown = "" if isinstance(found, dict) else f" (found {found!r:.80})"
            lines.append(f"{where}: {problem['msg'].removeprefix('Value error, ')}{shown}")
        return lines


class NotStructural(ApiError):
    """A model that no CustomResourceDefinition can check."""
