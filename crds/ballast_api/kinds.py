"""Numbers, text and true or false are told apart: pydantic would take `slots: true` for 1 and `slots: "8"` for 8."""

from __future__ import annotations

import re
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

_PLAIN = re.compile(r"[+-]?[\d._]+(e[+-]?\d+)?|true|false|yes|no|on|off|t|f|y|n", re.IGNORECASE)
_NUMBERS = frozenset({int, float})


def mismatch(annotation: Any, value: object) -> str | None:
    """Say what a field of this type wants instead of `value`, where the two differ in kind; None where they do not."""
    kinds = _kinds(annotation)
    if isinstance(value, bool):
        return "wanted a number, not true or false" if kinds & _NUMBERS and bool not in kinds else None
    if isinstance(value, int | float):
        return "wanted true or false, not a number" if bool in kinds and not kinds & _NUMBERS else None
    if isinstance(value, str) and str not in kinds and kinds & {*_NUMBERS, bool} and _is_plain(value):
        return f"wanted {'a number' if kinds & _NUMBERS else 'true or false'}, not text: leave the quotes out"
    return None


def _is_plain(text: str) -> bool:
    """Whether it is a number, or true or false, in quotes; of other text pydantic says what is wrong."""
    return _PLAIN.fullmatch(text.strip()) is not None


def _kinds(annotation: Any) -> set[object]:
    """The types that a union is made of, their constraints left out."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in {Union, UnionType}:
        return set().union(*map(_kinds, get_args(annotation)))
    return {get_origin(annotation) or annotation}
