"""Rules across fields, said once: a CEL expression for the API server and a predicate for Python, with one message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Any, Literal

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

_FIGURE = re.compile(r" \(\{[^}]+\}\)")


@dataclass(frozen=True, slots=True)
class Rule:
    """What must hold for a section, in both languages.

    Attributes:
        cel: Expression over `self`, the section as written in YAML, defaults filled in.
        holds: The same over the pydantic model; a property test compares the two on a real API server.
        message: What was found, what was wanted, what to do. Figures stand as ` ({camelCase.path})`.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str

    def sentence(self, section: BaseModel) -> str:
        """The message with the figures of `section`."""
        parts = (text + (shown(section, path) if path else "") for text, path, _, _ in Formatter().parse(self.message))
        return "".join(parts)

    @property
    def plain(self) -> str:
        """The message without figures."""
        return _FIGURE.sub("", self.message)

    @property
    def expression(self) -> str | None:
        """The message as CEL, where it has figures.

        `format` and not `+`: the API server knows no bound for the cost of the latter.
        """
        parts = [(text.replace("%", "%%"), path) for text, path, _, _ in Formatter().parse(self.message)]
        paths = [f"self.{path}" for _, path in parts if path]
        if not paths:
            return None
        text = "".join(text + ("%s" if path else "") for text, path in parts)
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + f"'.format([{', '.join(paths)}])"


@dataclass(frozen=True, slots=True)
class Later:
    """A field that the design names and this version cannot serve.

    Attributes:
        kind: Its type in the schema, so that the API server can see it and refuse it.
        sentence: Why not, and what to do without it.
    """

    kind: Literal["string", "integer", "number", "object"]
    sentence: str

    def message(self, field: str) -> str:
        """The refusal of `field` (camelCase)."""
        return f"{field}: {self.sentence}"


def shown(section: BaseModel, path: str) -> str:
    """A figure as CEL's `format` shows it."""
    value: Any = section
    for part in path.split("."):
        value = getattr(value, to_snake(part))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
