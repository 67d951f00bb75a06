"""Write a pydantic model as YAML, with the description of each field as a comment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel

_WIDTH = 44
"""Column at which comments start."""


def commented_yaml(model: BaseModel) -> str:
    """Return a model with all its fields as YAML. Reading it back gives an equal model."""
    return "\n".join(_lines(model)) + "\n"


def _lines(model: BaseModel) -> Iterator[str]:
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        yield from _entry(field.alias or name, value, _comment(field.description, value))


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
    """Return the comment of a field: its description, or the description of the section that it opens."""
    own = description or (type(value).__doc__ if isinstance(value, BaseModel) else None) or ""
    return own.strip().partition("\n")[0]


def _noted(line: str, comment: str) -> str:
    return f"{line:<{_WIDTH}}# {comment}" if comment else line


def _scalar(value: Any) -> str:
    """Return one value as YAML in one line."""
    text = yaml.safe_dump(_plain(value), default_flow_style=True, width=10**9, allow_unicode=False)
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")


def _plain(value: Any) -> Any:
    """Return a value of a type that YAML supports, with whole numbers as integers."""
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return int(value)
    return str(value) if isinstance(value, str) else value
