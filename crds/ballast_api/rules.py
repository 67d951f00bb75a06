"""Rules over several fields: a CEL expression for the API server and a predicate for Python, with one message."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from string import Formatter
from typing import Any

from pydantic import BaseModel
from pydantic.alias_generators import to_snake

_FIGURE = re.compile(r" \(\{[^}]+\}\)")
_OLD = "oldSelf.value()"


@dataclass(frozen=True, slots=True)
class Rule:
    """A condition that a section must meet, in both languages.

    Attributes:
        cel: Expression over `self`, the section as written in YAML with defaults filled in.
        holds: The same condition over the pydantic model. A property test compares both on a real API server.
        message: What was found, what was expected, and what to do. Values appear as ` ({camelCase.path})`.
        stored: All fields of `self` that `cel` reads. An older version had no such rule, and its resources run. So a
            stored one may keep the values of these fields, and the operator reconciles it.
    """

    cel: str
    holds: Callable[[Any], bool]
    message: str
    stored: tuple[str, ...] = ()

    @property
    def admission(self) -> dict[str, Any]:
        """Return the condition as the API server reads it."""
        if not self.stored:
            return {"rule": self.cel}
        # Kubernetes 1.30 and newer know `optionalOldSelf`. They bound the cost of a comparison by its left side.
        kept = " && ".join(map(_is_kept, self.stored))
        return {"rule": f"({self.cel}) || (oldSelf.hasValue() && {kept})", "optionalOldSelf": True}

    def sentence(self, section: BaseModel) -> str:
        """Return the message with the values of `section`."""
        parts = (text + (shown(section, path) if path else "") for text, path, _, _ in Formatter().parse(self.message))
        return "".join(parts)

    @property
    def plain(self) -> str:
        """Return the message without values."""
        return _FIGURE.sub("", self.message)

    @property
    def expression(self) -> str | None:
        """Return the message as a CEL expression, or None if it contains no values.

        It uses `format`, because the API server cannot bound the cost of `+`.
        """
        parts = [(text.replace("%", "%%"), path) for text, path, _, _ in Formatter().parse(self.message)]
        paths = [f"self.{path}" for _, path in parts if path]
        if not paths:
            return None
        text = "".join(text + ("%s" if path else "") for text, path in parts)
        return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + f"'.format([{', '.join(paths)}])"


def _is_kept(field: str) -> str:
    """Return the CEL condition that a field has its stored value, or is absent as before."""
    parts = field.split(".")
    paths = [".".join(parts[:size]) for size in range(1, len(parts) + 1)]
    now, before = (" && ".join(f"has({whole}.{path})" for path in paths) for whole in ("self", _OLD))
    return f"({now} ? {before} && self.{field} == {_OLD}.{field} : !({before}))"


def shown(section: BaseModel, path: str) -> str:
    """Return a value as text, as `format` of CEL shows it."""
    value: Any = section
    for part in path.split("."):
        value = getattr(value, to_snake(part))
    return repr(value).removesuffix(".0") if isinstance(value, float) else str(value)
