"""Inputs as YAML that explains itself: every figure with what it means beside it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

_WIDTH = 44
"""Column of the comments."""


def worksheet(model: BaseModel) -> str:
    """Write a model with all its fields; reading it back gives the same."""
    return "\n".join(_lines(model)) + "\n"


def _lines(model: BaseModel) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        key = field.alias or name
        value = getattr(model, name)
        yield from _entry(key, value, _comment(field.description, value))


def _entry(key: str, value: Any, comment: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        yield _noted(f"{key}:", comment)
        yield from (f"  {line}" for line in _lines(value))
    elif isinstance(value, Mapping) and value:
        yield _noted(f"{key}:", comment)
        for name, inner in value.items():
            yield from (f"  {line}" for line in _entry(_scalar(name), inner, ""))
    elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
        yield _noted(f"{key}:", comment)
        for inner in value:
            first, *rest = _lines(inner)
            yield f"  - {first}"
            yield from (f"    {line}" for line in rest)
    else:
        yield _noted(f"{key}: {_scalar(value)}", comment)


def _comment(description: str | None, value: Any) -> str:
    """What stands beside a field: its own description, or that of the section it opens."""
    own = description or (type(value).__doc__ if isinstance(value, BaseModel) else None) or ""
    return own.strip().partition("\n")[0]


def _noted(line: str, comment: str) -> str:
    return f"{line:<{_WIDTH}}# {comment}" if comment else line


def _scalar(value: Any) -> str:
    """One value as YAML writes it in one line."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**9, allow_unicode=False)
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")


def _plain(value: Any) -> Any:
    """What YAML knows; a whole number without its `.0`."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return str(value) if isinstance(value, str) else value
