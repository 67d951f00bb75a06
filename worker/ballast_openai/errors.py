"""Errors of a request body.

InvalidBody        Ballast cannot serve the body; has `field` and `code`
└── Unsupported    the body asks for something that Ballast does not support yet

Every message states what was found and what was expected.
"""

from __future__ import annotations

import json


class InvalidBody(Exception):
    """Ballast cannot serve the request body."""

    def __init__(self, field: str | None, message: str, code: str = "invalid_value") -> None:
        self.field = field
        self.message = message
        self.code = code
        super().__init__(message)


class Unsupported(InvalidBody):
    """Ballast knows the field or the URL, and does not support its value yet."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(field, message, "unsupported_parameter" if field else "unsupported_url")


def describe(value: object) -> str:
    """Return a short description of a JSON value, for use in a sentence."""
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


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a number and its noun, such as `1 item` or `5,000 items`. The plural ends in `s` if none is given.

    With a verb, both forms are given: `counted(1, "item waits", "items wait")`.
    """
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {plural or f'{noun}s'}"
