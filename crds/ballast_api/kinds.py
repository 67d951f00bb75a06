"""Numbers, text and booleans are distinct here. Pydantic alone reads `slots: true` as 1, and `slots: "8"` as 8."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

_PLAIN = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?|true|false|yes|no|on|off|t|f|y|n", re.IGNORECASE)
_NUMBERS = frozenset({int, float})


def mismatch(annotation: Any, value: object) -> str | None:
    """Return a message if the kind of `value` does not fit the type of the field, else None."""
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        return "expected a number, not true or false" if kinds & _NUMBERS and bool not in kinds else None
    if isinstance(value, int | float):
        return "expected true or false, not a number" if bool in kinds and not kinds & _NUMBERS else None
    if isinstance(value, str) and str not in kinds and kinds & {*_NUMBERS, bool} and _is_plain(value):
        return f"expected {'a number' if kinds & _NUMBERS else 'true or false'}, not text. Remove the quotes"
    return None


def _is_plain(text: str) -> bool:
    """Return true for a number or boolean in quotes. Pydantic has a message for any other text."""
    return _PLAIN.fullmatch(text.strip()) is not None


def _kinds(annotation: Any) -> set[object]:
    """Return the types of a union without their constraints."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return set().union(*map(_kinds, get_args(annotation)))
    return {get_origin(annotation) or annotation}
