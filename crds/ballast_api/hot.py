"""Hot fields: a running worker applies a change of them. A change of any other field needs a new process.

A field is hot if its model annotates it with `Hot`. Worker, operator and reference pages read that annotation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic_core import CoreSchema

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

HOT = "x-ballast-hot"
"""Marks a hot field in the JSON schema."""


@dataclass(frozen=True, slots=True)
class _Marker:
    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return handler(core) | {HOT: True}


_MARKER = _Marker()
Hot = Annotated[T, _MARKER]
"""`Hot[float]` is the type of a hot field."""


def with_hot_fields(cold: M, hot: M) -> M:
    """Return `cold` with the value that `hot` has in each hot field, at any depth."""
    update: dict[str, object] = {}
    for name, field in type(cold).model_fields.items():
        old, new = getattr(cold, name), getattr(hot, name)
        if _MARKER in field.metadata:
            update[name] = new
        elif isinstance(old, BaseModel) and isinstance(new, BaseModel):
            update[name] = with_hot_fields(old, new)
    return cold.model_copy(update=update)


def changed_fields(before: BaseModel, after: BaseModel, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that differ, as a user writes them, such as `engine.blockTokens`."""
    for name in type(before).model_fields:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            yield from changed_fields(old, new, f"{path}{to_camel(name)}.")
        elif old != new:
            yield f"{path}{to_camel(name)}"
